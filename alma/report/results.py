"""Results: runs that differ only in their seed, read from run directories and labelled."""

import itertools
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from alma import metrics
from alma.configs import canonical, flatten
from alma.errors import UserError
from alma.files import walk
from alma.learners import LEARNERS
from alma.records import Run
from alma.report import labels
from alma.report.raw import Raw, raw_runs
from alma.stages import stages

Rows = dict[int, dict[str, Any]]  # the rows of one run by t
Repeats = list[tuple[Run, Rows]]
Measure = Callable[[Rows], float]  # a number of one run


class Display(NamedTuple):
    """How reports show a metric."""

    name: str
    factor: int  # multiplies shown values
    total: str  # name of the sum over t = 1..B
    untrained: bool  # whether figures include the untrained model


DISPLAYS = {
    "error": Display("error (%)", 100, "CER", untrained=True),
    # The untrained perplexity is about the vocabulary size, and would flatten all other values.
    "perplexity": Display("perplexity", 1, "cumulative PPL", untrained=False),
}


@dataclass(frozen=True)
class Result:
    """One configuration with its repeats, runs that differ only in their seed."""

    config: dict[str, Any]
    repeats: tuple[Rows, ...]  # restricted to the t that all of them have
    data: str = ""  # name of its data, such as "mnist"; other data of one name have a checksum too
    stem: str = ""  # begins the names of files about the results of its data, metric and B
    settings: str = ""  # what distinguishes it from the others, except learner, variant, w and replay
    variant: str = ""  # schedule, average of weights and share of replay, such as "continuous, average"
    end: int = 0  # the t of the last requested stage
    runs: tuple[Run, ...] = ()  # one per repeat
    left_out: tuple[str, ...] = ()  # a line for each run of the configuration that does not count

    @property
    def learner(self) -> str:
        return self.config["learner"]

    @property
    def rank(self) -> int:
        """Position of the learner in LEARNERS; unknown learners are last."""
        return list(LEARNERS).index(self.learner) if self.learner in LEARNERS else len(LEARNERS)

    @property
    def waiting_time(self) -> int:
        return self.config["waiting_time"]

    @property
    def megabatches(self) -> int:
        return self.config["megabatches"]

    @property
    def method(self) -> str:
        """The run's `name` if any, the learner, its variant, and the settings that distinguish it."""
        name = self.config.get("name")
        kind = ", ".join(filter(None, (f"{name} ({self.learner})" if name else self.learner, self.variant)))
        return " ".join(filter(None, (kind, self.settings)))

    @property
    def label(self) -> str:
        """The method, w and replay, for a legend."""
        return f"{self.method} w={self.waiting_time}" + " replay" * self.config["replay"]

    @property
    def stream(self) -> str:
        """Data and B for titles, such as "mnist, B = 500"."""
        return ", ".join(filter(None, (self.data, f"B = {self.megabatches}")))

    @property
    def metric(self) -> str:
        """Name of the metric: "perplexity" or "error", or that of `alma.report.scores`."""
        return next(iter(self.repeats[0].values()))["metric"]

    @property
    def display(self) -> Display:
        """Of a score, as of a perplexity, the untrained model's is not in figures."""
        name = self.metric
        return DISPLAYS.get(name) or Display(name, 1, f"cumulative {name}", untrained=False)

    @property
    def times(self) -> list[int]:
        """The t for which every repeat has a row, ascending."""
        return list(self.repeats[0])

    @property
    def progress(self) -> int:
        """The last t up to which every repeat has all rows; B when complete."""
        return progress(self.repeats[0])

    @property
    def unfinished(self) -> bool:
        """Whether a requested stage is missing."""
        return self.progress < self.end

    @property
    def finished(self) -> bool:
        """Whether every repeat has evaluated all B mega-batches, so that averages and sums are comparable."""
        return self.progress == self.megabatches

    def waiting(self, t: int) -> bool:
        """Whether no stage was complete at t, so that the untrained model was evaluated."""
        return self.repeats[0][t]["stage"] is None

    def over_seeds(self, measure: Measure) -> tuple[float, float]:
        """Mean and sample standard deviation of a measure over the repeats."""
        return mean_and_deviation([measure(rows) for rows in self.repeats])


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation: 0 of a single value, NaN if the mean is not finite."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, statistics.stdev(values) if math.isfinite(mean) else math.nan


def progress(rows: Rows) -> int:
    """The last t up to which there are all rows."""
    return next(t for t in itertools.count(min(rows)) if t + 1 not in rows)


def trained(rows: Rows) -> list[int]:
    """The t since the first stage."""
    return [t for t, row in rows.items() if t >= 1 and row["stage"] is not None]


