"""Dates, and the periods of a dated stream: years, quarters, months or ISO weeks of UTC.

A date is an interval of UTC, because `2023` or `2023-05` names no moment. A document belongs to a
period if its whole interval lies in it. docs/data.md lists the formats of dates that are read;
ambiguous ones are refused.
"""

import argparse
import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from alma.errors import hint

Interval = tuple[datetime, datetime]
_MONTHS = {"year": 12, "quarter": 3, "month": 1}
UNITS = (*_MONTHS, "week")
_YEARS = re.compile(r"([1-9][0-9]{0,3})-years?")
_EPOCH = datetime(1970, 1, 1)
_CALENDAR = re.compile(
    r"(?P<year>\d{4})"
    r"(?:-(?P<last>\d{4})|-(?P<month>\d\d)|-?Q(?P<quarter>[1-4])|-?W(?P<week>\d\d))?",
    re.ASCII,
)
_RFC_2822 = re.compile(
    r"(?:[A-Z][a-z]{2}, *)?\d{1,2} +[A-Z][a-z]{2} +\d{4} +\d\d:\d\d(?::\d\d)? +"
    r"(?:[+-]\d{4}|UTC?|GMT|[ECMP][SD]T)(?: *\(.*\))?",
    re.ASCII,
)
_ISO = re.compile(
    r"(?P<day>\d{4}(?:(?P<mark>[-/.])\d\d(?P=mark)\d\d|\d{4}|-?W\d\d-?\d))"
    r"(?:(?:[Tt_]| +)(?P<time>\d\d(?::?\d\d(?::?\d\d(?:[.,]\d+)?)?)?)"
    r" *(?P<zone>[Zz]|UTC|GMT|[+-]\d\d(?::?\d\d){0,2})?)?",
    re.ASCII,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_HOUR = re.compile(r"(1[89]|2[01])\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])([01]\d|2[0-3])")
"""A number that could be YYYYMMDDHH."""
_SINCE_1970 = ("days", "seconds", "milliseconds", "microseconds")
"""Values of --date-format for numbers since 1970; each is an argument name of timedelta."""
LeftOut = StrEnum("LeftOut", ["UNDATED", "UNREADABLE", "IMPRECISE", "BEFORE", "AFTER", "LATE"])
"""The reason why a document belongs to no period."""


@dataclass(frozen=True)
class Dates:
    """How documents are assigned to periods. stream.json records all fields except `after`."""

    by: str  # one of UNITS, or `N-years`
    key: str = "date"  # the field of .jsonl and .parquet files that holds the date
    format: str = ""  # see `date_format`; empty: as docs/data.md says
    start: str = ""  # documents before it are left out; empty: none
    until: str = ""  # documents after the end of this date are left out; empty: none
    undated: str = "error"
    """`error`: a UserError lists documents without a usable date; `skip`: they are left out."""
    after: int | None = None
    """Number of the last period of the stream to append to; documents up to it are left out."""

    def period(self, value: Any) -> int | LeftOut:
        """The number of a document's period; `value` is its date as the file has it.

        Returns the reason instead if the document is left out.
        """
        try:
            days = interval(value, self.format)
        except (ValueError, OverflowError):
            return LeftOut.UNREADABLE
        if not days:
            return LeftOut.UNDATED
        first, last = days
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
        start, until = (
            interval(text) or (datetime.min, datetime.max) for text in (self.start, self.until)
        )
        return start[0], until[1]


def date_format(text: str) -> str:
    """An argparse type: a unit for numbers since 1970, or a strptime pattern with the year."""
    day = datetime(2023, 4, 5, tzinfo=UTC)
    with contextlib.suppress(ValueError, re.error):
        if text in _SINCE_1970 or datetime.strptime(day.strftime(text), text).year == day.year:
            return text
    choices = f"{hint(text, _SINCE_1970)} or give a pattern such as %Y%m%d or %d/%m/%Y"
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} ({choices})")


def interval(value: Any, written: str = "") -> Interval | None:
    """First and last moment of a date, in UTC; None for an empty value.

    `written` is a value of --date-format, see `date_format`. A time without a zone is UTC. Raises
    ValueError or OverflowError if `value` is no date or outside the years 1 to 9999.
    """
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "":
        return None
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        if written:
            value = _of_format(value, written)
        else:
            value = _of_text(value) if isinstance(value, str) else _of_number(value)
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return moment, moment
    if isinstance(value, date):
        return datetime.combine(value, time.min), datetime.combine(value, time.max)
    if not isinstance(value, tuple):
        raise ValueError(f"{value!r} is no date")
    return value


