"""Commit messages of a git repository, dated.

The author's date is used, since the message was written on that day. A rebase, a cherry-pick or a
conversion from another system gives many commits the same committer date, which would put years of
text into one period.
"""

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

from alma.errors import UserError
from alma.provenance import git_environment
from data_prep.compressed import Document

_FIELDS = ("%aI", "%at", "%(trailers)", "%B")
_LOG = (
    "-c",
    "log.showSignature=false",
    "log",
    "-z",
    "--no-merges",
    "--encoding=UTF-8",
    "--no-color",
)
_SIGNATURE = re.compile(
    r"^[ \t]*[a-z]+(?:-[a-z]+)*-by:.*@.*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE
)
"""Lines such as Signed-off-by that are not in the last paragraph, where git finds trailers."""


def documents(source: str, left_out: Counter[str]) -> Generator[Document, None, None]:
    """Yield the messages of the commits before HEAD, without merges, newest first.

    Trailers, as `git interpret-trailers` finds them, and lines `...-by: NAME <ADDRESS>` are
    removed. Bytes that are not UTF-8 are replaced by U+FFFD. Memory: one message. UserError: no
    git, no repository, or no commit.
    """
    if not Path(source).is_dir():
        remedy = "give a repository on this machine, or `git clone` it"
        raise UserError(f"{source}: no such folder; {remedy}")
    if not shutil.which("git"):
        raise UserError("git is not installed, or not in PATH")
    fields = _git(source, *_LOG, f"--format={'%x00'.join(_FIELDS)}", "HEAD", "--")
    for date, seconds, *texts in zip(fields, fields, fields, fields, strict=False):
        trailers, message = (text.decode(errors="replace").rstrip() for text in texts)
        text = _SIGNATURE.sub("", message.removesuffix(trailers)).strip()
        if not text:
            left_out["empty messages"] += 1
            continue
        yield Document(text, _iso_date(date, seconds))


def _iso_date(date: bytes, seconds: bytes) -> str:
    """The date of a commit in ISO 8601; unchanged if it cannot be read. `seconds`: since 1970."""
    text = date.decode(errors="replace")
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:  # a time zone that does not exist, as in commits of broken programs
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return datetime.fromtimestamp(int(seconds), UTC).isoformat()
    return text


def _git(folder: str, *words: str) -> Generator[bytes, None, None]:
    """The output of a git command in a folder, cut at each NUL. UserError: it fails."""
    # For a partial clone, do not fetch missing objects from the network.
    offline = git_environment() | {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(  # if the caller stops early, git ends by SIGPIPE
            ["git", *words], cwd=folder, env=offline, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            assert process.stdout
            last = b""
            while block := process.stdout.read(1 << 20):
                *fields, last = (last + block).split(b"\0")
                yield from fields
            if last:
                yield last
        if process.returncode:
            errors.seek(0)
            message = errors.read().decode(errors="replace")
            if "bad revision 'HEAD'" in message:
                raise UserError(f"{folder}: a repository without commits")
            reason = message.partition("fatal: ")[2] or message
            raise UserError(f"{folder}: git failed ({reason})")
