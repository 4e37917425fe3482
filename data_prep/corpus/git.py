"""Commit messages of a git repository, dated.

The date is the author's: the message is of that day. A rebase, a cherry-pick or a conversion from another
system gives many commits one committer date, which would put years of text into one period.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from alma.errors import UserError
from data_prep.fields import DatedText

_FIELDS = ("%aI", "%at", "%(trailers)", "%B")
_LOG = ("-c", "log.showSignature=false", "log", "-z", "--no-merges", "--encoding=UTF-8", "--no-color")
_BLOCK = 2**20
_SIGNATURE = re.compile(r"^[ \t]*[a-z]+(?:-[a-z]+)*-by:.*@.*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
"""Lines such as Signed-off-by that are not in the last paragraph, where git finds trailers."""
_ELSEWHERE = ("GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")
"""Variables that lead git to another repository than that of its directory; hooks of git have them."""


def documents(source: str, left_out: Counter[str]) -> Generator[DatedText, None, None]:
    """The messages of the commits before HEAD, merges left out, newest first; memory: that of one message.

    Trailers, as `git interpret-trailers` finds them, and lines `...-by: NAME <ADDRESS>` are removed. What is
    not UTF-8 is replaced by U+FFFD. UserError: no git, no repository, or no commit.
    """
    if not Path(source).is_dir():
        raise UserError(f"{source}: no such folder; give a repository on this machine, or `git clone` it")
    if not shutil.which("git"):
        raise UserError("git is not installed, or not in PATH")
    with _git(source, "rev-parse", "--is-shallow-repository") as output:
        shallow = output.read().strip() == b"true"
    if shallow:
        print(
            f"warning: {source}: a shallow clone, which lacks old commits; `git fetch --unshallow` gets them",
            file=sys.stderr,
        )
    with _git(source, *_LOG, f"--format={'%x00'.join(_FIELDS)}", "HEAD", "--") as output:
        fields = _separated(output)
        for date, seconds, trailers, message in zip(fields, fields, fields, fields, strict=False):
            text = _text(message.decode(errors="replace"), trailers.decode(errors="replace"))
            if text:
                yield DatedText(text, _date(date.decode(errors="replace"), seconds), None)
            else:
                left_out["empty messages"] += 1


@contextlib.contextmanager
def _git(folder: str, *words: str) -> Iterator[IO[bytes]]:
    """The output of a command of git in a folder, for a block that reads all of it. UserError: it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}  # offline, also in a partial clone
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            ["git", *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout
        try:
            yield process.stdout
        finally:
            process.stdout.close()  # git ends by SIGPIPE if there is more
            code = process.wait()
        if code:
            errors.seek(0)
            raise UserError(f"{folder}: {_reason(errors.read().decode(errors='replace'))}")


def _reason(errors: str) -> str:
    """The first line of git's messages that says what is wrong."""
    lines = [line.partition(": ")[2] for line in errors.splitlines() if line.startswith("fatal: ")]
    if any("bad revision 'HEAD'" in line for line in lines):
        return "a repository without commits"
    if any("not a git repository" in line for line in lines):
        return "not a git repository"
    return f"git failed ({(lines or errors.splitlines() or ['no message'])[0]})"


def _separated(file: IO[bytes]) -> Iterator[bytes]:
    """What is before each NUL."""
    rest = b""
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(b"\0")
        yield from whole


def _text(message: str, trailers: str) -> str:
    return _SIGNATURE.sub("", message.rstrip().removesuffix(trailers.rstrip())).strip()


def _date(date: str, seconds: bytes) -> str:
    """ISO 8601; with UTC in place of a time zone that does not exist, as commits of broken programs have."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(date).isoformat()
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(int(seconds), UTC).isoformat()
    return date
