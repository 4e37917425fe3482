"""Tables as text and Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from alma.escape import markdown
from alma.tables import Table, as_text


class TitledTable(NamedTuple):
    """A table with a title and a note on its columns; each may be empty."""

    title: str
    cells: Table
    note: str = ""
    above: Sequence[str] = ()  # lines between title and table

    def as_text(self) -> str:
        """Title, lines, table and note for the terminal."""
        parts = [self.title, *self.above]
        if self.cells:
            parts.append(as_text(self.cells))
        if self.note:
            parts.append(self.note)
        return "\n".join(parts)

    def as_markdown(self, level: str) -> list[str]:
        """The same as parts of a Markdown document, with a heading of this level, such as "##"."""
        parts = [f"{level} {markdown(self.title)}", *map(markdown, self.above)]
        if self.cells:
            parts.append(as_markdown(self.cells))
        lines = filter(None, self.note.split("\n"))
        return [*parts, *map(markdown, lines)]


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rows = []
    for cells in table:
        escaped = [markdown(cell).replace("|", "\\|") for cell in cells]
        rows.append(f"| {' | '.join(escaped)} |")
    rule = [":--", *("--:" for _ in table[0][1:])]
    rows.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(rows)
