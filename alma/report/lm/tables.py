"""The paper's language-model tables from runs: Table 2 (all perplexities) and Table 1 (i.i.d. against
sequential), with the paper's own numbers beside ours where settings and sizes agree.

`python -m alma.report --table lm` prints and writes them. The paper counts mega-batches from 0: its t_0..t_3
are t = 1..4 here.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from alma.errors import UserError
from alma.records import Run, flatten
from alma.report.labels import describe, differing, flags
from alma.report.lm.reference import KS, Reference, reference, reference_iid
from alma.report.results import Result, group
from alma.report.tables import Cell, Line, Sheet, Size, Value
from alma.report.vision.entries import place, wait

NAMES = {"sm": "SM", "ens": "Ens", "umix": "UMix", "gens": "gEns", "gmoe": "gMoE", "moe": "MoE", "ff": "FF"}
TOLERANCE = 0.03
"""Sizes are the paper's up to this: it prints 65, 91 and 116M for its base model (4, 8, 12 experts), where
the architecture it describes has 63.8, 89.0 and 114.2M: about 1.6M shared parameters less. The large model's
210, 323 and 436M agree with the count."""
_ENSEMBLES = ("ens", "umix", "gens")
_WIDTHS = ("--decoder-", "--moe-freq")  # flags of fairseq-train that make another size of an --arch
_IN_LABEL = {"learner", "megabatches", "waiting_time", "replay", "seed", "update_multiplier", "from_scratch"}


class Entry(NamedTuple):
    """A result and what the tables call it."""

    result: Result
    size: str
    setting: str  # such as SM_w3 (3x steps)

    @property
    def learner(self) -> str:
        """As in `LEARNERS`."""
        return self.result.config["learner"]


def entries(runs: Sequence[Run], per_word: bool = False) -> tuple[dict[str, list[Entry]], list[str]]:
    """The perplexity results by B, each key the suffix for file names ("" where there is but one B), and a
    line for each run that is left out or unfinished. UserError: no perplexity, or none per word."""
    known = [[r for r in results if r.metric == "perplexity" and r.times[-1]] for results in group(runs)]
    if not any(known):
        raise UserError("no perplexity after a first mega-batch in these runs: only language models have it")
    remarks = [
        f"not a perplexity run, left out: {run.directory}"
        for run in runs
        if any(row["metric"] != "perplexity" for row in run.rows)
    ]
    if per_word:
        known = [[new for result in results if (new := _per_word(result))] for results in known]
        if not any(known):
            raise UserError("no row has perplexity_per_word: the streams of these runs do not count words")
    tables = [results for results in known if results]
    found = {f"_B{results[0].config['megabatches']}": _named(results) for results in tables}
    for entry in itertools.chain(*found.values()):
        done, total = entry.result.progress, entry.result.config["megabatches"]
        what = f"{entry.setting} of {entry.size}"
        if entry.result.unfinished:
            remarks.append(f"not finished (t={done}/{entry.result.end}): {what}")
        elif entry.result.unfinished is None:
            remarks.append(f"t={done}/{total}, and how many stages were asked for is not recorded: {what}")
    return ({"": next(iter(found.values()))} if len(found) == 1 else found), remarks


def _per_word(result: Result) -> Result | None:
    """The result with perplexity per word as its values, at the t where every repeat has it."""

    def known(rows: Mapping[int, dict[str, Any]]) -> set[int]:
        return {t for t, row in rows.items() if row["extra"].get("perplexity_per_word") is not None}

    times = sorted(set.intersection(*map(known, result.repeats)))
    if not times:
        return None
    repeats = tuple(
        {t: {**rows[t], "value": rows[t]["extra"]["perplexity_per_word"]} for t in times}
        for rows in result.repeats
    )
    return replace(result, repeats=repeats)


def _named(results: Sequence[Result]) -> list[Entry]:
    """Entries sorted as the paper's Table 2; those that would be called the same say in what they differ."""
    alike: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = _size(result), _setting(result), experts(result, result.times[0])
        alike.setdefault(key, []).append(result)
    found = []
    for (size, setting, _), members in alike.items():
        configs = [flatten(member.config) for member in members]
        names = differing(configs, _IN_LABEL)
        for member, config in zip(members, configs, strict=True):
            found.append(Entry(member, size, f"{setting} {describe(config, names)}".strip()))
    return sorted(found, key=lambda entry: (place(entry.result), wait(entry.result), entry.setting))


def _setting(result: Result) -> str:
    config = result.config
    times = multiplier(result)
    remarks = [
        f"({times}x steps)" if times != 1 else "",
        "(replay)" if config["replay"] else "",
        "(from scratch)" if config.get("from_scratch") else "",
    ]
    learner = NAMES.get(config["learner"], config["learner"])
    return " ".join(filter(None, (f"{learner}_w{wait(result)}", *remarks)))


