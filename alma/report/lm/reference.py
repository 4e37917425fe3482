"""The paper's Tables 1 and 2 as data (table1.csv, table2.csv). Its t_0..t_3 are t = 1..4 here."""

import csv
from importlib.resources import files
from typing import NamedTuple

KS = (3, 4)  # numbers k of mega-batches in Table 1


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
    """The paper's Table 2."""
    lines = []
    for line in _read("table2.csv"):
        for size in ("base", "large"):
            cells = {t: line[f"{size}_t{t}"] for t in range(1, 5)}
            perplexity = {t: float(cell) for t, cell in cells.items() if cell not in ("", "*")}
            parameters = 1e6 * float(line[size].removesuffix("M"))
            setting = line["learner"], int(line["waiting_time"]), int(line["update_multiplier"])
            lines.append(Reference(*setting, line["experts"], size, parameters, perplexity))
    return lines


def reference_iid() -> dict[tuple[str, str, str, int], tuple[float, float]]:
    """The paper's Table 1: (i.i.d., sequential) perplexity by (size, learner, experts, k)."""
    return {
        (line["size"], line["learner"], line["experts"], k): (
            float(line[f"k{k}_iid"]),
            float(line[f"k{k}_seq"]),
        )
        for line in _read("table1.csv")
        for k in KS
    }


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((files(__package__) / name).read_text("utf-8").splitlines()))
