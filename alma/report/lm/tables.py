"""The paper's Table 2 (perplexity of all runs) and Table 1 (i.i.d. against sequential training) from runs.

The paper's numbers stand beside ours for the same settings and sizes; its t_0..t_3 are t = 1..4 here.
"""

import itertools
from collections.abc import Mapping, Sequence

from alma.configs import flatten
from alma.report.labels import distinguishing
from alma.report.lm.entries import SHOWN, TOLERANCE, Entry, setting, sizes
from alma.report.lm.reference import KS, reference, reference_iid
from alma.report.results import Result
from alma.report.tables import TitledTable


def tables(found: Mapping[str, list[Entry]]) -> tuple[dict[str, TitledTable], list[str]]:
    """Table 2 and, if runs allow, Table 1 for the entries of each B, by file name without suffix.

    The second value says, in a line each, why a Table 1 is missing.
    """
    made, missing = {}, []
    for suffix, entries in found.items():
        made[f"table2{suffix}"] = table2(entries)
        first = table1(entries)
        if isinstance(first, TitledTable):
            made[f"table1{suffix}"] = first
        else:
            missing.append(first)
    return made, missing


def table2(entries: Sequence[Entry]) -> TitledTable:
    """Perplexity after each mega-batch. A growing learner has a line per number of experts or members."""
    paper, times = reference(), range(1, entries[0].result.megabatches + 1)
    order = sizes(entries)
    width = len(times) + 1  # |θ|, then a cell per t
    lines: dict[tuple, list[str]] = {}
    rows = matched = 0
    for entry in entries:
        result, start = entry.result, _natural(entry.structure(entry.result.times[0]))
        at = 2 + width * order.index(entry.size)
        phases = itertools.groupby((t for t in result.times if t >= 1), entry.structure)
        for number, (structure, phase) in enumerate(phases):
            key = (
                result.rank,
                result.waiting_time,
                entry.setting,
                start,
                number,
                _natural(structure),
            )
            names = ["" if number else entry.setting, structure]
            cells = lines.setdefault(key, names + [""] * (width * len(order)))
            since = next(phase)
            line, parameters = entry.match(since, paper), entry.parameters(since)
            rows, matched = rows + 1, matched + (line is not None)
            cells[at] = _millions(parameters) + (f" [{_millions(line.parameters)}]" if line else "")
            for t in (since, *phase):
                published = line.perplexity.get(t) if line else None
                cells[at + t] = "*" if result.waiting(t) else _value(result, t, published)
    body = [lines[key] for key in sorted(lines)]
    what = f" of {order[0]}" if len(order) == 1 else ""
    title = f"Table 2: test perplexity{what} after mega-batch t, B = {len(times)}"
    columns = ["|θ|", *(f"t={t}" for t in times)]
    header = [f"{size} {name}" if len(order) > 1 else name for size in order for name in columns]
    return TitledTable(
        title, [["setting", "# experts", *header], *body], _note(body, rows, matched)
    )


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _value(result: Result, t: int, published: float | None) -> str:
    mean, deviation = result.over_seeds(lambda rows: rows[t]["value"])
    paper = "" if published is None else f" [{published:.2f}]"
    return f"{mean:,.2f}" + f" ±{deviation:,.2f}" * (len(result.repeats) > 1) + paper


def _natural(label: str) -> tuple[int, ...]:
    """Sort key that puts 4 before 12 and before 4@2."""
    return tuple(int(part) if part.isdigit() else 0 for part in label.split("@"))


def _note(body: Sequence[Sequence[str]], rows: int, matched: int) -> str:
    cells = [cell for line in body for cell in line[2:]]
    notes = ["* the learner waits: no stage complete yet."] * ("*" in cells)
    notes += ["± is the sample standard deviation over seeds."] * any("±" in cell for cell in cells)
    brackets = "[ ] is the paper's number: " * bool(matched)
    rule = f"{matched} of {rows} rows match its table (setting, experts, size to {TOLERANCE:.0%})."
    return "\n".join([*notes, brackets + rule])


def table1(entries: Sequence[Entry]) -> TitledTable | str:
    """I.i.d. against sequential training on k mega-batches with the same updates; or why there is no table.

    I.i.d. training waits for k mega-batches and takes k times the updates, measured after its first stage.
    Sequential training has w = 1, measured at t = k.
    """
    paper, published = reference(), reference_iid()
    order = sizes(entries)
    lines: dict[tuple, list[str]] = {}
    for column, k in enumerate(KS):
        for iid in [entry for entry in entries if _waits(entry, k, k)]:
            sequential = _sequential(iid, k, entries)
            if sequential is None:
                continue
            learner, structure = iid.result.learner, iid.structure(k)
            line = sequential.match(k, paper)
            theirs = published.get((line.size, learner, structure, k)) if line else None
            extra = iid.setting.removeprefix(setting(iid))
            place = order.index(iid.size), _natural(structure), iid.result.variant, extra
            names = [f"{iid.size} {iid.method}{extra}", structure]
            cells = lines.setdefault((iid.result.rank, *place), names + [""] * (2 * len(KS)))
            for i, entry in enumerate((iid, sequential)):
                cells[2 + 2 * column + i] = _value(entry.result, k, theirs[i] if theirs else None)
    if not lines:
        return (
            "Table 1 left out: no run with waiting_time = update_multiplier = 3 or 4 has a counterpart of "
            "the same learner, size and number of experts with both 1"
        )
    body = [lines[key] for key in sorted(lines)]
    title = "Table 1: test perplexity of i.i.d. against sequential training on k mega-batches, same updates"
    matched = sum(any("[" in cell for cell in line[2:]) for line in body)
    header = [f"k={k} {way}" for k in KS for way in ("i.i.d.", "seq.")]
    return TitledTable(
        title, [["method", "# experts", *header], *body], _note(body, len(body), matched)
    )


def _waits(entry: Entry, w: int, k: int) -> bool:
    """Whether each stage up to t = k waited for w mega-batches and took w times the usual updates."""
    return (
        entry.result.waiting_time == entry.multiplier == w
        and entry.plain
        and k in entry.result.times
    )


def _sequential(iid: Entry, k: int, entries: Sequence[Entry]) -> Entry | None:
    """The sequential counterpart of an i.i.d. entry; of several, the one with the fewest other settings."""
    own = flatten(iid.result.config)

    def model(entry: Entry) -> tuple[str, str, str, str]:
        return entry.result.learner, entry.result.variant, entry.size, entry.structure(k)

    partners = [e for e in entries if _waits(e, 1, k) and model(e) == model(iid)]
    configs = [flatten(entry.result.config) for entry in partners]
    distances = [len(distinguishing([own, config], SHOWN)) for config in configs]
    return partners[distances.index(min(distances))] if partners else None