def _size(result: Result) -> str:
    """The architecture, by what makes it another one than the plug-in's: `base`, or `tiny layers=2`."""
    arch = result.config.get("arch", "").removeprefix("switch_gmoe").removeprefix("_")
    widths = {k: v for k, v in flags(result.config).items() if k.startswith(_WIDTHS)}
    told = [f"{k.removeprefix('--').removeprefix('decoder-')}={v}" for k, v in widths.items()]
    return " ".join([arch or "base", *sorted(told)])


def multiplier(result: Result) -> int:
    """How many times the usual updates a stage took (the paper's "3x steps")."""
    return result.config.get("update_multiplier", 1)


def plain(result: Result) -> bool:
    """Whether it is of the paper's protocol: no replay, and each stage goes on from the one before."""
    return not result.config["replay"] and not result.config.get("from_scratch")


def members_at(result: Result, t: int) -> int | None:
    """Members of an ensemble at t; None for a single model."""
    if result.config["learner"] not in _ENSEMBLES:
        return None
    return result.repeats[0][t]["extra"].get("members", result.config.get("members"))


def experts_at(result: Result, t: int) -> int | None:
    """Experts per Switch layer (of each member) at t; None for a dense model."""
    return result.repeats[0][t]["extra"].get("experts", result.config.get("moe_expert_count"))


def experts(result: Result, t: int) -> str:
    """Experts at t as the paper writes them: 4, or 4@2 for two members with 4 experts each."""
    count, members = experts_at(result, t), members_at(result, t)
    return ("dense" if count is None else str(count)) + (f"@{members}" if members else "")


def parameters(result: Result, t: int) -> float:
    """Free parameters at t."""
    return result.over_seeds(lambda rows: rows[t]["parameters"])[0]


def match(result: Result, t: int, paper: Iterable[Reference]) -> Reference | None:
    """The paper's line of the same setting and experts as the result at t, and of its size to 3%."""
    setting = result.config["learner"], wait(result), multiplier(result), experts(result, t)
    for line in paper if plain(result) else ():
        close = abs(parameters(result, t) - line.parameters) <= TOLERANCE * line.parameters
        if close and line[:4] == setting:
            return line
    return None


def sizes(found: Sequence[Entry]) -> list[str]:
    """The sizes, small before large."""
    least: dict[str, float] = {}
    for result, size, _ in found:
        least[size] = min(parameters(result, result.times[0]), least.get(size, math.inf))
    return sorted(least, key=lambda size: (least[size], size))


def value(result: Result, t: int, paper: float | None) -> Value:
    """Perplexity at t."""
    mean, deviation = result.over_seeds(lambda rows: rows[t]["value"])
    return Value(mean, deviation, len(result.repeats), paper)


def table2(found: Sequence[Entry], paper: Sequence[Reference], unit: str = "perplexity") -> Sheet:
    """Perplexity after each mega-batch; what grows has a line for each number of experts (or members)."""
    times = range(1, found[0].result.config["megabatches"] + 1)
    order = sizes(found)
    blank = [""] * (len(times) + 1)
    lines: dict[tuple, tuple[Line, dict[str, list[Cell]]]] = {}
    matched = 0
    for entry in found:
        result = entry.result
        start = _natural(experts(result, result.times[0]))
        for number, (count, phase) in enumerate(_phases(result)):
            line = match(result, phase[0], paper)
            matched += line is not None
            size = Size(parameters(result, phase[0]), line and line.parameters)
            cells = [size, *(_cell(result, t, phase, line) for t in times)]
            key = place(result), wait(result), entry.setting, start, number, _natural(count)
            made = Line([entry.setting, count], [], entry.learner, number > 0)
            lines.setdefault(key, (made, {}))[1][entry.size] = cells
    body = [
        line._replace(cells=[cell for size in order for cell in cells.get(size, blank)])
        for _, (line, cells) in sorted(lines.items(), key=lambda item: item[0])
    ]
    rows = sum(len(cells) for _, cells in lines.values())
    what = f" of {order[0]}" if len(order) == 1 else ""
    title = f"Table 2: test {unit}{what} after mega-batch t, B = {len(times)}"
    columns = ["|θ|", *(f"t={t}" for t in times)]
    return Sheet(title, ["setting", "# experts"], order, columns, body, _notes(body, rows, matched, paper))


def _phases(result: Result) -> list[tuple[str, list[int]]]:
    """Experts, and the t >= 1 at which there were that many."""
    trained = (t for t in result.times if t >= 1)
    return [(count, list(times)) for count, times in itertools.groupby(trained, lambda t: experts(result, t))]


def _cell(result: Result, t: int, phase: Sequence[int], line: Reference | None) -> Cell:
    if t not in phase:
        return ""
    return "*" if result.waiting(t) else value(result, t, line.perplexity.get(t) if line else None)


def _natural(label: str) -> tuple[int, ...]:
    """Sorts 4 before 12, and 4 before 4@2."""
    return tuple(int(part) if part.isdigit() else 0 for part in label.split("@"))


