"""Tables as text and Markdown."""

import html
from typing import NamedTuple

from alma.tables import Table, as_text


class TitledTable(NamedTuple):
    """A table with its title, and a note on its columns."""

    title: str
    cells: Table
    note: str

    def as_text(self) -> str:
        """Title, table and note for the terminal."""
        return "\n".join([self.title, as_text(self.cells), self.note])

    def as_markdown(self, level: str) -> list[str]:
        """The same as parts of a Markdown document; `level` are the marks of the heading, such as "##"."""
        return [f"{level} {markdown(self.title)}", as_markdown(self.cells), markdown(self.note)]


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in table[0][1:])]
    header, *body = ([markdown(cell).replace("|", "\\|") for cell in row] for row in table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))


def markdown(text: str) -> str:
    """Text from records in Markdown, where none of it is markup."""
    return html.escape(text, quote=False).replace("*", "\\*")
