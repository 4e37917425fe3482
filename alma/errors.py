"""Command lines: parsing, and errors as a single line with exit code 2."""

import argparse
import difflib
import errno
import functools
import importlib.util
import itertools
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from alma import escape

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (*_FULL, errno.EACCES, errno.EROFS, errno.EFBIG)
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE)
_SCALE = {"": 1} | {suffix: 10 ** (3 * k) for k, suffix in enumerate("kMGTPE", start=1)}
_COLUMNS = 100  # width of help texts; longer lines are hard to read
_SHOWN = 12  # most choices that an error lists
_MOST_NUMBERS = 100_000  # most numbers in a range such as 0-9
EXTRAS = {
    "corpus": ("sentencepiece", "regex", "zstandard"),
    "text": ("fairseq", "fairscale", "torch", "omegaconf", "safetensors", "tensorboardX"),
    "images": ("torch", "torchvision", "PIL", "sklearn", "safetensors"),
    "cluster": ("submitit",),
    "transformers": ("transformers", "accelerate", "torch", "safetensors"),
    "mlflow": ("mlflow",),
}
"""Optional dependencies of ALMA, and what its modules import of them without asking first."""


class UserError(Exception):
    """Input that only the user can fix; the message names the problem and the fix."""


class HelpFormatter(argparse.HelpFormatter):
    """Help in at most 100 columns; a text of several lines keeps its line breaks."""

    def __init__(self, prog: str, **settings: Any):
        width = min(_COLUMNS, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, **{"max_help_position": 28, "width": width, **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError, with a hint for a misspelt word, and prints no usage."""

    _words: Sequence[str] = ()

    def __init__(
        self, *, prog: str, other: str = "", other_flags: Collection[str] = (), **settings: Any
    ):
        """`prog`: the program in help and errors, unless it runs as a subcommand of `alma`.

        `other`: the program whose flags follow `--`; `other_flags`: some of them, for hints.
        """
        self._other = other
        self._other_flags = other_flags
        if sys.argv[0].startswith("alma "):  # set by alma.__main__
            prog = sys.argv[0]
        super().__init__(**{"prog": prog, "formatter_class": HelpFormatter, **settings})

    def parse_known_args(self, args=None, namespace=None):
        """Keep the words: argparse passes only a message to `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            problem = f"invalid choice: {value!r} ({hint(str(value), map(str, action.choices))})"
            raise argparse.ArgumentError(action, problem)

    def error(self, message: str) -> NoReturn:
        flags = self._option_string_actions
        words = message.partition("unrecognized arguments: ")[2].split()
        if "arguments are required" in message:  # the missing one may be there, misspelt
            words = list(itertools.takewhile(lambda word: word != "--", self._words))
        hints = []
        for name in dict.fromkeys(word.partition("=")[0] for word in words):
            if name in flags or not name.startswith("--"):
                continue
            if self.allow_abbrev and any(flag.startswith(name) for flag in flags):
                continue
            meant = closest(name, [*flags, *self._other_flags])
            if meant in flags:
                hints.append(f"did you mean {meant}?")
            elif self._other:
                subject = f"{meant} is" if meant else f"if {name} is"
                hints.append(f"{subject} a flag of {self._other}: put it after `--`")
        hint = f" ({' '.join(hints)})" if hints else ""
        raise UserError(f"{message}{hint}; see `{self.prog} --help`")


def closest(word: str, names: Iterable[str]) -> str | None:
    """The member of `names` that `word` most likely misspells; None if none is close."""
    return next(iter(difflib.get_close_matches(word, names, 1, cutoff=0.75)), None)


def hint(word: str, names: Iterable[str]) -> str:
    """What to write for an unknown word: "did you mean gmoe?", else "choose from sm, ens, gmoe"."""
    choices = list(names)
    meant = closest(word, choices)
    if meant:
        return f"did you mean {meant}?"
    text = f"choose from {', '.join(choices[:_SHOWN])}"
    return f"{text} and more" if len(choices) > _SHOWN else text


def count(text: str) -> int:
    """An argparse type: a positive whole number such as 440000000, 440_000_000 or 440M."""
    match = re.fullmatch(r"([\d_]*(?:\.\d+)?)([kMGTPE]?)", text)
    number = float(match[1].replace("_", "") or 0) * _SCALE[match[2]] if match else 0
    if not 1 <= number < math.inf or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive whole number such as 500000 or 0.5M"
        )
    return int(number)


class InvalidNumbers(argparse.ArgumentTypeError, UserError):
    """Text that is no list of numbers: argparse names the option, other callers raise it as is."""


def number_list(text: str, repeats: bool = False) -> list[int]:
    """Parse "0-2,5" as [0, 1, 2, 5]: whole numbers >= 0 and ascending ranges, in the given order.

    Usable as argparse's `type`. Later duplicates are dropped unless `repeats`. Raises
    InvalidNumbers.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise InvalidNumbers(
                f"{part!r}: a whole number, a list such as 1,5 or a range such as 0-2"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise InvalidNumbers(f"{part}: a range goes up: give {last}-{first}")
        if last - first >= _MOST_NUMBERS:
            raise InvalidNumbers(f"{part}: more than {_MOST_NUMBERS:,} numbers")
        numbers += range(first, last + 1)
    return numbers if repeats else list(dict.fromkeys(numbers))


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a `main` so that errors of the user end with one line and exit code 2.

    These are UserError, a full or read-only disk, and a folder or a loop of links where a file is
    expected. Control characters in the output are escaped.
    """

    @functools.wraps(main)
    def run() -> None:
        with redirect_stdout(escape.Output(sys.stdout)), redirect_stderr(escape.Output(sys.stderr)):
            end_in_one_line()

    def end_in_one_line() -> None:
        try:
            main()
        except UserError as error:
            fail(str(error))
        except BrokenPipeError:  # the reader of our output ended first (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except ImportError as error:
            # Ctrl-C while a compiled module starts
            if isinstance(error.__cause__, KeyboardInterrupt):
                _interrupted()
            package = (error.name or "").partition(".")[0]
            extras = [extra for extra, names in EXTRAS.items() if package in names]
            if not isinstance(error, ModuleNotFoundError) or not extras:
                raise
            extra = extras[0] if len(extras) == 1 else "all"
            fail(_lacks(package, "this", extra))
        except OSError as error:
            # shutil.rmtree closes a descriptor twice
            if isinstance(error.__context__, KeyboardInterrupt):
                _interrupted()
            if error.errno not in (*_UNWRITABLE, *_NO_FILE):
                raise
            place = error.filename or "cannot write"
            remedy = "free some space there" if error.errno in _FULL else "fix this"
            fail(f"{place}: {error.strerror}; {remedy} and rerun the command")
        except KeyboardInterrupt as stop:
            _interrupted(*stop.args)

    return run


def interrupt(number: int, frame: object = None) -> NoReturn:
    """A signal handler: end as on Ctrl-C, with exit code 128 + the signal's number."""
    raise KeyboardInterrupt(number)


def require_package(name: str, user: str, extra: str = "corpus") -> None:
    """Raise a UserError if the package `name`, which `user` needs, is not installed.

    The message names `extra`, the optional dependencies of ALMA that include it.
    """
    if importlib.util.find_spec(name) is None:
        raise UserError(_lacks(name, user, extra))


def require_extra(extra: str, user: str) -> None:
    """Raise a UserError if a package of EXTRAS[extra], all of which `user` needs, is missing."""
    for name in EXTRAS[extra]:
        require_package(name, user, extra)


def _lacks(name: str, user: str, extra: str) -> str:
    return f"{user} needs {name}; pip install 'alma-macroscale[{extra}]'"


def _interrupted(number: int = signal.SIGINT) -> NoReturn:
    print("interrupted; rerun the same command to resume", file=sys.stderr)
    sys.exit(128 + number)


def fail(message: str) -> NoReturn:
    """Print `error: message` as one line on stderr and exit with code 2."""
    print(f"error: {escape.terminal(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)
