"""Tables as text, Markdown, CSV and LaTeX, and the layout of the paper's tables beside our numbers."""

import csv
import html
import io
import itertools
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


class PaperCell(NamedTuple):
    """A cell of a `PaperTable`, all as text: what is shown, and the numbers of CSV; "" for none."""

    text: str = ""
    number: str = ""
    deviation: str = ""
    paper: str = ""


class Line(NamedTuple):
    """A row of a `PaperTable`; text omits the first name of a row that is `continued` from the one above."""

    names: list[str]
    cells: list[PaperCell]
    block: str  # rows of one learner, between rules
    continued: bool = False


class PaperTable(NamedTuple):
    """A table in the paper's layout: columns of names, then the same columns of cells for each group."""

    title: str
    names: list[str]
    groups: list[str]
    columns: list[str]
    lines: list[Line]
    notes: list[str]

    @property
    def rows(self) -> Table:
        """Header and lines as text; columns are preceded by their group if there are several."""
        prefixes = [f"{group} " if len(self.groups) > 1 else "" for group in self.groups]
        rows = [[*self.names, *(prefix + column for prefix in prefixes for column in self.columns)]]
        for line in self.lines:
            first = "" if line.continued else line.names[0]
            rows.append([first, *line.names[1:], *(cell.text for cell in line.cells)])
        return rows

    @property
    def ends(self) -> list[int]:
        """Indices of the lines above a rule: the last line of each block, except the last block."""
        return [i for i, (one, two) in enumerate(itertools.pairwise(self.lines)) if one.block != two.block]

    def as_text(self) -> str:
        """For the terminal, with a rule between blocks; a group of columns after the other if too wide."""
        rows, names, width = self.rows, len(self.names), len(self.columns)
        whole = not sys.stdout.isatty() or _width(rows) <= shutil.get_terminal_size().columns
        size = width * len(self.groups) if whole else width
        texts = [self.title]
        for start in range(names, len(rows[0]), size):
            part = as_text([row[:names] + row[start : start + size] for row in rows]).splitlines()
            header, *lines = (line.rstrip() for line in part)
            for end in reversed(self.ends):
                lines.insert(end + 1, "-" * len(header))
            texts += [*([""] if start > names else []), header, *lines]
        return "\n".join([*texts, *self.notes])

    def as_markdown(self) -> str:
        """A section of a Markdown document."""
        notes = markdown("\n".join(self.notes)).replace("[", "\\[")
        return "\n\n".join(filter(None, (f"## {markdown(self.title)}", as_markdown(self.rows), notes)))

    def as_csv(self) -> str:
        """All names on every line; standard deviations (`sd`) and the paper's numbers in further columns."""
        header, names = self.rows[0], len(self.names)
        columns = [[header[i], *(line.names[i] for line in self.lines)] for i in range(names)]
        for i, name in enumerate(header[names:]):
            cells = [line.cells[i] for line in self.lines]
            columns.append([name, *(cell.number for cell in cells)])
            further = {"sd": [cell.deviation for cell in cells], "paper": [cell.paper for cell in cells]}
            columns += [[f"{name} {what}", *more] for what, more in further.items() if any(more)]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
        return text.getvalue()

    def as_latex(self) -> str:
        """A table environment, which needs the package booktabs."""
        width, names = len(self.columns), len(self.names)
        form = "l" * names + "r" * width * len(self.groups)
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{form}}}", r"\toprule"]
        if len(self.groups) > 1:
            starts = [names + 1 + i * width for i in range(len(self.groups))]
            over = [rf"\multicolumn{{{width}}}{{c}}{{{_latex(group)}}}" for group in self.groups]
            lines.append("& " * names + " & ".join(over) + r" \\")
            lines.append(" ".join(rf"\cmidrule(lr){{{start}-{start + width - 1}}}" for start in starts))
        header = [*self.names, *self.columns * len(self.groups)]
        for i, row in enumerate([header, *self.rows[1:]]):
            lines.append(" & ".join(map(_latex, row)) + r" \\")
            if i == 0 or i - 1 in self.ends:
                lines.append(r"\midrule")
        title = self.title.partition(": ")[2]  # without its number, which LaTeX adds
        caption = " ".join([f"{title[0].upper()}{title[1:]}.", *self.notes])
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_latex(caption)}}}", r"\end{table}"]
        return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return r"$|\theta|$" if text == "|θ|" else text.translate(_LATEX)


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
)
