"""Tables as text, Markdown, CSV and LaTeX: a report's, and the paper's with its numbers beside ours."""

import csv
import io
import itertools
from typing import NamedTuple

Table = list[list[str]]
"""Header and rows, all cells as text."""


class Size(NamedTuple):
    """Free parameters, and how many the paper prints."""

    parameters: float
    paper: float | None

    @property
    def differs(self) -> bool:
        """Whether by more than rounding."""
        return self.paper is not None and abs(self.parameters / self.paper - 1) > 0.01

    @property
    def plain(self) -> tuple[str, str, str]:
        """For CSV: our number, its deviation, the paper's."""
        return _millions(self.parameters), "", "" if self.paper is None else _millions(self.paper)

    def __str__(self) -> str:
        return _millions(self.parameters) + ("" if self.paper is None else f" [{_millions(self.paper)}]")


class Value(NamedTuple):
    """A perplexity over seeds, and the paper's."""

    mean: float
    deviation: float
    seeds: int
    paper: float | None

    @property
    def plain(self) -> tuple[str, str, str]:
        """As of `Size`."""
        deviation = f"{self.deviation:.4f}" if self.seeds > 1 else ""
        return f"{self.mean:.4f}", deviation, "" if self.paper is None else f"{self.paper:.2f}"

    def __str__(self) -> str:
        spread = f" ±{self.deviation:,.2f}" if self.seeds > 1 else ""
        paper = "" if self.paper is None else f" [{self.paper:.2f}]"
        return f"{self.mean:,.2f}{spread}{paper}"


Cell = Value | Size | str


class Line(NamedTuple):
    """A line of a table; `continued` from the line above, so that its first name need not be shown."""

    names: list[str]
    cells: list[Cell]
    block: str
    continued: bool = False


class Sheet(NamedTuple):
    """A table of the paper: columns of names, then for each group the same columns of cells."""

    title: str
    names: list[str]
    groups: list[str]
    columns: list[str]
    lines: list[Line]
    notes: list[str]

    @property
    def header(self) -> list[str]:
        """All columns, with their group's name where there are several groups."""
        prefixes = [f"{group} " if len(self.groups) > 1 else "" for group in self.groups]
        cells = [prefix + column for prefix in prefixes for column in self.columns]
        return [*self.names, *cells]

    @property
    def text(self) -> list[list[str]]:
        """Header and lines with all cells as text."""
        first = [["" if line.continued else line.names[0]] for line in self.lines]
        rest = [[*line.names[1:], *map(str, line.cells)] for line in self.lines]
        return [self.header, *(one + more for one, more in zip(first, rest, strict=True))]

    @property
    def ends(self) -> list[int]:
        """Index of the last line of each block but the last."""
        return [i for i, (one, two) in enumerate(itertools.pairwise(self.lines)) if one.block != two.block]


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e9 else f"{count / 1e6:.3g}M"


def as_text(lines: Table) -> str:
    """The table with aligned columns, names to the left and numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def as_markdown(lines: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in lines[0][1:])]
    header, *body = ([cell.replace("|", "\\|").replace("*", "\\*") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))


def sheet_as_text(sheet: Sheet) -> str:
    """A table of the paper for the terminal, with a rule between learners."""
    header, *lines = (line.rstrip() for line in as_text(sheet.text).splitlines())
    for end in reversed(sheet.ends):
        lines.insert(end + 1, "-" * len(header))
    return "\n".join([sheet.title, header, *lines, *sheet.notes])


def sheet_as_markdown(sheet: Sheet) -> str:
    """A table of the paper as a section of a Markdown document."""
    notes = "\n".join(sheet.notes).replace("*", "\\*").replace("[", "\\[")
    return "\n\n".join(filter(None, (f"## {sheet.title}", as_markdown(sheet.text), notes)))


def sheet_as_csv(sheet: Sheet) -> str:
    """The same with all names on every line, and columns of their own for deviations (`sd`) and the paper's
    numbers where there are any."""
    columns = [[line.names[i] for line in sheet.lines] for i in range(len(sheet.names))]
    filled = [[name, *cells] for name, cells in zip(sheet.names, columns, strict=True)]
    for i, name in enumerate(sheet.header[len(sheet.names) :]):
        cells = [line.cells[i] for line in sheet.lines]
        plain = [(cell, "", "") if isinstance(cell, str) else cell.plain for cell in cells]
        own, *further = zip(*plain, strict=True)
        filled.append([name, *own])
        filled += [
            [f"{name} {what}", *each]
            for what, each in zip(("sd", "paper"), further, strict=True)
            if any(each)
        ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*filled, strict=True))
    return text.getvalue()


def sheet_as_latex(sheet: Sheet) -> str:
    """The same for a document that loads the package booktabs."""
    width, names = len(sheet.columns), len(sheet.names)
    form = "l" * names + "r" * width * len(sheet.groups)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{form}}}", r"\toprule"]
    if len(sheet.groups) > 1:
        starts = [names + 1 + i * width for i in range(len(sheet.groups))]
        over = [rf"\multicolumn{{{width}}}{{c}}{{{_latex(group)}}}" for group in sheet.groups]
        lines.append("& " * names + " & ".join(over) + r" \\")
        lines.append(" ".join(rf"\cmidrule(lr){{{start}-{start + width - 1}}}" for start in starts))
    header = [*sheet.names, *sheet.columns * len(sheet.groups)]
    for i, line in enumerate([header, *sheet.text[1:]]):
        lines.append(" & ".join(map(_latex, line)) + r" \\")
        if i == 0 or i - 1 in sheet.ends:
            lines.append(r"\midrule")
    title = sheet.title.partition(": ")[2]  # LaTeX numbers it
    caption = " ".join([f"{title[0].upper()}{title[1:]}.", *sheet.notes])
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_latex(caption)}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return r"$|\theta|$" if text == "|θ|" else text.translate(_LATEX)


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
)