def average_trained(rows: Rows, until: int) -> float:
    """The mean of the metric from the first stage to `until`: comparable at equal waiting time only."""
    return metrics.average({t: rows[t]["value"] for t in trained(rows) if t <= until})


def validation(rows: Rows) -> dict[int, float]:
    """The metric on the learner's validation data by t since the first stage; {} if rows lack it."""
    extras = {t: rows[t]["extra"].get("valid") or {} for t in trained(rows)}
    scores: dict[int, Any] = {t: valid.get(rows[t]["metric"]) for t, valid in extras.items()}
    return {} if None in scores.values() else scores


def matrix(rows: Rows) -> dict[int, list[float]]:
    """The metric on the held-out part of each mega-batch, by t >= 1; {} unless all t from 1 on have it.

    NaN on periods before the --cutoff of the model that the run started from.
    """
    found = {t: row["extra"].get("matrix") for t, row in rows.items() if t >= 1}
    seen = {t: rows[t]["extra"].get("matrix_seen", 0) for t in found}
    whole = 1 in found and all(found.values())
    return {t: [math.nan] * seen[t] + found[t][seen[t] :] for t in found} if whole else {}


def column(rows: Rows, field: str, until: float = math.inf) -> dict[int, Any]:
    """A field of the rows with t <= `until`, as the mapping t -> value that `alma.metrics` expects."""
    return {t: row[field] for t, row in rows.items() if t <= until}


def compute(rows: Rows, until: float = math.inf) -> float:
    """Comp (eq. 2) over t = 0..`until`, in TFLOPs; 0 while waiting."""
    return metrics.cumulative_compute(column(rows, "train_flops", until)) / 1e12


def memory(rows: Rows) -> int:
    """Mem (eq. 2): the sum over t = 0..B of free parameters."""
    return metrics.cumulative_memory(column(rows, "parameters"))


def find_runs(places: Iterable[str | os.PathLike[str]], problems: list[str] | None = None) -> list[Run]:
    """The runs in the directories at and below `places`, each once; then the raw weights of averaged ones.

    Links to folders are followed. See `alma.report.raw`. UserError: a place has no run, or a folder or a
    run is unreadable. With `problems`, damaged runs beside others are left out, with a line about each.
    """
    damaged: list[UserError] = []
    runs: dict[str, Run] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"{place} is not a folder: give run directories, or folders that contain some")
        found = [folder for folder, _, files in walk(place) if "run.json" in files]
        for folder in found:
            if (real := os.path.realpath(folder)) not in runs:
                try:
                    runs[real] = _read(folder)
                except UserError as error:
                    damaged.append(error)
        if not found:
            raise UserError(f"no runs in {place}: no folder in it has a run.json")
    if damaged and (problems is None or not runs):
        raise damaged[0]
    if problems is not None:
        problems += [f"left out: {error}" for error in damaged]
    return [*runs.values(), *raw_runs(runs.values())]


def _read(folder: str) -> Run:
    """The run in a folder, with rows that are sound. UserError: they or run.json are damaged."""
    run = Run.read(folder)
    len(run.rows)
    return run


def one_per_seed(repeats: Repeats, until: float) -> tuple[Repeats, list[str]]:
    """The runs of one configuration that count, with their rows, seeds ascending; a line for each other one.

    Of a seed the run with the most rows counts, and of equal ones the first: the others are copies of it, or
    have other numbers, as of another machine. Beside finished runs, others count from `until` on.
    """
    counted: dict[int, tuple[Run, Rows]] = {}
    left_out = []
    for run, rows in sorted(repeats, key=lambda pair: -len(pair[1])):
        first, known = counted.setdefault(run.config["seed"], (run, rows))
        if first is run or isinstance(run, Raw):  # raw weights: those of each average of one training
            continue
        same = all(row["value"] == known[t]["value"] for t, row in rows.items() if t in known)
        why = "a copy of" if same else "the same settings and seed but other numbers than"
        left_out.append(f"left out: {run.directory}, {why} {first.directory}, which counts")
    last = {seed: progress(rows) for seed, (_, rows) in counted.items()}
    complete = max((last[seed] for seed, (run, _) in counted.items() if last[seed] >= end_of(run)), default=0)
    for run, _ in [counted.pop(seed) for seed, t in last.items() if t < min(complete, until)]:
        where = f"at t={last[run.config['seed']]} of {run.config['megabatches']}"
        left_out.append(f"left out: {run.directory}, {where}, beside finished seeds")
    return [counted[seed] for seed in sorted(counted)], left_out


def end_of(run: Run) -> int:
    """The t of its last requested stage."""
    schedule = stages(run.config["megabatches"], run.config["waiting_time"])
    return schedule[: run.info.get("stages")][-1].last