def _notes(body: Sequence[Line], rows: int, matched: int, paper: Sequence[Reference]) -> list[str]:
    cells = [cell for line in body for cell in line.cells]
    several = any(isinstance(cell, Value) and cell.seeds > 1 for cell in cells)
    notes = ["* the learner waits: no stage complete yet."] if "*" in cells else []
    notes += ["± is the sample standard deviation over seeds."] if several else []
    if paper:
        brackets = "[ ] is what the paper prints: " if matched else ""
        notes.append(
            f"{brackets}{matched} of {rows} rows match its table (setting, experts, size to {TOLERANCE:.0%})."
        )
    if any(isinstance(cell, Size) and cell.differs for cell in cells):
        notes.append(
            "The paper prints 65M, 91M and 116M for its base model with 4, 8 and 12 experts; the "
            "architecture it describes has 63.8M, 89.0M and 114.2M."
        )
    return notes


def table1(found: Sequence[Entry], paper: Sequence[Reference], unit: str = "perplexity") -> Sheet | str:
    """I.i.d. against sequential training on the same data with the same updates, or why it cannot be shown.

    I.i.d. is waiting for k mega-batches and k times the updates, at the end of the first stage; sequential
    is w = 1 at t = k.
    """
    published = reference_iid() if paper else {}
    lines: dict[tuple, Line] = {}
    for column, k in enumerate(KS):
        for iid in [entry for entry in found if _is_iid(entry.result, k)]:
            seq = _sequential(iid, k, found)
            if seq is None:
                continue
            count = experts(iid.result, k)
            line = match(seq.result, k, paper)
            key = published.get((line.size, line.learner, count, k)) if line else None
            extra = iid.setting.removeprefix(_setting(iid.result))
            names = [f"{iid.size} {NAMES.get(iid.learner, iid.learner)}{extra}", count]
            rank = place(iid.result), iid.size, _natural(count), extra
            made = lines.setdefault(rank, Line(names, ["" for _ in KS for _ in range(2)], iid.learner))
            for i, one in enumerate((iid, seq)):
                made.cells[2 * column + i] = value(one.result, k, key[i] if key else None)
    if not lines:
        return _why_no_table1(found)
    order = sizes(found)
    body = [lines[rank] for rank in sorted(lines, key=lambda r: (r[0], order.index(r[1]), *r[2:]))]
    title = f"Table 1: test {unit} of i.i.d. against sequential training on k mega-batches, same updates"
    matched = sum(any(isinstance(c, Value) and c.paper is not None for c in line.cells) for line in body)
    notes = _notes(body, len(body), matched, paper)
    return Sheet(title, ["method", "# experts"], [f"k={k}" for k in KS], ["i.i.d.", "seq."], body, notes)


def _is_iid(result: Result, k: int) -> bool:
    return wait(result) == multiplier(result) == k and plain(result) and _stage(result, k) == 0


def _is_sequential(result: Result, k: int) -> bool:
    return wait(result) == multiplier(result) == 1 and plain(result) and _stage(result, k) == k - 1


def _stage(result: Result, t: int) -> int | None:
    return result.repeats[0][t]["stage"] if t in result.times else None


def _sequential(iid: Entry, k: int, found: Sequence[Entry]) -> Entry | None:
    """The sequential partner of an i.i.d. result; of several the one whose settings differ least."""
    own = flatten(iid.result.config)

    def distance(entry: Entry) -> int:
        return len(differing([own, flatten(entry.result.config)], _IN_LABEL))

    def alike(entry: Entry) -> tuple[str, str, str]:
        return entry.learner, entry.size, experts(entry.result, k)

    partners = [e for e in found if _is_sequential(e.result, k) and alike(e) == alike(iid)]
    return min(partners, key=distance, default=None)


def _why_no_table1(found: Sequence[Entry]) -> str:
    def any_of(kind: Callable[[Result, int], bool]) -> bool:
        return any(kind(entry.result, k) for entry in found for k in KS)

    ks = " or ".join(map(str, KS))
    if not any_of(_is_iid):
        missing = f"no run trains on k = {ks} mega-batches at once with k times the updates"
        missing += " (waiting_time = update_multiplier = k)"
    elif not any_of(_is_sequential):
        missing = f"no run with w = 1 has come to t = {ks}"
    else:
        missing = "no i.i.d. and sequential run are of the same learner, size and number of experts"
    return f"Table 1 left out: {missing}"


def tables(
    found: Mapping[str, Sequence[Entry]], per_word: bool = False
) -> tuple[dict[str, Sheet], list[str]]:
    """Of `entries`: Table 2 and, where there are pairs of runs for it, Table 1, by the stem of their files;
    and a line for each Table 1 that is not there.

    Per word there are no numbers of the paper beside ours: it gives none.
    """
    paper = [] if per_word else reference()
    unit = "perplexity per word" if per_word else "perplexity"
    sheets, missing = {}, []
    for suffix, named in found.items():
        sheets[f"table2{suffix}"] = table2(named, paper, unit)
        first = table1(named, paper, unit)
        if isinstance(first, Sheet):
            sheets[f"table1{suffix}"] = first
        else:
            missing.append(first)
    return sheets, missing
