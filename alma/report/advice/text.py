"""Parts of a document, as text for the terminal and as Markdown; numbers as text."""

from collections.abc import Sequence
from typing import NamedTuple

from alma.report import tables
from alma.report.advice.forecast import Array, interval

NO_EVIDENCE = "no evidence either way"


class DocumentPart(NamedTuple):
    """A heading with lines above and below a table, each of which may be missing."""

    heading: str
    above: Sequence[str] = ()
    table: tables.Table | None = None
    below: Sequence[str] = ()


def as_text(parts: Sequence[DocumentPart]) -> str:
    """For the terminal."""
    blocks = []
    for part in parts:
        table = [tables.as_text(part.table)] if part.table else []
        blocks.append("\n".join([part.heading, *part.above, *table, *part.below]))
    return "\n\n".join(blocks)


def as_markdown(parts: Sequence[DocumentPart]) -> str:
    """A document, whose title is the first heading."""
    blocks = []
    for i, part in enumerate(parts):
        table = [tables.as_markdown(part.table)] if part.table else []
        blocks += [f"{'##' if i else '#'} {part.heading}", *part.above, *table, *part.below]
    return "\n\n".join(blocks) + "\n"


def expected(draws: Array, mean: float | None = None) -> str:
    """Mean (None: that of the draws) and 90% interval, such as "24 [22.5, 25.8]"."""
    low, high = interval(draws)
    return f"{number(float(draws.mean() if mean is None else mean))} [{number(low)}, {number(high)}]"


def number(value: float) -> str:
    """Three digits, of thousands all."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
