"""Sections of the report page: the results of one data set, metric and B."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from alma.errors import UserError
from alma.records import Run
from alma.report.labels import as_setting, replay
from alma.report.lm.entries import size_of
from alma.report.results import Result, group, labelled

_DIGITS = 6  # significant digits of the numbers on the page


class Section(NamedTuple):
    """Results of one data set, metric and B."""

    title: str
    results: list[Result]


def find_sections(runs: Sequence[Run]) -> list[Section]:
    """A section per data set, metric and B. UserError: no run has rows, or repeats share no t."""
    found: dict[tuple[str, str, int, str], list[Result]] = {}
    for result in (result for results in group(runs) for result in results):
        data, checksum = data_of(result.config)
        name = f"test {result.display.name}"
        found.setdefault((data, name, result.megabatches, checksum), []).append(result)
    if not found:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    names = Counter(key[:3] for key in found)
    sections = []
    for key in sorted(found):
        data, name, megabatches, checksum = key
        title = f"{data + ': ' if data else ''}{name}, B = {megabatches}"
        title += f" ({checksum[:8]})" if names[key[:3]] > 1 else ""
        sections.append(Section(title, sorted(labelled(found[key]), key=lambda result: result.rank)))
    return sections


def data_of(config: dict[str, Any]) -> tuple[str, str]:
    """Name and checksum of the data: an image data set, or the stream of a language model; "" if unknown."""
    name = config.get("dataset") or config.get("stream") or ""
    return str(name), str(config.get("data") or config.get("stream_sha256") or "")


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
