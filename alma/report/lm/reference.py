"""The paper's Tables 1 and 2 as data (table1.csv, table2.csv). Its t_0..t_3 are t = 1..4 here."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import NamedTuple

from alma.errors import UserError
from alma.learners import LEARNERS

KS = (3, 4)
"""Numbers k of mega-batches in Table 1."""


class Reference(NamedTuple):
    """A line of the paper's Table 2, for one of its sizes."""

    learner: str
    waiting_time: int
    update_multiplier: int
    experts: str  # such as 4, or 4@2 for 2 members
    size: str  # base or large
    parameters: float
    perplexity: dict[int, float]  # by t = 1..4, where the paper has a number


def reference() -> list[Reference]:
    """The paper's Table 2. UserError: table2.csv is damaged."""
    lines = []
    for line, fail in _read("table2.csv"):
        wait, multiplier = (int(_number(line[key], fail)) for key in ("waiting_time", "update_multiplier"))
        for size in ("base", "large"):
            cells = {t: line[f"{size}_t{t}"] for t in range(1, 5)}
            if any((cell == "*") != (t < wait) for t, cell in cells.items()):
                raise fail("`*` belongs to t < waiting_time and nowhere else")
            perplexity = {t: _number(cell, fail) for t, cell in cells.items() if cell not in ("", "*")}
            if not perplexity:
                raise fail(f"no perplexity of {size}")
            parameters = 1e6 * _number(line[size].removesuffix("M"), fail)
            setting = line["learner"], wait, multiplier, line["experts"]
            lines.append(Reference(*setting, size, parameters, perplexity))
    return lines


def reference_iid() -> dict[tuple[str, str, str, int], tuple[float, float]]:
    """The paper's Table 1: (i.i.d., sequential) perplexity by (size, learner, experts, k)."""
    return {
        (line["size"], line["learner"], line["experts"], k): (
            _number(line[f"k{k}_iid"], fail),
            _number(line[f"k{k}_seq"], fail),
        )
        for line, fail in _read("table1.csv")
        for k in KS
    }


def _read(name: str) -> Iterator[tuple[dict[str, str], Callable[[str], UserError]]]:
    """The lines of a table, each with a function that makes the error about it."""
    text = (files("alma.report.lm") / name).read_text("utf-8")
    for number, line in enumerate(csv.DictReader(io.StringIO(text)), start=2):

        def fail(what: str, number: int = number) -> UserError:
            return UserError(f"{name}:{number}: {what}: install alma again")

        if None in line or None in line.values() or line["learner"] not in LEARNERS:
            raise fail("not a line of this table")
        yield line, fail


def _number(text: str, fail: Callable[[str], UserError]) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise fail(f"{text!r} is not a positive number")
    return float(text)
