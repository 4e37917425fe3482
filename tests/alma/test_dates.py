"""Dates of documents and their periods."""

import argparse
import math
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alma.dates import Dates, LeftOut, date_format, interval, label, number_of, span

BY = ["week", "month", "quarter", "year", "2-years", "5-years", "7-years"]


def name_of(value: object, by: str, **fields: object) -> str:
    """The period of a date, or why it has none."""
    period = Dates(by, **fields).period(value)
    return period.value if isinstance(period, LeftOut) else label(by, period)


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
        ("2021-03-04 09:30:00 UTC", "2021-03-04"),
        ("2021-03-04T23:30:00.123456789 -0100", "2021-03-05"),
        ("2021-03-04t09:30z", "2021-03-04"),
        ("20210304T0930 GMT", "2021-03-04"),
        ("2021-03-04_09", "2021-03-04"),
        ("2021/03/04", "2021-03-04"),
        ("2021.03.04 23:30:00,5 -01", "2021-03-05"),
        ("1556103145", "2019-04-24"),
        ("1614850200.25", "2021-03-04"),
        ("1614850200123", "2021-03-04"),
        (1614850200123, "2021-03-04"),
        (100000000, "1973-03-03"),
        (-100000000, "1966-10-31"),
        (99999999999, "5138-11-16"),
        (300000000000, "1979-07-05"),
        (9999999999999, "2286-11-20"),
        (2001010124, "2033-05-29"),
        (1709251199.5, "2024-02-29"),
        (1709251200, "2024-03-01"),
        (-62135596800, "0001-01-01"),
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
        *"2023-02-29 1900-02-29 0000-01-01 -0044-03-15 10000-01-01 2023-13 2023-00".split(),
        *"2023-W54 2021-W53".split(),
        *"2023-Q5 2023-2022 yesterday 2023- 202 202301 01/02/2023 0000".split(),
        *"2023-01-01T25:00 12:30".split(),
        *"9999-12-31T23:00-05:00 0001-01-01T00:00+05:00 2023-01-01T00:00CET".split(),
        "\u0662\u0660\u0662\u0663",
        *(
            "Thu, 29 Feb 2024 23:30:00 CET",
            "29 Feb 24 23:30 GMT",
            "29 Feb 2023 23:30 GMT",
            "\ud800",
        ),
        *"2021-03/04 2021/3/4 2021-03-04Z 2021-03-04x09 1_556 1,556 0x7f 1e9".split(),
        "2021-03-04T09:30:00+1",
        *("2021-03-04 09:30 PM", "March 4, 2021", "2021 03 04", "2021-03-04T"),
        *(math.nan, math.inf, 1e300, 10**30, True, [2023], {"year": 2023}),
        *(
            0,
            1,
            -0.5,
            999,
            -2021,
            2021.5,
            10000,
            18690,
            202103,
            20210304,
            20210304.0,
            99999999,
            -99999999,
        ),
        *(
            2021030412,
            100000000000,
            202103040930,
            253402300799,
            299999999999,
            10**13,
            20210304093000,
        ),
        *(
            "0",
            "2021.5",
            "202103",
            "20211304",
            "2021030412",
            "202103040930",
            "20210304093000",
            "18690",
        ),
        *(1614850200123456, 1614850200123456789),
    ],
)
def test_what_is_no_date(value):
    assert name_of(value, "year") == "unreadable"


@pytest.mark.parametrize(
    ("value", "written", "first", "last"),
    [
        (0, "seconds", "1970-01-01T00:00:00", ""),
        (" -0.5 ", "seconds", "1969-12-31T23:59:59.500000", ""),
        ("2021", "seconds", "1970-01-01T00:33:41", ""),
        (253402300799, "seconds", "9999-12-31T23:59:59", ""),
        (18690, "days", "2021-03-04T00:00:00", ""),
        (1000, "milliseconds", "1970-01-01T00:00:01", ""),
        (1614850200123456, "microseconds", "2021-03-04T09:30:00.123456", ""),
        (20210304, "%Y%m%d", "2021-03-04", "2021-03-04"),
        (20210304.0, "%Y%m%d", "2021-03-04", "2021-03-04"),
        ("04/03/2021", "%d/%m/%Y", "2021-03-04", "2021-03-04"),
        ("2021 063", "%Y %j", "2021-03-04", "2021-03-04"),
        ("4.3.21", "%d.%m.%y", "2021-03-04", "2021-03-04"),
        (202102, "%Y%m", "2021-02-01", "2021-02-28"),
        ("Feb 2021", "%b %Y", "2021-02-01", "2021-02-28"),
        (2021, "%Y", "2021-01-01", "2021-12-31"),
        ("0021", "%Y", "0021-01-01", "0021-12-31"),
        (2021030409, "%Y%m%d%H", "2021-03-04T09:00:00", ""),
        ("Thu Mar 04 23:30:00 -0100 2021", "%a %b %d %H:%M:%S %z %Y", "2021-03-05T00:30:00", ""),
        (date(2021, 3, 4), "seconds", "2021-03-04", "2021-03-04"),
    ],
)
def test_a_date_as_the_format_says(value, written, first, last):
    assert date_format(written) == written
    bounds = [moment.isoformat() for moment in interval(value, written)]
    assert bounds == ([f"{first}T00:00:00", f"{last}T23:59:59.999999"] if last else [first, first])


def test_with_a_format_nothing_else_is_read():
    for value in ("2021-03-04", 2021, "yesterday", True, "2021-03-04T09:30Z", 202113):
        assert name_of(value, "year", format="%Y%m%d" if value == 2021 else "%Y%m") == "unreadable"
    for value in ("2021-03-04", math.nan, math.inf, "nan", 10**30):
        assert name_of(value, "year", format="seconds") == "unreadable"
    assert name_of(" ", "year", format="seconds") == "undated"


def test_formats_that_are_none():
    for text in ("epoch", "second", "", "%d/%m", "%H", "%Q", "%", "%Y%Y", "YYYYMMDD", "%Y%"):
        with pytest.raises(argparse.ArgumentTypeError, match="invalid choice: .*%Y%m%d"):
            date_format(text)


@given(st.integers(10**8, 18 * 10**8))
def test_digits_are_the_number(seconds):
    """`date.fromisoformat` takes one in 25 of them for a day of the years 1000 to 1760."""
    moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)
    assert interval(seconds) == interval(str(seconds)) == (moment, moment)
    if seconds >= 3 * 10**8:
        assert interval(1000 * seconds) == interval(f"{1000 * seconds}") == (moment, moment)


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
    low = number_of(by, one)
    high = number_of(by, other)
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
    assert interval(seconds, "seconds")[0].date().isoformat() == day


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
    for value, why in (
        ("2023-05-31", "late"),
        ("2023-01", "late"),
        ("2022", "late"),
        ("2023", "imprecise"),
    ):
        assert name_of(value, "month", after=after) == why
    assert name_of("2023-06-01", "month", after=after) == "2023-06"


def test_the_lengths_of_periods():
    periods = ("year", "1-years", "1-year", "12-years")
    assert list(map(span, periods)) == ["year", "year", "year", "12-years"]
    for text in ("day", "0-years", "-1-years", "years", "2years", "decade", "10000-years"):
        with pytest.raises(Exception, match="invalid choice"):
            span(text)
