"""Tables as text and Markdown."""

import html
import shutil
import sys
import textwrap
from typing import NamedTuple

from alma.tables import Table, as_text


class TitledTable(NamedTuple):
    """A table with its title, and a note on its columns."""

    title: str
    cells: Table
    note: str

    def as_text(self) -> str:
        """Title, table and note for the terminal."""
        return "\n".join([self.title, for_terminal(self.cells), self.note])

    def as_markdown(self, level: str) -> list[str]:
        """The same as parts of a Markdown document; `level` are the marks of the heading, such as "##"."""
        return [f"{level} {markdown(self.title)}", as_markdown(self.cells), markdown(self.note)]


def for_terminal(table: Table) -> str:
    """The table as text, for a terminal in lines that fit: what all rows share first, then blocks of columns.

    Each block repeats the first column. For a file or a pipe the table stays whole.
    """
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or _width(table) <= width:
        return as_text(table)
    first, *others = zip(*table, strict=True)
    same = [column for column in others if len(column) > 2 and len(set(column[1:])) == 1]
    shared = ", ".join(f"{name} {value}" for name, value, *_ in same if value)
    blocks: list[list[tuple[str, ...]]] = [[first]]
    for column in others:
        if column not in same:
            wider = [*blocks[-1], column]
            fits = len(blocks[-1]) == 1 or _width(_transposed(wider)) <= width
            blocks[-1:] = [wider] if fits else [blocks[-1], [first, column]]
    parts = [textwrap.fill(f"all rows: {shared}", width)] if shared else []
    return "\n".join([*parts, "\n\n".join(as_text(_transposed(block)) for block in blocks)])


def _transposed(columns: list[tuple[str, ...]]) -> Table:
    return [list(row) for row in zip(*columns, strict=True)]


def _width(table: Table) -> int:
    """Characters of the longest line."""
    return max(map(len, as_text(table).splitlines()))


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in table[0][1:])]
    header, *body = ([markdown(cell).replace("|", "\\|") for cell in row] for row in table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))


def markdown(text: str) -> str:
    """Text from records in Markdown, where none of it is markup."""
    return html.escape(text, quote=False).replace("*", "\\*")
