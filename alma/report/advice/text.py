"""Parts of a document, as text for the terminal and as Markdown; numbers as text."""

from collections.abc import Sequence
from typing import NamedTuple

from alma.report import tables
from alma.report.age import MeanOverSeeds

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


def with_interval(value: MeanOverSeeds, factor: float = 1.0) -> str:
    """In multiples of 1 / factor, such as "24 [22.5, 25.8]"; "24 [?]" without an interval."""
    mean, low, high = (number(factor * each) for each in value)
    return f"{mean} [{low}, {high}]" if value.low <= value.high else f"{mean} [?]"


def number(value: float) -> str:
    """Three digits, of thousands all."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
