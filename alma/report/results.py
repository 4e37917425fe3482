"""Results: runs that differ only in their seed, read from run directories and labelled."""

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
from alma.report.displays import Display, display_of
from alma.report.raw import raw_runs
from alma.report.repeats import Repeat, Rows, end_of, one_per_seed, progress

Measure = Callable[[Rows], float]  # a number of one run


@dataclass(frozen=True)
class Result:
    """One configuration with its repeats, runs that differ only in their seed."""

    config: dict[str, Any]
    repeats: tuple[Rows, ...]  # restricted to the t that all of them have
    data: str = ""  # name of its data, such as "mnist"; with a checksum if other data have the name
    stem: str = ""  # prefix of the names of files about results of the same data, metric and B
    settings: str = ""
    """Settings that distinguish it from the others, besides learner, variant, w and replay."""
    variant: str = ""
    """Schedule, average of weights and share of replay, such as "continuous, average"."""
    end: int = 0  # the t of the last requested stage
    runs: tuple[Run, ...] = ()  # one per repeat
    left_out: tuple[str, ...] = ()  # a line for each run of the configuration that does not count
    part: str = ""  # the held-out part that the `value` of rows is about; "": the test set

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
        """The run's `name` if any, learner, variant, and the settings that distinguish it."""
        name = self.config.get("name")
        learner = f"{name} ({self.learner})" if name else self.learner
        kind = ", ".join(filter(None, (learner, self.variant)))
        return " ".join(filter(None, (kind, self.settings)))

    @property
    def label(self) -> str:
        """The method, w and replay, for a legend."""
        label = f"{self.method} w={self.waiting_time}"
        return f"{label} replay" if self.config["replay"] else label

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
        """How reports show the metric."""
        return display_of(self.metric)

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
        """Whether every repeat has rows up to t = B: averages and sums are then comparable."""
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


def trained(rows: Rows) -> list[int]:
    """The t from the end of the first stage on, ascending."""
    return [t for t, row in rows.items() if t >= 1 and row["stage"] is not None]


def average_trained(rows: Rows, until: int) -> float:
    """Mean of the metric from the first stage to `until`: comparable at equal waiting time only."""
    return metrics.average({t: rows[t]["value"] for t in trained(rows) if t <= until})


def validation(rows: Rows) -> dict[int, float]:
    """The metric on the learner's validation data by t since stage 0; {} if rows lack it."""
    extras = {t: rows[t]["extra"].get("valid") or {} for t in trained(rows)}
    scores: dict[int, Any] = {t: valid.get(rows[t]["metric"]) for t, valid in extras.items()}
    return {} if None in scores.values() else scores


def matrix(rows: Rows) -> dict[int, list[float]]:
    """The metric on the held-out part of each mega-batch, by t >= 1; {} unless all these t have it.

    All rows are as long as the longest. NaN on periods before the --cutoff of the model that the
    run started from, and where a model was not tested.
    """
    extras = {t: row["extra"] for t, row in rows.items() if t >= 1}
    if 1 not in extras or not all(extra.get("matrix") for extra in extras.values()):
        return {}
    width = max(len(extra["matrix"]) for extra in extras.values())
    values_by_t = {}
    for t, extra in extras.items():
        before_cutoff = extra.get("matrix_seen", 0)
        values = [math.nan] * before_cutoff + extra["matrix"][before_cutoff:]
        values_by_t[t] = values + [math.nan] * (width - len(values))
    return values_by_t


def column(rows: Rows, field: str, until: float = math.inf) -> dict[int, Any]:
    """A field of the rows with t <= `until`, as the mapping t -> value of `alma.metrics`."""
    return {t: row[field] for t, row in rows.items() if t <= until}


def compute(rows: Rows, until: float = math.inf) -> float:
    """Comp (eq. 2) over t = 0..`until`, in TFLOPs; 0 while waiting."""
    return metrics.cumulative_compute(column(rows, "train_flops", until)) / 1e12


def memory(rows: Rows) -> int:
    """Mem (eq. 2): the sum over t = 0..B of free parameters."""
    return metrics.cumulative_memory(column(rows, "parameters"))


def find_runs(
    places: Iterable[str | os.PathLike[str]], problems: list[str] | None = None
) -> list[Run]:
    """The runs at and below the folders `places`, each once; then raw weights of averaged ones.

    Links to folders are followed. See `alma.report.raw`. UserError: a place has no run, or a folder
    or a run is unreadable. With `problems`, damaged runs beside others are left out, with a line
    about each.
    """
    damaged: list[UserError] = []
    runs: dict[str, Run] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(
                f"{place} is not a folder: give run directories, or folders that contain some"
            )
        folders = [folder for folder, _, files in walk(place) if "run.json" in files]
        for folder in folders:
            real = os.path.realpath(folder)
            if real in runs:
                continue
            try:
                runs[real] = _read(folder)
            except UserError as error:
                damaged.append(error)
        if not folders:
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


class Kind(NamedTuple):
    """What all results of one table have in common."""

    metric: str
    megabatches: int
    data: str  # name
    checksum: str  # of the data


def group(runs: Sequence[Run], until: float = math.inf) -> list[list[Result]]:
    """Results that can be compared: a list per metric, B and data; seeds ascending.

    All reports take their seeds from here, so that a run counts once (`one_per_seed`, which has
    `until`). UserError: repeats share no t.
    """
    repeats: dict[str, list[Repeat]] = {}
    for run in runs:
        rows = {row["t"]: row for row in run.rows}
        if rows:
            configuration = canonical(flatten(run.config), "seed")
            repeats.setdefault(configuration, []).append(Repeat(run, rows))
    tables: dict[tuple[Any, ...], list[Result]] = {}
    for members in repeats.values():
        result = _result_of(members, until)
        tables.setdefault(_table_of(result), []).append(result)
    return [labelled(table) for table in _named(list(tables.values()))]


