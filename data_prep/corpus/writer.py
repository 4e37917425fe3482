"""Documents as JSON lines, and what was written."""

import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import orjson

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.tables import as_text
from data_prep.compressed import Document
from data_prep.dates import interval

STDOUT = "-"


@dataclass
class Written:
    """What `write` has written. Dates are those of UTC."""

    documents: int = 0
    words: int = 0
    """Separated by white space."""
    first: datetime = datetime.max
    last: datetime = datetime.min
    years: dict[int, Counter[str]] = field(default_factory=dict)
    """`documents` and `words` of each year; empty: the documents have no dates."""


def write(
    documents: Generator[Document, None, None],
    out: str,
    left_out: Counter[str],
    most: int | None = None,
) -> Written:
    """Write `{"date": ..., "text": ...}` for each document up to `most` words; without `date` if it has none.

    Counts in `left_out` what has a date that `alma data` cannot read. A file with the same bytes stays
    untouched: a stream made from it would not match a newer one. UserError: a bad `out`, or no document.
    """
    from tqdm import tqdm

    written = Written()
    hidden = True if out == STDOUT and sys.stdout.isatty() else None  # None: if stderr is no terminal
    with (
        closing(documents),
        tqdm(documents, unit=" documents", disable=hidden, leave=False) as bar,
        _opened(out) as file,
    ):
        for text, date, _ in bar:
            try:
                found = interval(date)
            except (ValueError, OverflowError):
                left_out["with an unreadable date"] += 1
                continue
            words = len(text.split())
            if most is not None and written.words + words > most:
                break
            record = {"text": text} if date is None else {"date": date, "text": text}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            written.documents += 1
            written.words += words
            if found:
                moment, _ = found
                written.first, written.last = min(written.first, moment), max(written.last, moment)
                written.years.setdefault(moment.year, Counter()).update(documents=1, words=words)
        if not written.documents:
            raise UserError(f"no document to write (left out: {omissions(left_out) or 'none'})")
    return written


@contextmanager
def _opened(out: str) -> Iterator[IO[bytes]]:
    if out == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    make_directory(Path(out).parent)
    with atomic_write(out, "wb", keep_same=True) as file:
        yield file


def summary(written: Written, left_out: Mapping[str, int]) -> str:
    """Documents, words, dates and years, and what was left out."""
    dates = f", {written.first:%Y-%m-%d} to {written.last:%Y-%m-%d}" if written.years else ""
    lines = [f"{written.documents:,} documents, {written.words:,} words{dates}"]
    if counts := omissions(left_out):
        lines.append(f"left out: {counts}")
    if written.years:
        rows = [[f"{year}", f"{n['documents']:,}", f"{n['words']:,}"] for year, n in written.years.items()]
        lines.append(as_text([["year", "documents", "words"], *sorted(rows)]))
    return "\n".join(lines)


def omissions(left_out: Mapping[str, int]) -> str:
    """Such as "3 broken entries, 1 damaged files"; empty: nothing was left out."""
    return ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
