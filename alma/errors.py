"""Command lines: parsing, and errors as a single line with exit code 2."""

import argparse
import difflib
import errno
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


class UserError(Exception):
    """Input that only the user can fix; the message names the problem and the fix."""


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError, with a hint for a misspelt option, in place of printing its usage."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):
        """Keep the words: argparse passes only a message to `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unrecognized = message.partition("unrecognized arguments: ")[2].split()
        # A required option may be present but misspelt.
        words = unrecognized or (self._words if "arguments are required" in message else ())
        names = (word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", words))
        hints = [self.suggest(name) for name in dict.fromkeys(names) if name.startswith("--")]
        hint = " ".join(filter(None, hints))
        raise UserError(f"{message}{hint and f' ({hint})'}; see `{self.prog} --help`")

    def suggest(self, name: str) -> str:
        """Such as "did you mean --out?"; empty if no option is close."""
        known = self._option_string_actions
        if name in known or (self.allow_abbrev and any(each.startswith(name) for each in known)):
            return ""
        match = closest(name, known)
        return f"did you mean {match}?" if match else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` that `word` most likely misspells; None if none is close."""
    return next(iter(difflib.get_close_matches(word, known, 1, cutoff=0.75)), None)


class InvalidNumbers(argparse.ArgumentTypeError, UserError):
    """Text that is not a list of numbers: argparse names the option, other callers raise it as it is."""


def number_list(text: str, repeats: bool = False) -> list[int]:
    """Parse "0-2,5" as [0, 1, 2, 5]: whole numbers >= 0 and ascending ranges, in the given order.

    Usable as argparse's `type`. Later duplicates are dropped unless `repeats`. Raises InvalidNumbers.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidNumbers(f"{part!r}: a whole number, a list such as 1,5 or a range such as 0-2")
        if dash and int(last) < int(first):
            raise InvalidNumbers(f"{part}: a range goes up: give {last}-{first}")
        found += range(int(first), int(last or first) + 1)
    return found if repeats else list(dict.fromkeys(found))


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a `main`: user errors and full or read-only disks end with one line and exit code 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except UserError as error:
            fail(str(error))
        except BrokenPipeError:  # the reader of our output ended first (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            fail(f"{error.filename or 'cannot write'}: {error.strerror}; fix this and rerun the command")
        except KeyboardInterrupt:
            print("interrupted; rerun the same command to resume", file=sys.stderr)
            sys.exit(130)

    return run


def fail(message: str) -> NoReturn:
    """Print `error: message` as one line on stderr and exit with code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