def _result_of(repeats: Sequence[Repeat], until: float) -> Result:
    """The result of the runs of one configuration. UserError: they share no t."""
    counted, left_out = one_per_seed(repeats, until)
    runs = tuple(repeat.run for repeat in counted)
    common = sorted(set.intersection(*(set(repeat.rows) for repeat in counted)))
    if not common:
        places = ", ".join(str(run.directory) for run in runs)
        raise UserError(f"{places} repeat one configuration but share no t: report them one by one")
    shared_rows = []
    for repeat in counted:
        shared_rows.append({t: repeat.rows[t] for t in common})
    extra = shared_rows[0][common[-1]]["extra"]
    periods_seen = extra.get("matrix_periods", [])[: extra.get("matrix_seen", 0)]
    if periods_seen:
        names = ", ".join(periods_seen)
        left_out.append(
            f"left out of averages: {runs[0].directory}, {names}: before its model's cutoff"
        )
    return Result(
        runs[0].config,
        tuple(shared_rows),
        end=min(map(end_of, runs)),
        runs=runs,
        left_out=tuple(left_out),
    )


def _table_of(result: Result) -> tuple[Any, ...]:
    """The key by which results share a table.

    Data are compared by their checksum, if known, since the same data may have several names.
    """
    config = result.config
    name, checksum = data_of(config)
    data = (config.get("dataset"), config.get("scenario"), checksum or name)
    return (result.metric, result.megabatches, *data)


def _named(tables: Sequence[Sequence[Result]]) -> list[list[Result]]:
    """Sort the tables by name, and give their results data names that are unique to each table."""
    kinds = []
    for table in tables:
        first = table[0]
        kinds.append(Kind(first.metric, first.megabatches, *data_of(first.config)))
    of_metric = Counter(kind[:2] for kind in kinds)
    of_name = Counter(kind[:3] for kind in kinds)
    named = {}
    for table, kind in zip(tables, kinds, strict=True):
        name = kind.data
        if kind.checksum and of_name[kind[:3]] > 1:
            name = f"{name} ({kind.checksum[:8]})".strip()
        parts = [kind.metric, slug(name), f"B{kind.megabatches}"]
        if of_metric[kind[:2]] == 1:  # the only table of its metric and B: leave the data out
            del parts[1]
        stem = "_".join(filter(None, parts))
        key = (name, kind.metric, kind.megabatches)
        named[key] = [replace(result, data=name, stem=stem) for result in table]
    return [named[key] for key in sorted(named)]


class Section(NamedTuple):
    """Results of one data set, metric and B, which a page or advice is about."""

    title: str
    results: list[Result]


def left_out(results: Iterable[Result]) -> list[str]:
    """The lines about runs of these configurations that do not count, without duplicates."""
    return list(dict.fromkeys(line for result in results for line in result.left_out))


def find_sections(runs: Sequence[Run], until: float = math.inf) -> list[Section]:
    """A section per data set, metric and B of `group`.

    UserError: no run has rows, or repeats share no t.
    """
    sections = []
    for results in group(runs, until):
        first = results[0]
        title = f"test {first.display.name}, B = {first.megabatches}"
        if first.data:
            title = f"{first.data}: {title}"
        sections.append(Section(title, sorted(results, key=lambda result: result.rank)))
    if not sections:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    return sections


def data_of(config: dict[str, Any]) -> tuple[str, str]:
    """Name and checksum of the data, "" if unknown.

    The name is that of an image data set and its scenario, or of a stream.
    """
    name = config.get("dataset") or config.get("stream") or ""
    checksum = config.get("data") or config.get("stream_sha256") or ""
    return f"{name} {config.get('scenario', '')}".strip(), str(checksum)


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"\W+", "_", name).strip("_")


def labelled(results: Sequence[Result]) -> list[Result]:
    """The results, sorted, with their `variant` and the `settings` that distinguish each."""
    configs = [flatten(result.config) for result in results]
    names = labels.distinguishing(configs)
    variants = labels.variants(configs)
    described = []
    for result, config, variant in zip(results, configs, variants, strict=True):
        settings = labels.describe(config, names)
        described.append(replace(result, settings=settings, variant=variant))
    uses = Counter(result.label for result in described)
    for i, config in enumerate(configs):  # short texts may be equal: [2] and [2, 2] are both "2"
        if uses[described[i].label] > 1:
            in_full = labels.describe(config, names, str)
            described[i] = replace(described[i], settings=in_full)
    return sorted(
        described, key=lambda result: (result.learner, result.waiting_time, result.variant)
    )


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the points (x, y) that no other equals or beats in both, by ascending x.

    Points with NaN do not count.
    """
    positions: list[int] = []
    least = math.inf
    for i in sorted(range(len(points)), key=points.__getitem__):
        if points[i][1] < least:
            positions.append(i)
            least = points[i][1]
    return positions


def rounded(value: Any) -> Any:
    """A value for JSON: numbers with few digits, a NamedTuple as an object.

    NaN and infinity, which JSON lacks, become None.
    """
    if isinstance(value, dict):
        return {name: rounded(member) for name, member in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return rounded(value._asdict())
    if isinstance(value, tuple | list):
        return [rounded(member) for member in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