def _of_text(text: str) -> date | Interval:
    match = _CALENDAR.fullmatch(text)
    if match:
        return _named_days(**match.groupdict())
    if _RFC_2822.fullmatch(text):
        from email.utils import parsedate_to_datetime  # slow to import

        return parsedate_to_datetime(text)
    match = _ISO.fullmatch(text)
    if match:
        day = date.fromisoformat(re.sub("[/.]", "-", match["day"]))
        zone = (match["zone"] or "").upper().replace("UTC", "Z").replace("GMT", "Z")
        return datetime.fromisoformat(f"{day}T{match['time']}{zone}") if match["time"] else day
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no date")
    return _of_number(float(text))


def _of_number(value: float) -> date | Interval:
    if 1000 <= value <= 9999 and value == int(value):
        return _named_days(str(int(value)))
    if 1e8 <= abs(value) < 1e11 and not _HOUR.fullmatch(f"{value:.15g}"):
        return _EPOCH + timedelta(seconds=value)
    if 3e11 <= abs(value) < 1e13:
        return _EPOCH + timedelta(milliseconds=value)
    raise ValueError(f"{value!r} could be several dates, or is none")


def _of_format(value: float | str, written: str) -> date | Interval:
    if written in _SINCE_1970:
        return _EPOCH + timedelta(**{written: float(value)})
    text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
    moment = datetime.strptime(text, written)
    if re.search("%[HIMSfcX]", written):
        return moment
    if re.search("%[djxUWV]", written):
        return moment.date()
    month = f"{moment.month}" if re.search("%[mbB]", written) else None
    return _named_days(f"{moment.year:04}", month=month)


def _named_days(
    year: str,
    last: str | None = None,
    month: str | None = None,
    quarter: str | None = None,
    week: str = "",
) -> Interval:
    """First and last moment of years, a month, a quarter or an ISO week."""
    if week:
        by = "week"
        first = date.fromisocalendar(int(year), int(week), 1)
    elif quarter:
        by = "quarter"
        first = date(int(year), 3 * int(quarter) - 2, 1)
    elif month:
        by = "month"
        first = date(int(year), int(month), 1)
    else:
        by = "year"
        first = date(int(year), 1, 1)
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
    match = _YEARS.fullmatch(text)
    if match:
        return f"{match[1]}-years" if match[1] != "1" else "year"
    if text not in UNITS:
        choices = f"give N-years, such as 5-years; {hint(text, UNITS)}"
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} ({choices})")
    return text


@lru_cache
def _months(by: str) -> int:
    """Months of a period."""
    return _MONTHS.get(by) or 12 * int(by.removesuffix("-years"))


def number_of(by: str, day: date) -> int:
    """The number of the period that contains `day`, or of the day itself (`by` "day").

    Consecutive periods have consecutive numbers. A week belongs to the ISO year of its Thursday.
    Spans of N years begin at multiples of N.
    """
    if by in ("day", "week"):
        return (day.toordinal() - 1) // {"day": 1, "week": 7}[by]  # 0001-01-01 is a Monday
    return (12 * day.year + day.month - 1) // _months(by)


def number_in(by: str, text: str) -> int:
    """The number of the period or day named by a text such as 2013-05; ValueError for others."""
    days = interval(text)
    assert days
    return number_of(by, days[0])


def first_day(by: str, number: int) -> date:
    """The first day of a period. ValueError: it is beyond the year 9999."""
    if by == "week":
        return date.fromordinal(7 * number + 1)
    month = max(_months(by) * number, 12)  # the span 0..N-1 begins in year 1: there is no year 0
    return date(month // 12, month % 12 + 1, 1)


def label(by: str, number: int) -> str:
    """The name of a period, which `interval` reads as a date: `2023-W05`, `2020-2024`."""
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


def begins(period: str) -> str:
    """The first day of a period, or of a range of periods such as `2020-Q1..2021-Q2`."""
    days = interval(period.partition("..")[0])
    assert days
    return days[0].date().isoformat()
