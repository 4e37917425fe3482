"""Tables 1 and 2 of the paper from runs.

Table 2 has the perplexity of all runs, Table 1 compares i.i.d. with sequential training. The
paper's numbers stand in brackets for the same settings and sizes; its t_0..t_3 are t = 1..4 here.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alma.configs import flatten
from alma.report.labels import distinguishing
from alma.report.lm.entries import SHOWN, TOLERANCE, Entry, setting, sizes
from alma.report.lm.reference import KS, Reference, reference, reference_iid
from alma.report.results import Result
from alma.report.tables import TitledTable


def tables(groups: Mapping[str, list[Entry]]) -> tuple[dict[str, TitledTable], list[str]]:
    """Table 2 and, if runs allow, Table 1 for the entries of each B, by file name without suffix.

    The second value says, in a line each, why a Table 1 is missing.
    """
    by_name = {}
    missing = []
    for suffix, entries in groups.items():
        by_name[f"table2{suffix}"] = table2(entries)
        table_or_reason = table1(entries)
        if isinstance(table_or_reason, TitledTable):
            by_name[f"table1{suffix}"] = table_or_reason
        else:
            missing.append(table_or_reason)
    return by_name, missing


class Line(NamedTuple):
    """Key of a line of Table 2: results with equal keys share the line, and keys sort the lines."""

    rank: int  # of the learner
    waiting_time: int
    setting: str
    start: tuple[int, ...]  # number of experts or members at first
    phase: int  # 0, 1, ...: increases when the number of experts or members changes
    structure: tuple[int, ...]


def table2(entries: Sequence[Entry]) -> TitledTable:
    """Perplexity after each mega-batch.

    A growing learner has a line per number of experts or members.
    """
    paper = reference()
    times = range(1, entries[0].result.megabatches + 1)
    order = sizes(entries)
    width = len(times) + 1  # |θ|, then a cell per t
    lines: dict[Line, list[str]] = {}
    rows = 0
    matched = 0
    for entry in entries:
        result = entry.result
        start = _natural(entry.structure(result.times[0]))
        first_cell = 2 + width * order.index(entry.size)
        since_first_data = [t for t in result.times if t >= 1]
        phases = itertools.groupby(since_first_data, entry.structure)
        for number, (structure, members) in enumerate(phases):
            phase = list(members)
            line = Line(
                result.rank,
                result.waiting_time,
                entry.setting,
                start,
                number,
                _natural(structure),
            )
            name = entry.setting if number == 0 else ""
            empty = [""] * (width * len(order))
            cells = lines.setdefault(line, [name, structure, *empty])
            published = entry.match(phase[0], paper)
            rows += 1
            if published:
                matched += 1
            cells[first_cell] = _size_cell(entry.parameters(phase[0]), published)
            for t in phase:
                cells[first_cell + t] = _perplexity_cell(result, t, published)
    body = [lines[line] for line in sorted(lines)]
    columns = ["|θ|", *(f"t={t}" for t in times)]
    if len(order) == 1:
        of_size = f" of {order[0]}"
        header = columns
    else:
        of_size = ""
        header = [f"{size} {column}" for size in order for column in columns]
    title = f"Table 2: test perplexity{of_size} after mega-batch t, B = {len(times)}"
    return TitledTable(
        title, [["setting", "# experts", *header], *body], _note(body, rows, matched)
    )


def _size_cell(parameters: float, published: Reference | None) -> str:
    """Parameters, in brackets those of the paper."""
    cell = _millions(parameters)
    return f"{cell} [{_millions(published.parameters)}]" if published else cell


def _perplexity_cell(result: Result, t: int, published: Reference | None) -> str:
    """Perplexity at t, in brackets that of the paper; "*" while the learner waits."""
    if result.waiting(t):
        return "*"
    return _value(result, t, published.perplexity.get(t) if published else None)


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _value(result: Result, t: int, published: float | None) -> str:
    mean, deviation = result.over_seeds(lambda rows: rows[t]["value"])
    cell = f"{mean:,.2f}"
    if len(result.repeats) > 1:
        cell += f" ±{deviation:,.2f}"
    return cell if published is None else f"{cell} [{published:.2f}]"


def _natural(label: str) -> tuple[int, ...]:
    """Sort key that puts 4 before 12 and before 4@2."""
    return tuple(int(part) if part.isdigit() else 0 for part in label.split("@"))


def _note(body: Sequence[Sequence[str]], rows: int, matched: int) -> str:
    """What the marks in the cells mean; `matched` of `rows` are rows of the paper, too."""
    cells = [cell for line in body for cell in line[2:]]
    notes = []
    if "*" in cells:
        notes.append("* the learner waits: no stage complete yet.")
    if any("±" in cell for cell in cells):
        notes.append("± is the sample standard deviation over seeds.")
    rule = f"{matched} of {rows} rows match its table (setting, experts, size to {TOLERANCE:.0%})."
    if matched:
        rule = f"[ ] is the paper's number: {rule}"
    return "\n".join([*notes, rule])


def table1(entries: Sequence[Entry]) -> TitledTable | str:
    """I.i.d. against sequential training on k mega-batches with the same updates.

    I.i.d. training waits for k mega-batches and takes k times the updates, measured after its first
    stage. Sequential training has w = 1, measured at t = k. Returns a text with the reason if there
    is no table.
    """
    paper = reference()
    published = reference_iid()
    order = sizes(entries)
    lines: dict[tuple, list[str]] = {}
    for column, k in enumerate(KS):
        for iid in entries:
            if not _waits(iid, k, k):
                continue
            sequential = _sequential(iid, k, entries)
            if sequential is None:
                continue
            learner = iid.result.learner
            structure = iid.structure(k)
            extra = iid.setting.removeprefix(setting(iid))
            line = (
                iid.result.rank,
                order.index(iid.size),
                _natural(structure),
                iid.result.variant,
                extra,
            )
            empty = [""] * (2 * len(KS))
            cells = lines.setdefault(line, [f"{iid.size} {iid.method}{extra}", structure, *empty])
            matching = sequential.match(k, paper)
            numbers = None
            if matching:
                numbers = published.get((matching.size, learner, structure, k))
            iid_number, sequential_number = numbers or (None, None)
            cells[2 + 2 * column] = _value(iid.result, k, iid_number)
            cells[3 + 2 * column] = _value(sequential.result, k, sequential_number)
    if not lines:
        return (
            "Table 1 left out: no run with waiting_time = update_multiplier = 3 or 4 has a "
            "counterpart of the same learner, size and number of experts with both 1"
        )
    body = [lines[line] for line in sorted(lines)]
    title = (
        "Table 1: test perplexity of i.i.d. against sequential training on k mega-batches, "
        "same updates"
    )
    matched = 0
    for cells in body:
        if any("[" in cell for cell in cells[2:]):
            matched += 1
    header = [f"k={k} {way}" for k in KS for way in ("i.i.d.", "seq.")]
    return TitledTable(
        title, [["method", "# experts", *header], *body], _note(body, len(body), matched)
    )


def _waits(entry: Entry, w: int, k: int) -> bool:
    """Whether stages up to t = k waited for w mega-batches and took w times the usual updates."""
    waits = entry.result.waiting_time == entry.multiplier == w
    return waits and entry.plain and k in entry.result.times


def _sequential(iid: Entry, k: int, entries: Sequence[Entry]) -> Entry | None:
    """The sequential counterpart of an i.i.d. entry; the one with the fewest other settings."""
    config_of_iid = flatten(iid.result.config)

    def model(entry: Entry) -> tuple[str, str, str, str]:
        return entry.result.learner, entry.result.variant, entry.size, entry.structure(k)

    def distance(entry: Entry) -> int:
        return len(distinguishing([config_of_iid, flatten(entry.result.config)], SHOWN))

    partners = []
    for entry in entries:
        if _waits(entry, 1, k) and model(entry) == model(iid):
            partners.append(entry)
    return min(partners, key=distance, default=None)
