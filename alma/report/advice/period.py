"""The periods of a stream: how they are named, counted and dated."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alma.dates import number_in
from alma.tables import number

_NAMES = {("month", 3): "every quarter", ("day", 7): "every week"}
_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


class Calendar(NamedTuple):
    """How periods of one kind are labelled and counted."""

    label: str
    """Pattern of the labels that a stream gives to its periods."""
    year: int = 1
    """Periods in a year."""
    cadences: tuple[int, ...] = (1, 2, 4, 8)
    """Cadences that are compared by default, in periods."""


CALENDAR = {
    "day": Calendar(r"\d{4}-\d{2}-\d{2}", 365, (1, 7, 30, 365)),
    "week": Calendar(r"\d{4}-W\d{2}", 52, (1, 4, 13, 52)),
    "month": Calendar(r"\d{4}-\d{2}", 12, (1, 3, 6, 12)),
    "quarter": Calendar(r"\d{4}-Q\d", 4),
    "year": Calendar(r"\d{4}"),
}


class Period(NamedTuple):
    """The unit of time of a stream: the time between two occasions to retrain."""

    noun: str = "period"
    """A key of CALENDAR, "mega-batch" or "period"."""
    size: float = 1.0
    """Length of a period on the axis of the losses."""

    @classmethod
    def of(cls, labels: Sequence[str]) -> "Period":
        """The kind of period that these labels name, if they are consecutive dates; else a
        mega-batch.

        Raises ValueError if a label is a date that does not exist.
        """
        for noun, calendar in CALENDAR.items():
            if labels and all(re.fullmatch(calendar.label, label) for label in labels):
                numbers = [number_in(noun, label) for label in labels]
                consecutive = set(np.diff(numbers)) <= {1}
                return cls(noun if consecutive else "mega-batch")
        return cls("mega-batch")

    @property
    def dated(self) -> bool:
        """Whether it is a period of the calendar."""
        return self.noun in CALENDAR

    @property
    def calendar(self) -> Calendar:
        """How it is counted; the defaults if it is not dated."""
        return CALENDAR.get(self.noun, Calendar(""))

    @property
    def year(self) -> float:
        """Length of a year on the axis of the losses; inf if unknown, or not above a period."""
        return self.calendar.year * self.size if self.calendar.year > 1 else math.inf

    def every(self, k: int) -> str:
        """The name of a cadence of k periods: "every quarter", "every 3rd mega-batch"."""
        if k == 1:
            return f"every {self.noun}"
        if not self.dated:
            return f"every {ordinal(k)} {self.noun}"
        if k == self.calendar.year:
            return "once a year"
        return _NAMES.get((self.noun, k), f"every {self.span(k)}")

    def span(self, k: float) -> str:
        """Such as "3 months"."""
        return f"{number(k)} {self.noun if k == 1 else self.plural}"

    @property
    def plural(self) -> str:
        """Such as "months"."""
        return f"{self.noun}es" if self.noun.endswith("ch") else f"{self.noun}s"


def ordinal(k: int) -> str:
    """Such as "2nd", "11th", "21st"."""
    if k % 100 in (11, 12, 13):
        return f"{k}th"
    return f"{k}{_SUFFIXES.get(k % 10, 'th')}"
