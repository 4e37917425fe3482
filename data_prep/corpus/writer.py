"""Documents as JSON lines."""

from collections import Counter
from collections.abc import Generator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import orjson

from alma.dates import interval
from alma.errors import UserError
from alma.files import atomic_write, make_directory
from data_prep.compressed import Document


def write(
    documents: Generator[Document, None, None],
    out: str,
    left_out: Counter[str],
    most: int | None = None,
) -> str:
    """Write `{"date": ..., "text": ...}` for each document up to `most` words; without `date` if it has none.

    Returns a summary, with dates in UTC. `left_out` gains documents whose date `alma data` cannot read. The
    same bytes leave a file untouched: a stream made from it would not match a newer one. UserError: a bad
    `out`, or no document.
    """
    from tqdm import tqdm

    count = words = 0
    first, last = datetime.max, datetime.min
    make_directory(Path(out).parent)
    with (
        closing(documents),
        tqdm(documents, unit=" documents", disable=None, leave=False) as bar,
        atomic_write(out, "wb", keep_same=True) as file,
    ):
        for text, date, _ in bar:
            try:
                found = interval(date)
            except (ValueError, OverflowError):
                left_out["with an unreadable date"] += 1
                continue
            size = len(text.split())
            if most is not None and words + size > most:
                break
            record = {"text": text} if date is None else {"date": date, "text": text}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
            words += size
            if found:
                first, last = min(first, found[0]), max(last, found[0])
        omitted = ", ".join(f"{number:,} {what}" for what, number in left_out.items() if number)
        if not count:
            raise UserError(f"no document to write (left out: {omitted or 'none'})")
    dates = f", {first:%Y-%m-%d} to {last:%Y-%m-%d}" if first <= last else ""
    return f"{count:,} documents, {words:,} words{dates}" + (f"\nleft out: {omitted}" if omitted else "")
