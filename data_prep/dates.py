"""Dates of documents, and the periods of a dated stream: years, quarters, months, ISO weeks or days of UTC.

A date is an interval of UTC, because `2023` or `2023-05` names no moment. A document is in a period if all
of its interval is.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

UNITS = ("year", "quarter", "month", "week", "day")
_YEARS = re.compile(r"([1-9][0-9]{0,3})-years?")
_EPOCH = datetime(1970, 1, 1)
_QUARTER = 3  # months
_CALENDAR = re.compile(
    r"(?P<year>\d{4})(?:-(?P<last>\d{4})|-(?P<month>\d\d)|-?Q(?P<quarter>[1-4])|-?W(?P<week>\d\d))?", re.ASCII
)
_RFC_2822 = re.compile(
    r"(?:[A-Z][a-z]{2}, *)?\d{1,2} +[A-Z][a-z]{2} +\d{4} +\d\d:\d\d(?::\d\d)? +"
    r"(?:[+-]\d{4}|UTC?|GMT|[ECMP][SD]T)(?: *\(.*\))?",
    re.ASCII,
)
_DAY_LENGTH = 10  # characters of YYYY-MM-DD; with a time there are more


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
    if value is None:
        return None
    if isinstance(value, str):
        value = value.strip()
        if not value:
            return None
        if match := _CALENDAR.fullmatch(value):
            return _days(*_calendar(**match.groupdict()))
        value = _moment(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if 1000 <= value <= 9999 and value == int(value):
            return _days(date(int(value), 1, 1), date(int(value), 12, 31))
        value = _EPOCH + timedelta(seconds=value)
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return moment, moment
    if isinstance(value, date):
        return _days(value, value)
    raise ValueError(f"{value!r} is no date")


def _moment(text: str) -> date | datetime:
    if _RFC_2822.fullmatch(text):
        from email.utils import parsedate_to_datetime  # slow to import

        return parsedate_to_datetime(text)
    return date.fromisoformat(text) if len(text) <= _DAY_LENGTH else datetime.fromisoformat(text)


def _calendar(
    year: str, last: str | None, month: str | None, quarter: str | None, week: str | None
) -> tuple[date, date]:
    """First and last day of years, a month, a quarter or an ISO week."""
    if week:
        monday = date.fromisocalendar(int(year), int(week), 1)
        return monday, min(monday, date.max - timedelta(days=6)) + timedelta(days=6)
    end = 12
    start = 1
    if month:
        start = end = int(month)
    elif quarter:
        end = _QUARTER * int(quarter)
        start = end - _QUARTER + 1
    first = date(int(year), start, 1)
    stop = int(last or year)
    if stop < first.year:
        raise ValueError(f"{year}-{last} ends before it starts")
    following = date(stop + (stop < 9999), 1, 1) if end == 12 else date(stop, end + 1, 1)
    return first, date.max if stop == 9999 and end == 12 else following - timedelta(days=1)


def _days(first: date, last: date) -> tuple[datetime, datetime]:
    return datetime.combine(first, time.min), datetime.combine(last, time.max)


def span(text: str) -> str:
    """An argparse type: one of UNITS, or `N-years`."""
    if match := _YEARS.fullmatch(text):
        return f"{match[1]}-years" if match[1] != "1" else "year"
    if text not in UNITS:
        from argparse import ArgumentTypeError

        from alma.errors import hint

        raise ArgumentTypeError(
            f"invalid choice: {text!r} (give N-years, such as 5-years; {hint(text, UNITS)})"
        )
    return text


@lru_cache
def _years(by: str) -> int:
    match = _YEARS.fullmatch(by)
    return int(match[1]) if match else 1


def number_of(by: str, day: date) -> int:
    """The number of the period that has a day; the next period has the next number.

    A week belongs to the ISO year of its Thursday. Spans of N years begin at multiples of N.
    """
    if by == "day":
        return day.toordinal()
    if by == "week":
        return (day.toordinal() - 1) // 7  # 0001-01-01 is a Monday
    if by == "month":
        return 12 * day.year + day.month - 1
    if by == "quarter":
        return 4 * day.year + (day.month - 1) // _QUARTER
    return day.year // _years(by)


def label(by: str, number: int) -> str:
    """The name of a period, a date that `interval` reads: `2023-W05`, `2020-2024`."""
    if by == "day":
        return date.fromordinal(number).isoformat()
    if by == "week":
        year, week, _ = date.fromordinal(7 * number + 1).isocalendar()
        return f"{year:04d}-W{week:02d}"
    if by == "month":
        return f"{number // 12:04d}-{number % 12 + 1:02d}"
    if by == "quarter":
        return f"{number // 4:04d}-Q{number % 4 + 1}"
    years = _years(by)
    first, last = max(years * number, 1), min(years * (number + 1) - 1, 9999)
    return f"{first:04d}-{last:04d}" if years > 1 else f"{first:04d}"