def group(runs: Sequence[Run], until: float = math.inf) -> list[list[Result]]:
    """Results of the runs, seeds ascending, in one list per metric, B and data: what can be compared.

    All reports take their seeds from here, so that a run counts once (`one_per_seed`, which has `until`).
    UserError: repeats share no t.
    """
    repeats: dict[str, Repeats] = {}
    for run in runs:
        if rows := {row["t"]: row for row in run.rows}:
            repeats.setdefault(canonical(flatten(run.config), "seed"), []).append((run, rows))
    tables: dict[tuple[Any, ...], list[Result]] = {}
    for members in repeats.values():
        counted, left_out = one_per_seed(members, until)
        same = tuple(run for run, _ in counted)
        common = sorted(set.intersection(*(set(rows) for _, rows in counted)))
        if not common:
            places = ", ".join(str(run.directory) for run in same)
            raise UserError(f"{places} repeat one configuration but share no t: report them one by one")
        cut = tuple({t: rows[t] for t in common} for _, rows in counted)
        config, last = same[0].config, cut[0][common[-1]]["extra"]
        if seen := ", ".join(last.get("matrix_periods", [])[: last.get("matrix_seen", 0)]):
            left_out.append(f"left out of averages: {same[0].directory}, {seen}: before its model's cutoff")
        result = Result(config, cut, end=min(map(end_of, same)), runs=same, left_out=tuple(left_out))
        name, checksum = data_of(config)
        data = result.config.get("dataset"), result.config.get("scenario"), checksum or name
        tables.setdefault((result.metric, result.megabatches, *data), []).append(result)
    keys = [(table[0].metric, table[0].megabatches, *data_of(table[0].config)) for table in tables.values()]
    named = {}  # with names that distinguish each table from the others
    for table, (metric, megabatches, name, checksum) in zip(tables.values(), keys, strict=True):
        alone = [key[:2] for key in keys].count((metric, megabatches)) == 1
        if checksum and [key[:3] for key in keys].count((metric, megabatches, name)) > 1:
            name = f"{name} ({checksum[:8]})".strip()
        stem = "_".join(filter(None, [metric, "" if alone else slug(name), f"B{megabatches}"]))
        named[name, metric, megabatches] = [replace(result, data=name, stem=stem) for result in table]
    return [labelled(named[key]) for key in sorted(named)]


class Section(NamedTuple):
    """Results of one data set, metric and B, which a page or advice is about."""

    title: str
    results: list[Result]


def left_out(results: Iterable[Result]) -> list[str]:
    """The lines about runs of these configurations that do not count, without duplicates."""
    return list(dict.fromkeys(line for result in results for line in result.left_out))


def find_sections(runs: Sequence[Run], until: float = math.inf) -> list[Section]:
    """A section per data set, metric and B of `group`. UserError: no run has rows, or repeats share no t."""
    sections = []
    for results in group(runs, until):
        first = results[0]
        title = f"{first.data}: " * bool(first.data) + f"test {first.display.name}, B = {first.megabatches}"
        sections.append(Section(title, sorted(results, key=lambda result: result.rank)))
    if not sections:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    return sections


def data_of(config: dict[str, Any]) -> tuple[str, str]:
    """Name and checksum of the data: an image data set with its scenario, or a stream; "" if unknown."""
    name = config.get("dataset") or config.get("stream") or ""
    checksum = config.get("data") or config.get("stream_sha256") or ""
    return f"{name} {config.get('scenario', '')}".strip(), str(checksum)


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"\W+", "_", name).strip("_")


def labelled(results: Sequence[Result]) -> list[Result]:
    """The results, sorted, with their `variant`, and the `settings` that distinguish each from the others."""
    configs = [flatten(result.config) for result in results]
    names, variants = labels.distinguishing(configs), labels.variants(configs)
    found = []
    for result, config, variant in zip(results, configs, variants, strict=True):
        found.append(replace(result, settings=labels.describe(config, names), variant=variant))
    same = Counter(result.label for result in found)
    for i, config in enumerate(configs):  # lists such as [2] and [2, 2] have the same short text
        if same[found[i].label] > 1:
            found[i] = replace(found[i], settings=labels.describe(config, names, str))
    return sorted(found, key=lambda result: (result.learner, result.waiting_time, result.variant))


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the points (x, y) that no other equals or beats in both, by ascending x; without NaN."""
    found: list[int] = []
    least = math.inf
    for i in sorted(range(len(points)), key=points.__getitem__):
        if points[i][1] < least:
            found.append(i)
            least = points[i][1]
    return found


def rounded(value: Any) -> Any:
    """For JSON: numbers with few digits, None for NaN and infinity, which JSON lacks; a NamedTuple as an
    object."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return rounded(value._asdict()) if hasattr(value, "_asdict") else [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
