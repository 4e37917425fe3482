"""Sections of the report page: the results of one data set, metric and B."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from alma.errors import UserError
from alma.records import Run
from alma.report.labels import as_setting, replay
from alma.report.lm.entries import size_of
from alma.report.results import Result, group

_DIGITS = 6  # significant digits of the numbers on the page


class Section(NamedTuple):
    """Results of one data set, metric and B."""

    title: str
    results: list[Result]
    baseline: Result | None = None  # that of the table of differences


def find_sections(runs: Sequence[Run]) -> list[Section]:
    """A section per data set, metric and B. UserError: no run has rows, or repeats share no t."""
    tables = group(runs)
    if not tables:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    return [Section(_title(results[0]), sorted(results, key=lambda each: each.rank)) for results in tables]


def _title(result: Result) -> str:
    named = f"{result.data}: " if result.data else ""
    return f"{named}test {result.display.name}, B = {result.megabatches}"


def configuration(result: Result) -> dict[str, Any]:
    """What the page's filters and labels need of a result."""
    return {
        "label": result.label,
        "learner": result.learner,
        "w": result.waiting_time,
        "size": model_size(result),
        "replay": replay(result.config),
        "schedule": as_setting(result.config.get("schedule", "each stage")),
        "average": as_setting(result.config.get("average", "none")),
        "seeds": [as_setting(run.config["seed"]) for run in result.runs],
        "progress": result.progress,
        "megabatches": result.megabatches,
        "finished": result.finished,
    }


def model_size(result: Result) -> str:
    """The size of the model: units of a hidden layer (images), or the architecture (language models)."""
    if "hidden" in result.config:
        return as_setting(result.config["hidden"])
    return size_of(result) if "arch" in result.config else ""


def rounded(value: float | None) -> float | int | None:
    """A number for JSON with few digits; None for NaN and infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
