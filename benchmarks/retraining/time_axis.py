"""Labels of periods, such as 2013-Q2, as numbers on the axis of a matrix and back."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from alma import dates
from alma.errors import UserError
from alma.report.advice.period import Period

_DAYS_BEFORE_1 = 1  # `dates` counts days from 0, `date` from 1


@dataclass(frozen=True)
class TimeAxis:
    """The axis of times of a matrix."""

    kind: str
    """"quarter", "month", "week", "day"; empty: the labels are numbers, or years."""

    def number(self, label: str) -> float:
        """UserError: the label is of another kind."""
        try:
            return float(dates.number_in(self.kind, label) if self.kind else label)
        except (ValueError, AssertionError):
            kind = self.kind or "number"
            raise UserError(f"{label}: no {kind}, as the times of the matrix are") from None

    def label(self, number: float) -> str:
        """The label of a number."""
        if not self.kind:
            return f"{number:.12g}"
        if self.kind == "day":
            return date.fromordinal(int(number) + _DAYS_BEFORE_1).isoformat()
        return dates.label(self.kind, int(number))


def axis_of(paths: Sequence[Path]) -> TimeAxis:
    """The axis of the times in files that `read_groups` could read."""
    with paths[0].open(encoding="utf-8-sig", newline="") as file:
        label = next(csv.DictReader(file))["tested_on"].strip()
    kind = Period.of([label]).noun
    return TimeAxis("" if kind in ("mega-batch", "year") else kind)
