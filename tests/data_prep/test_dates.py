"""Dates of documents and their periods."""

import math
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dates import Dates, LeftOut, interval, label, number_of, span

BY = ["week", "month", "quarter", "year", "2-years", "5-years", "7-years"]


def name_of(value: object, by: str, **fields: object) -> str:
    """The period of a date, or why it has none."""
    found = Dates(by, **fields).period(value)
    return found.value if isinstance(found, LeftOut) else label(by, found)


def day_of(value: object) -> str:
    """The day of UTC that has all of a date."""
    first, last = interval(value)
    assert first.date() == last.date()
    return first.date().isoformat()


@pytest.mark.parametrize(
    ("value", "day"),
    [
        ("2024-02-29", "2024-02-29"),
        ("20240229", "2024-02-29"),
        ("2024-W09-4", "2024-02-29"),
        (" 2024-02-29T23:59:59 ", "2024-02-29"),
        ("2024-02-29 23:59:59.999999Z", "2024-02-29"),
        ("2024-02-29T20:00:00-05:00", "2024-03-01"),
        ("2024-03-01T01:00:00+05:30", "2024-02-29"),
        ("2000-02-29T12", "2000-02-29"),
        ("Thu, 29 Feb 2024 23:30:00 -0100", "2024-03-01"),
        ("29 Feb 2024 23:30 EST", "2024-03-01"),
        ("Thu, 29 Feb 2024 23:30:00 GMT (a comment)", "2024-02-29"),
        (0, "1970-01-01"),
        (-0.5, "1969-12-31"),
        (1709251199.5, "2024-02-29"),
        (1709251200, "2024-03-01"),
        (999, "1970-01-01"),
        (-62135596800, "0001-01-01"),
        (253402300799, "9999-12-31"),
        (datetime(2024, 3, 1, 0, 30, tzinfo=timezone(timedelta(hours=2))), "2024-02-29"),
        (datetime(2024, 3, 1), "2024-03-01"),
        (date(2024, 2, 29), "2024-02-29"),
    ],
)
def test_a_day_of_utc(value, day):
    assert day_of(value) == day


@pytest.mark.parametrize(
    "value",
    [
        *"2023-02-29 1900-02-29 0000-01-01 -0044-03-15 10000-01-01 2023-13 2023-00 2023-W54 2021-W53".split(),
        *"2023-Q5 2023-2022 yesterday 2023- 202 202301 01/02/2023 0000 2023-01-01T25:00 1700000000".split(),
        *"9999-12-31T23:00-05:00 0001-01-01T00:00+05:00 \u0662\u0660\u0662\u0663 2023-01-01T00:00CET".split(),
        *("Thu, 29 Feb 2024 23:30:00 CET", "29 Feb 24 23:30 GMT", "29 Feb 2023 23:30 GMT", "\ud800"),
        *(math.nan, math.inf, 1e300, 10**30, 1.7e12, True, [2023], {"year": 2023}),
    ],
)
def test_what_is_no_date(value):
    assert name_of(value, "year") == "unreadable"


def test_undated():
    assert [name_of(value, "year") for value in (None, "", "  ")] == ["undated"] * 3


@pytest.mark.parametrize(
    ("value", "by", "period"),
    [
        ("2023", "year", "2023"),
        (2023, "year", "2023"),
        (2023.0, "year", "2023"),
        ("2023", "5-years", "2020-2024"),
        ("2023", "quarter", "imprecise"),
        ("2023-05", "quarter", "2023-Q2"),
        ("2023-05", "week", "imprecise"),
        ("2023-Q2", "year", "2023"),
        ("2023-Q4", "quarter", "2023-Q4"),
        ("2023-Q2", "month", "imprecise"),
        ("2020-2024", "5-years", "2020-2024"),
        ("2019-2024", "5-years", "imprecise"),
        ("2024-W01", "week", "2024-W01"),
        ("2024-W01", "year", "2024"),
        ("2026-W01", "year", "imprecise"),  # it begins on 2025-12-29
        ("2021-01-03", "week", "2020-W53"),
        ("2024-12-30", "week", "2025-W01"),
        ("0001", "5-years", "0001-0004"),
        ("9999-12", "year", "9999"),
        ("9999-W52", "week", "9999-W52"),
    ],
)
def test_a_date_must_be_within_its_period(value, by, period):
    assert name_of(value, by) == period


@given(st.dates(), st.dates(), st.sampled_from(BY))
def test_periods_follow_each_other(one, other, by):
    """Numbers ascend with days, labels with numbers, and a label is a date of its period."""
    one, other = sorted([one, other])
    low, high = number_of(by, one), number_of(by, other)
    assert low <= high
    assert (label(by, low) < label(by, high)) == (low < high)
    first, last = interval(label(by, low)) or (None, None)
    assert first
    assert last
    assert first.date() <= one <= last.date()
    assert {number_of(by, first), number_of(by, last)} == {low}
    for day in (first.date() - timedelta(days=first.date() > date.min), last.date()):
        following = day + timedelta(days=1) if day < date.max else day
        assert number_of(by, following) - number_of(by, day) in (0, 1)


@given(st.datetimes(datetime(1000, 1, 2), datetime(9999, 12, 30)), st.integers(-14 * 60, 14 * 60))
def test_zones_are_honoured(moment, minutes):
    """The same moment in every zone and notation is of the same day."""
    aware = moment.replace(tzinfo=UTC).astimezone(timezone(timedelta(minutes=minutes)))
    day = moment.date().isoformat()
    assert day_of(aware.isoformat()) == day
    assert day_of(aware.strftime("%a, %d %b %Y %H:%M:%S %z").replace("+0000", "GMT")) == day
    seconds = int(moment.replace(tzinfo=UTC, microsecond=0).timestamp())
    assert day_of(seconds) == day or 1000 <= seconds < 10000


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("2019-12-31T23:59:59Z", "before"),
        ("2020-01-01T00:00:00+01:00", "before"),
        ("2020-01-01", "2020"),
        ("2022-06-30T23:59:59.999999", "2022"),
        ("2022-07-01", "after"),
        ("2022", "imprecise"),
        ("2019-2020", "imprecise"),
        ("2022-06", "2022"),
        ("2023", "after"),
    ],
)
def test_both_bounds_are_included(value, why):
    assert name_of(value, "year", start="2020", until="2022-06") == why


def test_what_is_late():
    after = number_of("month", date(2023, 5, 1))
    for value, why in (("2023-05-31", "late"), ("2023-01", "late"), ("2022", "late"), ("2023", "imprecise")):
        assert name_of(value, "month", after=after) == why
    assert name_of("2023-06-01", "month", after=after) == "2023-06"


def test_the_lengths_of_periods():
    given = ("year", "1-years", "1-year", "12-years")
    assert list(map(span, given)) == ["year", "year", "year", "12-years"]
    for text in ("day", "0-years", "-1-years", "years", "2years", "decade", "10000-years"):
        with pytest.raises(Exception, match="invalid choice"):
            span(text)
