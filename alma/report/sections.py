"""Sections of the report page: the results of one data set, metric and B."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from alma.errors import UserError
from alma.records import Run
from alma.report.labels import as_setting
from alma.report.lm.entries import size_of
from alma.report.results import Result, group


class Section(NamedTuple):
    """Results of one data set, metric and B."""

    title: str
    results: list[Result]


def find_sections(runs: Sequence[Run]) -> list[Section]:
    """A section per data set, metric and B. UserError: no run has rows, or repeats share no t."""
    sections = []
    for results in group(runs):
        first = results[0]
        title = f"{first.data}: " * bool(first.data) + f"test {first.display.name}, B = {first.megabatches}"
        sections.append(Section(title, sorted(results, key=lambda result: result.rank)))
    if not sections:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    return sections


def model_size(result: Result) -> str:
    """The size of the model: units of a hidden layer (images), or the architecture (language models)."""
    if "hidden" in result.config:
        return as_setting(result.config["hidden"])
    return size_of(result) if "arch" in result.config else ""


def rounded(value: float | None) -> float | int | None:
    """A number for JSON with few digits; None for NaN and infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
