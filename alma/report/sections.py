"""Sections of the report page: the results of one data set, metric and B, with their runs."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from alma.configs import canonical
from alma.records import Run
from alma.report.labels import as_setting, replay
from alma.report.lm.entries import size_of
from alma.report.results import Result, group, labelled

_DIGITS = 6  # significant digits of the numbers on the page


class Section(NamedTuple):
    """Results of one data set, metric and B; `runs` has the runs of each result, one per repeat."""

    title: str
    results: list[Result]
    runs: list[list[Run]]


def find_sections(runs: Sequence[Run]) -> list[Section]:
    """A section per data set, metric and B. Runs without rows are left out; raises as `group` does."""
    repeats: dict[str, list[Run]] = {}
    for run in runs:
        if run.rows:
            repeats.setdefault(canonical(run.config, "seed"), []).append(run)
    found: dict[tuple[str, str, int, str], list[Result]] = {}
    for results in group(runs):
        for result in results:
            data, checksum = data_of(result.config)
            name = f"test {result.display.name}"
            found.setdefault((data, name, result.config["megabatches"], checksum), []).append(result)
    names = Counter(key[:3] for key in found)
    return [
        Section(
            f"{data + ': ' if data else ''}{name}, B = {megabatches}"
            + (f" ({checksum[:8]})" if names[data, name, megabatches] > 1 else ""),
            ordered := sorted(labelled(found[key]), key=lambda result: result.rank),
            [repeats[canonical(result.config, "seed")] for result in ordered],
        )
        for key in sorted(found)
        for data, name, megabatches, checksum in [key]
    ]


def data_of(config: dict[str, Any]) -> tuple[str, str]:
    """Name and checksum of the data: an image data set, or the stream of a language model; "" if unknown."""
    name = config.get("dataset") or config.get("stream") or ""
    return str(name), str(config.get("data") or config.get("stream_sha256") or "")


def configuration(result: Result, runs: Sequence[Run]) -> dict[str, Any]:
    """What the page's filters and labels need of a result."""
    return {
        "label": result.label,
        "learner": result.learner,
        "w": result.waiting_time,
        "size": model_size(result),
        "replay": replay(result.config),
        "schedule": as_setting(result.config.get("schedule", "each stage")),
        "average": as_setting(result.config.get("average", "none")),
        "seeds": [as_setting(run.config["seed"]) for run in runs],
        "progress": result.progress,
        "megabatches": result.config["megabatches"],
        "finished": finished(result),
    }


def model_size(result: Result) -> str:
    """The size of the model: units of a hidden layer (images), or the architecture (language models)."""
    config = result.config
    if "hidden" in config:
        return as_setting(config["hidden"])
    return size_of(result) if "arch" in config else ""


def finished(result: Result) -> bool:
    """Whether every repeat has evaluated all B mega-batches, so that averages and sums are comparable."""
    return result.progress == result.config["megabatches"]


def rounded(value: float | None) -> float | int | None:
    """A number for JSON with few digits; None for NaN and infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
