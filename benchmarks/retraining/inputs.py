"""Where the data of the streams lie, and how dated texts are read from them."""

import io
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from alma.errors import UserError

_FIRST_OF_CURL = "ae1912cb0d494b48d514d937826c9fe83ec96c4d"
"""Curl's first commit: a repository with it holds curl's whole history."""
HOW_TO_CLONE = "git clone --bare https://github.com/curl/curl curl.git, then give --curl curl.git"


@dataclass(frozen=True)
class Inputs:
    """Where the data lie."""

    data: Path
    """Root of dated/, MNIST/ and cifar-10-batches-bin/."""
    curl: Path | None = None
    """Git directory or working copy of curl."""

    def check(self) -> None:
        """UserError: `curl` is no repository with curl's whole history."""
        if self.curl is None:
            return
        if not self.curl.is_dir():
            raise UserError(f"--curl {self.curl}: no such folder: {HOW_TO_CLONE}")
        command = ["git", "-C", str(self.curl), "cat-file", "-e", _FIRST_OF_CURL]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise UserError(f"--curl {self.curl}: without curl's first commit: {HOW_TO_CLONE}")


class DatedText(NamedTuple):
    """A text and its date, such as "2013-05-31" or "2013-05"."""

    date: str
    text: str


def read_dated(path: Path) -> Iterator[DatedText]:
    """The texts of a file of JSON lines with `date` and `text`, packed with zstd, in its order."""
    import zstandard  # optional

    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        for line in io.TextIOWrapper(stream, "utf-8"):
            document = json.loads(line)
            yield DatedText(document["date"], document["text"])


def read_history(repository: Path) -> Iterator[DatedText]:
    """The messages of a git history without merges, newest first.

    CalledProcessError: git cannot read it.
    """
    form = "--format=%ad%x00%B%x00"
    command = ["git", "-C", str(repository), "log", "--no-merges", "--date=short", form]
    log = subprocess.run(command, capture_output=True, check=True).stdout
    fields = log.decode("utf-8", "replace").split("\0")
    for date, message in zip(fields[::2], fields[1::2], strict=False):
        yield DatedText(date.strip(), message)
