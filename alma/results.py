"""Run directories as results: found on disk, repeats with other seeds put together, labelled apart."""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alma import metrics
from alma.errors import UserError
from alma.records import Run, flatten

Rows = dict[int, dict[str, Any]]
"""The rows of one run by t."""


@dataclass(frozen=True)
class Result:
    """One configuration and its repeats: the runs that differ from it only in their seed."""

    config: dict[str, Any]
    repeats: tuple[Rows, ...]  # each cut to the t that all of them have
    settings: str = ""  # what tells it apart from the others shown, beside learner, waiting time, replay

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

    def waiting(self, t: int) -> bool:
        """Whether no stage was complete at t, so that the untrained model was evaluated."""
        return self.repeats[0][t]["stage"] is None

    def over_seeds(self, measure: Callable[[Rows], float]) -> tuple[float, float]:
        """Mean over the repeats of a number measured on each, and its sample standard deviation."""
        values = [measure(rows) for rows in self.repeats]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def column(rows: Rows, field: str, until: float = math.inf) -> dict[int, Any]:
    """One field of the rows with t <= `until`, as the mapping t -> value that `alma.metrics` takes."""
    return {t: row[field] for t, row in rows.items() if t <= until}


def compute(rows: Rows, until: float = math.inf) -> float:
    """Comp up to and with t = `until`, in TFLOPs."""
    return metrics.cumulative_compute(column(rows, "train_flops", until)) / 1e12


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


def group(runs: Sequence[Run]) -> list[list[Result]]:
    """Results that can stand in one table (same metric, same B), each table sorted and labelled."""
    repeats: dict[str, list[tuple[Run, Rows]]] = {}
    for run in runs:
        rows = {row["t"]: row for row in run.rows}
        if rows:
            settings = {key: value for key, value in run.config.items() if key != "seed"}
            repeats.setdefault(json.dumps(settings, sort_keys=True), []).append((run, rows))
    tables: dict[tuple[str, int], list[Result]] = {}
    for members in repeats.values():
        common = set.intersection(*(set(rows) for _, rows in members))
        cut = tuple({t: rows[t] for t in sorted(common)} for _, rows in members)
        if not common:
            places = ", ".join(str(run.directory) for run, _ in members)
            raise UserError(f"{places} repeat one configuration but share no t: report them one by one")
        result = Result(members[0][0].config, cut)
        tables.setdefault((result.metric, result.config["megabatches"]), []).append(result)
    return [_labelled(tables[key]) for key in sorted(tables)]


def _labelled(results: list[Result]) -> list[Result]:
    """The results sorted, each with the settings in which it differs from another one."""
    shown_anyway = {"learner", "name", "waiting_time", "replay", "seed", "megabatches"}
    flat = [flatten(result.config) for result in results]
    keys = dict.fromkeys(key for config in flat for key in config if key not in shown_anyway)
    differing = [key for key in keys if _tells_apart(key, flat)]
    labelled = [
        replace(result, settings=" ".join(f"{key}={config[key]}" for key in differing if key in config))
        for result, config in zip(results, flat, strict=True)
    ]
    return sorted(labelled, key=lambda result: (result.config["learner"], result.config["waiting_time"]))


def _tells_apart(key: str, configs: list[dict[str, Any]]) -> bool:
    """Whether runs that have the setting differ in it, or runs of one learner do (which may lack it)."""
    having = {json.dumps(config[key]) for config in configs if key in config}
    of_learner: dict[str, set[str]] = {}
    for config in configs:
        of_learner.setdefault(config["learner"], set()).add(json.dumps(config.get(key)))
    return len(having) > 1 or any(len(values) > 1 for values in of_learner.values())
