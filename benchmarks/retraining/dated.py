"""Dated texts: JSON lines with `date` and `text`, packed with zstd."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class DatedText(NamedTuple):
    """A text and its date, such as "2013-05-31" or "2013-05"."""

    date: str
    text: str


def read_dated(path: Path) -> Iterator[DatedText]:
    """The texts of a file, in its order."""
    import zstandard  # optional

    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        for line in io.TextIOWrapper(stream, "utf-8"):
            document = json.loads(line)
            yield DatedText(document["date"], document["text"])
