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


def for_terminal(table: Table) -> str:
    """The table as text, for a terminal in lines that fit: what all rows share first, then blocks of columns.

    Each block repeats the first column. For a file or a pipe the table stays whole.
    """
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or fits(table, width):
        return as_text(table)
    first, *others = zip(*table, strict=True)
    same = [column for column in others if len(column) > 2 and len(set(column[1:])) == 1]
    told = ", ".join(f"{name} {value}" for name, value, *_ in same if value)
    parts = [textwrap.fill(f"all rows: {told}", width)] if told else []
    blocks = folded(
        [list(row) for row in zip(first, *(c for c in others if c not in same), strict=True)], width
    )
    return "\n".join([*parts, "\n\n".join(map(as_text, blocks))])


def fits(table: Table, width: int) -> bool:
    """Whether the lines of the table have at most `width` characters."""
    return max(map(len, as_text(table).splitlines())) <= width


def folded(table: Table, width: int) -> list[Table]:
    """The table in blocks of columns that fit, if one column does; each has the first column."""
    first, *others = ([*column] for column in zip(*table, strict=True))
    blocks: list[list[list[str]]] = [[first]]
    for column in others:
        wider = [*blocks[-1], column]
        if len(blocks[-1]) > 1 and not fits([list(row) for row in zip(*wider, strict=True)], width):
            blocks.append([first, column])
        else:
            blocks[-1] = wider
    return [[list(row) for row in zip(*block, strict=True)] for block in blocks]


def as_markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in table[0][1:])]
    header, *body = ([markdown(cell).replace("|", "\\|") for cell in row] for row in table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))


def markdown(text: str) -> str:
    """Text from records in Markdown, where none of it is markup."""
    return html.escape(text, quote=False).replace("*", "\\*")


class Size(NamedTuple):
    """A number of parameters, and the paper's number."""

    parameters: float
    paper: float | None

    @property
    def differs(self) -> bool:
        """Whether the two differ by more than rounding (1%)."""
        return self.paper is not None and abs(self.parameters / self.paper - 1) > 0.01

    @property
    def plain(self) -> tuple[str, str, str]:
        """For CSV: our number, its standard deviation, the paper's number; "" for none."""
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
        """As `Size.plain`."""
        deviation = f"{self.deviation:.4f}" if self.seeds > 1 else ""
        return f"{self.mean:.4f}", deviation, "" if self.paper is None else f"{self.paper:.2f}"

    def __str__(self) -> str:
        spread = f" ±{self.deviation:,.2f}" if self.seeds > 1 else ""
        paper = "" if self.paper is None else f" [{self.paper:.2f}]"
        return f"{self.mean:,.2f}{spread}{paper}"


Cell = Value | Size | str


class Line(NamedTuple):
    """A row of a `PaperTable`; text omits the first name of a row that is `continued` from the one above."""

    names: list[str]
    cells: list[Cell]
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
    def header(self) -> list[str]:
        """Names of all columns, preceded by their group if there are several."""
        prefixes = [f"{group} " if len(self.groups) > 1 else "" for group in self.groups]
        return [*self.names, *(prefix + column for prefix in prefixes for column in self.columns)]

    @property
    def rows(self) -> Table:
        """Header and lines as text."""
        firsts = ("" if line.continued else line.names[0] for line in self.lines)
        rests = ([*line.names[1:], *map(str, line.cells)] for line in self.lines)
        return [self.header, *([first, *rest] for first, rest in zip(firsts, rests, strict=True))]

    @property
    def ends(self) -> list[int]:
        """Indices of the lines above a rule: the last line of each block, except the last block."""
        return [i for i, (one, two) in enumerate(itertools.pairwise(self.lines)) if one.block != two.block]

    def as_text(self) -> str:
        """For the terminal, with a rule between blocks; a group of columns after the other if too wide."""
        width = shutil.get_terminal_size().columns
        whole = not sys.stdout.isatty() or fits(self.rows, width)
        names = len(self.names)
        starts = range(names, len(self.header), len(self.columns))
        parts = [slice(names, None)] if whole else [slice(at, at + len(self.columns)) for at in starts]
        texts = [self.title]
        for part in parts:
            rows = as_text([row[:names] + row[part] for row in self.rows]).splitlines()
            header, *lines = (line.rstrip() for line in rows)
            for end in reversed(self.ends):
                lines.insert(end + 1, "-" * len(header))
            texts += [header, *lines, *[""] * (part is not parts[-1])]
        return "\n".join([*texts, *self.notes])

    def as_markdown(self) -> str:
        """A section of a Markdown document."""
        notes = markdown("\n".join(self.notes)).replace("[", "\\[")
        return "\n\n".join(filter(None, (f"## {markdown(self.title)}", as_markdown(self.rows), notes)))

    def as_csv(self) -> str:
        """All names on every line; standard deviations (`sd`) and the paper's numbers in further columns."""
        columns = [[name, *(line.names[i] for line in self.lines)] for i, name in enumerate(self.names)]
        for i, name in enumerate(self.header[len(self.names) :]):
            cells = [line.cells[i] for line in self.lines]
            plain = [(cell, "", "") if isinstance(cell, str) else cell.plain for cell in cells]
            ours, deviations, papers = zip(*plain, strict=True)
            columns.append([name, *ours])
            columns += [
                [f"{name} {what}", *each]
                for what, each in (("sd", deviations), ("paper", papers))
                if any(each)
            ]
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


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _latex(text: str) -> str:
    return r"$|\theta|$" if text == "|θ|" else text.translate(_LATEX)


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
)
