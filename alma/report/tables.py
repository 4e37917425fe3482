"""Tables as text and Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from alma.escape import markdown
from alma.tables import Table, as_text


class TitledTable(NamedTuple):
    """A table with its title, and a note on its columns; or without one of these."""

    title: str
    cells: Table
    note: str = ""
    above: Sequence[str] = ()  # lines between title and table

    def as_text(self) -> str:
        """Title, lines, table and note for the terminal."""
        table = [as_text(self.cells)] if self.cells else []
        return "\n".join([self.title, *self.above, *table, *([self.note] if self.note else [])])

    def as_markdown(self, level: str) -> list[str]:
        """The same as parts of a Markdown document; `level` are the marks of the heading, such as "##"."""
        table = [as_markdown(self.cells)] if self.cells else []
        below = filter(None, self.note.split("\n"))
        return [f"{level} {markdown(self.title)}", *map(markdown, self.above), *table, *map(markdown, below)]


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in table[0][1:])]
    header, *body = ([markdown(cell).replace("|", "\\|") for cell in row] for row in table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))
