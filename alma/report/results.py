"""Run directories as results: found on disk, repeats with other seeds put together, labelled apart."""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alma import metrics
from alma.errors import UserError
from alma.records import Run, flatten
from alma.report import labels
from alma.stages import stages

Rows = dict[int, dict[str, Any]]
"""The rows of one run by t."""


@dataclass(frozen=True)
class Result:
    """One configuration and its repeats: the runs that differ from it only in their seed."""

    config: dict[str, Any]
    repeats: tuple[Rows, ...]  # each cut to the t that all of them have
    settings: str = ""  # what tells it apart from the others shown, beside learner, waiting time, replay
    end: int | None = None  # the t of the last stage that was asked for; None: not recorded

    @property
    def learner(self) -> str:
        """The run's `name` if it was given one, its learner, and the settings that tell it apart."""
        name, learner = self.config.get("name"), self.config["learner"]
        return " ".join(filter(None, (f"{name} ({learner})" if name else learner, self.settings)))

    @property
    def label(self) -> str:
        """Everything that tells it apart, for a legend."""
        replay = "replay" if self.config["replay"] else ""
        return " ".join(filter(None, (self.learner, f"w={self.config['waiting_time']}", replay)))

    @property
    def metric(self) -> str:
        """ "perplexity" or "error"."""
        return next(iter(self.repeats[0].values()))["metric"]

    @property
    def scale(self) -> int:
        """What a value is multiplied with to be shown in `unit`."""
        return 100 if self.metric == "error" else 1

    @property
    def unit(self) -> str:
        """The metric and its unit as shown."""
        return "error (%)" if self.metric == "error" else "perplexity"

    @property
    def times(self) -> list[int]:
        """The t that every repeat has a row for, rising."""
        return list(self.repeats[0])

    @property
    def progress(self) -> int:
        """The last t before which no row is missing in any repeat; B when all are complete."""
        t = 0
        while t + 1 in self.repeats[0]:
            t += 1
        return t

    @property
    def unfinished(self) -> bool | None:
        """Whether a stage that was asked for is missing; None where what was asked is not recorded."""
        if self.end is None and self.progress < self.config["megabatches"]:
            return None
        return self.end is not None and self.progress < self.end

    def waiting(self, t: int) -> bool:
        """Whether no stage was complete at t, so that the untrained model was evaluated."""
        return self.repeats[0][t]["stage"] is None

    def over_seeds(self, measure: Callable[[Rows], float]) -> tuple[float, float]:
        """Mean over the repeats of a number measured on each, and its sample standard deviation."""
        values = [measure(rows) for rows in self.repeats]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def trained(rows: Rows) -> list[int]:
    """The t since the first stage."""
    return [t for t, row in rows.items() if t >= 1 and row["stage"] is not None]


def validation(rows: Rows) -> dict[int, float]:
    """The metric on the learner's validation data at each t since the first stage; {} where a row lacks it
    (made before it was recorded)."""
    scores = {t: rows[t]["extra"].get("valid") for t in trained(rows)}
    if not all(scores.values()):
        return {}
    return {t: score[rows[t]["metric"]] for t, score in scores.items()}


def column(rows: Rows, field: str, until: float = math.inf) -> dict[int, Any]:
    """One field of the rows with t <= `until`, as the mapping t -> value that `alma.metrics` takes."""
    return {t: row[field] for t, row in rows.items() if t <= until}


def compute(rows: Rows, until: float = math.inf) -> float:
    """Comp up to and with t = `until`, in TFLOPs."""
    return metrics.cumulative_compute({t: _training(row) for t, row in rows.items() if t <= until}) / 1e12


def _training(row: dict[str, Any]) -> float:
    """FLOPs of training; image runs used to count the learner's validation in `train_flops`."""
    flops = row["extra"].get("flops", {})
    counted = "validation" in flops and sum(flops.values()) == row["train_flops"]
    return row["train_flops"] - (flops["validation"] if counted else 0)


def memory(rows: Rows, until: float = math.inf) -> int:
    """Mem up to and with t = `until`, in parameters."""
    return metrics.cumulative_memory(column(rows, "parameters", until))


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """The run directories among and below `places`, each once; UserError where there are none."""
    found: dict[Path, Run] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"{place} is not a folder: give run directories, or folders that hold some")
        below = [Path(folder) for folder, _, files in os.walk(place) if "run.json" in files]
        if not below:
            raise UserError(f"no runs in {place}: no folder in it has a run.json")
        found |= {folder.resolve(): Run.read(folder) for folder in sorted(below)}
    return list(found.values())


def configuration(config: Mapping[str, Any]) -> str:
    """What repeats have in common: all settings but the seed."""
    rest = {key: value for key, value in config.items() if key != "seed"}
    return json.dumps(rest, sort_keys=True)


def group(runs: Sequence[Run]) -> list[list[Result]]:
    """Results that can stand in one table (same metric, same B), each table sorted and labelled."""
    repeats: dict[str, list[tuple[Run, Rows]]] = {}
    for run in runs:
        rows = {row["t"]: row for row in run.rows}
        if rows:
            repeats.setdefault(configuration(run.config), []).append((run, rows))
    tables: dict[tuple[str, int], list[Result]] = {}
    for members in repeats.values():
        common = set.intersection(*(set(rows) for _, rows in members))
        cut = tuple({t: rows[t] for t in sorted(common)} for _, rows in members)
        if not common:
            places = ", ".join(str(run.directory) for run, _ in members)
            raise UserError(f"{places} repeat one configuration but share no t: report them one by one")
        ends = {_end(run) for run, _ in members}
        result = Result(members[0][0].config, cut, end=min(ends, key=lambda end: end or 0))
        tables.setdefault((result.metric, result.config["megabatches"]), []).append(result)
    return [labelled(tables[key]) for key in sorted(tables)]


def _end(run: Run) -> int | None:
    """The t of the last stage that was asked for; None where older runs do not record --stages."""
    config, asked = run.config, run.info.get("stages")
    if asked is None and "fairseq_flags" in config:
        return None
    return stages(config["megabatches"], config["waiting_time"], config["replay"])[:asked][-1].last


def labelled(results: Sequence[Result]) -> list[Result]:
    """The results sorted, each with the settings in which it differs from another one."""
    configs = [flatten(result.config) for result in results]
    names = labels.differing(configs)
    found = [
        replace(result, settings=labels.describe(config, names))
        for result, config in zip(results, configs, strict=True)
    ]
    return sorted(found, key=lambda result: (result.config["learner"], result.config["waiting_time"]))
