"""Dates of documents, and the periods of a dated stream: years, quarters, months or ISO weeks of UTC.

A date is an interval of UTC, because `2023` or `2023-05` names no moment. A document is in a period if all
of its interval is.
"""

import argparse
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from alma.errors import hint

UNITS = ("year", "quarter", "month", "week")
_MONTHS = {"year": 12, "quarter": 3, "month": 1}
_YEARS = re.compile(r"([1-9][0-9]{0,3})-years?")
_EPOCH = datetime(1970, 1, 1)
_CALENDAR = re.compile(
    r"(?P<year>\d{4})(?:-(?P<last>\d{4})|-(?P<month>\d\d)|-?Q(?P<quarter>[1-4])|-?W(?P<week>\d\d))?", re.ASCII
)
_RFC_2822 = re.compile(
    r"(?:[A-Z][a-z]{2}, *)?\d{1,2} +[A-Z][a-z]{2} +\d{4} +\d\d:\d\d(?::\d\d)? +"
    r"(?:[+-]\d{4}|UTC?|GMT|[ECMP][SD]T)(?: *\(.*\))?",
    re.ASCII,
)
_DAY_LENGTH = 10  # characters of YYYY-MM-DD


class LeftOut(StrEnum):
    """Why a document is in no period."""

    UNDATED = "undated"
    UNREADABLE = "unreadable"
    IMPRECISE = "imprecise"
    BEFORE = "before"
    AFTER = "after"
    LATE = "late"


@dataclass(frozen=True)
class Dates:
    """How a document gets its period. stream.json records the fields by name, but `after`."""

    by: str
    """One of UNITS, or `N-years`."""
    key: str = "date"
    """The field of .jsonl and .parquet files that holds the date."""
    start: str = ""
    """Documents before it are left out; empty: none."""
    until: str = ""
    """Documents after all of it are left out."""
    undated: str = "error"
    """`error`: a UserError lists documents without a usable date; `skip`: they are left out."""
    after: int | None = None
    """Number of the last period of a stream that grows: what is not later is left out."""

    def period(self, value: Any) -> int | LeftOut:
        """The number of the period of a document, by its date as in the file."""
        try:
            found = interval(value)
        except (ValueError, OverflowError):
            return LeftOut.UNREADABLE
        if not found:
            return LeftOut.UNDATED
        first, last = found
        start, until = self._bounds
        if last < start:
            return LeftOut.BEFORE
        if first > until:
            return LeftOut.AFTER
        number = number_of(self.by, last)
        if self.after is not None and number <= self.after:
            return LeftOut.LATE
        if first < start or last > until or (first != last and number_of(self.by, first) != number):
            return LeftOut.IMPRECISE
        return number

    @cached_property
    def _bounds(self) -> tuple[datetime, datetime]:
        start, until = (interval(text) or (datetime.min, datetime.max) for text in (self.start, self.until))
        return start[0], until[1]


def interval(value: Any) -> tuple[datetime, datetime] | None:
    """First and last moment of a date, in UTC; None: there is none.

    Text: ISO 8601, `2023`, `2023-05`, `2023-Q2`, `2023-W20`, `2020-2024`, or RFC 2822. Numbers: seconds since
    1970, but a year from 1000 to 9999. A time without a zone is UTC. ValueError, OverflowError: no date, or
    beyond the years 1 to 9999.
    """
    if isinstance(value, str):
        value = value.strip()
        if match := _CALENDAR.fullmatch(value):
            return _named_days(**match.groupdict())
        if _RFC_2822.fullmatch(value):
            from email.utils import parsedate_to_datetime  # slow to import

            value = parsedate_to_datetime(value)
        elif value:
            value = (date if len(value) <= _DAY_LENGTH else datetime).fromisoformat(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if 1000 <= value <= 9999 and value == int(value):
            return _named_days(str(int(value)))
        value = _EPOCH + timedelta(seconds=value)
    if value is None or value == "":
        return None
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return moment, moment
    if isinstance(value, date):
        return datetime.combine(value, time.min), datetime.combine(value, time.max)
    raise ValueError(f"{value!r} is no date")


def _named_days(
    year: str, last: str | None = None, month: str | None = None, quarter: str | None = None, week: str = ""
) -> tuple[datetime, datetime]:
    """First and last moment of years, a month, a quarter or an ISO week."""
    if week:
        by, first = "week", date.fromisocalendar(int(year), int(week), 1)
    elif quarter:
        by, first = "quarter", date(int(year), 3 * int(quarter) - 2, 1)
    else:
        by, first = "month" if month else "year", date(int(year), int(month or 1), 1)
    final = date(int(last), 1, 1) if last else first
    if final < first:
        raise ValueError(f"{year}-{last} ends before it starts")
    try:
        end = first_day(by, number_of(by, final) + 1) - timedelta(days=1)
    except ValueError:  # the year 10000
        end = date.max
    return datetime.combine(first, time.min), datetime.combine(end, time.max)


def span(text: str) -> str:
    """An argparse type: one of UNITS, or `N-years`."""
    if match := _YEARS.fullmatch(text):
        return f"{match[1]}-years" if match[1] != "1" else "year"
    if text not in UNITS:
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (give N-years, such as 5-years; {hint(text, UNITS)})"
        )
    return text


@lru_cache
def _months(by: str) -> int:
    """Months of a period."""
    return _MONTHS.get(by) or 12 * int(by.removesuffix("-years"))


def number_of(by: str, day: date) -> int:
    """The number of the period that has a day; the next period has the next number.

    A week belongs to the ISO year of its Thursday. Spans of N years begin at multiples of N.
    """
    if by == "week":
        return (day.toordinal() - 1) // 7  # 0001-01-01 is a Monday
    return (12 * day.year + day.month - 1) // _months(by)


def first_day(by: str, number: int) -> date:
    """The first day of a period. ValueError: it is beyond the year 9999."""
    if by == "week":
        return date.fromordinal(7 * number + 1)
    month = max(_months(by) * number, 12)  # there is no year 0
    return date(month // 12, month % 12 + 1, 1)


def label(by: str, number: int) -> str:
    """The name of a period, a date that `interval` reads: `2023-W05`, `2020-2024`."""
    day = first_day(by, number)
    if by == "week":
        year, week, _ = day.isocalendar()
        return f"{year:04d}-W{week:02d}"
    if by == "month":
        return day.isoformat()[:7]
    if by == "quarter":
        return f"{day.year:04d}-Q{day.month // 3 + 1}"
    last = min((_months(by) * (number + 1) - 1) // 12, 9999)
    return f"{day.year:04d}" if by == "year" else f"{day.year:04d}-{last:04d}"
