"""The date until which a model was trained: from --cutoff, its name, or its card."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from alma.card import CARD, trained_until
from alma.dates import interval, label, number_of
from alma.errors import UserError

_IN_NAME = re.compile(
    r"(?<!\d)(?:(?:19|20)\d\d[-_.]?(?:0[1-9]|1[0-2])(?:[-_.]?(?:0[1-9]|[12]\d|3[01]))?"
    r"|(?:19|20)\d\d-?(?:Q[1-4]|W[0-5]\d))(?!\d)"
)
_YEAR_IN_NAME = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")
_CARD_BYTES = 1 << 20  # read of a card


class Cutoff(NamedTuple):
    """Until when a model was trained."""

    period: str  # such as 2024-03
    source: str  # where the date is from, for people


class DatedName(NamedTuple):
    """The name of a folder, divided."""

    date: str  # "": none
    rest: str  # the name without the date


def period_of(by: str, date: str) -> str:
    """The period that has the last moment of a date. ValueError: no date."""
    days = interval(date)
    if not days:
        raise ValueError("no date")
    return label(by, number_of(by, days[1]))


def divide(name: str, by: str) -> DatedName:
    """The date in a name, and the rest. UserError: the name has several dates.

    A year alone is a date for periods of years.
    """
    matches = list(_IN_NAME.finditer(name))
    if not matches and by.endswith(("year", "years")):
        matches = list(_YEAR_IN_NAME.finditer(name))
    if len(matches) > 1:
        dates = " and ".join(match[0] for match in matches)
        raise UserError(f"{name}: {dates} are in its name: which one? {remedy(name)}")
    if not matches:
        return DatedName("", name)
    before = name[: matches[0].start()].rstrip("-_. ")
    after = name[matches[0].end() :].lstrip("-_. ")
    rest = "-".join(filter(None, (before, after)))
    return DatedName(_canonical(matches[0][0]), rest)


def _canonical(date: str) -> str:
    """A date of a name as `alma.dates` reads it: 202403 as 2024-03, 20240301 as 2024-03-01."""
    if "Q" in date or "W" in date:
        return date
    digits = re.sub(r"\D", "", date)
    parts = [digits[:4], digits[4:6], digits[6:]]
    return "-".join(filter(None, parts))


def remedy(model: str) -> str:
    """How to give the date of a model."""
    return f"give --cutoff {model}=2024-03, the date until which it was trained"


def cutoff_of(model: str, date_of_flag: str | None, by: str) -> Cutoff:
    """Until when the model, a name or a folder, was trained.

    date_of_flag: that of --cutoff.

    UserError: no date, several, or one that is none.
    """
    if date_of_flag is not None:
        try:
            return Cutoff(period_of(by, date_of_flag), "--cutoff")
        except (ValueError, OverflowError):
            form = "write it as 2024, 2024-03 or 2024-03-17"
            raise UserError(f"--cutoff {model}={date_of_flag}: no date: {form}") from None
    place = Path(model)
    date = divide(place.name, by).date
    if date:
        try:
            return Cutoff(period_of(by, date), "its name")
        except ValueError:
            raise UserError(f"{model}: {date} in its name is no date: {remedy(model)}") from None
    dates = _on_card(place)
    if dates:
        return latest(dates, by, "its card")
    raise UserError(f"{model}: no date in its name or on a card: {remedy(model)}")


def latest(dates: Sequence[str], by: str, source: str) -> Cutoff:
    """The period of the latest of several dates."""
    last_days = []
    for date in dates:
        days = interval(date)
        assert days
        last_days.append(days[1])
    return Cutoff(label(by, number_of(by, max(last_days))), source)


def _on_card(place: Path) -> list[str]:
    """The dates on the card of a folder that `alma export` wrote."""
    try:
        with (place / CARD).open(encoding="utf-8", errors="replace") as file:
            dates = trained_until(file.read(_CARD_BYTES))
        for date in dates:
            interval(date)
    except (OSError, ValueError, OverflowError):
        return []
    return dates
