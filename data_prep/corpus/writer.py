"""Documents as JSON lines, what was written, and the command that makes a stream of it."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import orjson

from alma.tables import as_text
from data_prep.dates import interval
from data_prep.fields import DatedText

_RARE = 10  # years with fewer than a tenth of the words of the largest are not where a stream starts
_LARGE = 200_000  # words from which a tokenizer of 8,000 tokens can be trained


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

    def add(self, words: int, moment: datetime | None) -> None:
        """Count a document."""
        self.documents += 1
        self.words += words
        if moment:
            self.first, self.last = min(self.first, moment), max(self.last, moment)
            self.years.setdefault(moment.year, Counter()).update(documents=1, words=words)


def write(
    documents: Iterable[DatedText], file: IO[bytes], left_out: Counter[str], most_words: int | None = None
) -> Written:
    """Write `{"date": ..., "text": ...}` for each document up to `most_words`; without `date` if it has none.

    Counts in `left_out` what has a date that `alma data` cannot read.
    """
    written = Written()
    for text, date, _ in documents:
        try:
            found = interval(date)
        except (ValueError, OverflowError):
            left_out["with an unreadable date"] += 1
            continue
        words = len(text.split())
        if most_words is not None and written.words + words > most_words:
            break
        record = {"text": text} if date is None else {"date": date, "text": text}
        file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        written.add(words, found and found[0])
    return written


def summary(written: Written, left_out: Mapping[str, int]) -> str:
    """Documents, words, dates and years, and what was left out."""
    dates = f", {written.first:%Y-%m-%d} to {written.last:%Y-%m-%d}" if written.years else ""
    lines = [f"{written.documents:,} documents, {written.words:,} words{dates}"]
    if counts := omissions(left_out):
        lines.append(f"left out: {counts}")
    if written.years:
        rows = [
            [str(year), f"{n['documents']:,}", f"{n['words']:,}"] for year, n in sorted(written.years.items())
        ]
        lines.append(as_text([["year", "documents", "words"], *rows]))
    return "\n".join(lines)


def omissions(left_out: Mapping[str, int]) -> str:
    """Such as "3 broken entries, 1 damaged files"; empty: nothing was left out."""
    return ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)


def next_command(name: str, path: Path, written: Written) -> str:
    """The line that makes a stream of a file, with sizes that it has enough words for."""
    line = f"alma data {shlex.quote(f'{name}={path}')} --out stream"
    if not written.years:
        # Four mega-batches, a test set of that size, and the validation set.
        words = _rounded(written.words / 6)
        sizes = f"--mega-batches 4 --words {_short(words)} --valid-words {_short(_rounded(words / 10))}"
        return f"{line} {sizes} --vocab-size {_vocabulary(words)}"
    largest = max(count["words"] for count in written.years.values())
    year, count = next(
        (year, count) for year, count in sorted(written.years.items()) if count["words"] * _RARE >= largest
    )
    start = f" --from {year}" if year > min(written.years) else ""
    held_out = _short(_rounded(largest / 100))
    return (
        f"{line} --by year{start} --merge-small --eval-words {held_out} --valid-words {held_out} "
        f"--vocab-size {_vocabulary(count['words'])}"
    )


def _rounded(number: float) -> int:
    """Rounded down to one digit, such as 40000; at least 1."""
    digits = str(max(1, int(number)))
    return int(digits[0]) * 10 ** (len(digits) - 1)


def _short(number: int) -> str:
    return f"{number // 1000}k" if number % 1000 == 0 else str(number)


def _vocabulary(words: int) -> int:
    return 8000 if words >= _LARGE else 2000
