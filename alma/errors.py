"""One way to end on bad input: a single clear line and exit code 2."""

import argparse
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


class UserError(Exception):
    """Input that only the user can mend; the message says what is wrong and how to mend it."""


class Parser(argparse.ArgumentParser):
    """argparse without its page of usage: a wrong command line is a UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Turn `main` into a command: user errors and a full disk become one line and exit code 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except UserError as error:
            fail(str(error))
        except BrokenPipeError:  # the reader of our output has left (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            fail(f"{error.filename or 'cannot write'}: {error.strerror}; mend that and run the same again")
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            sys.exit(130)

    return run


def fail(message: str) -> NoReturn:
    """Print `error: message` on stderr, on one line, and exit with code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
