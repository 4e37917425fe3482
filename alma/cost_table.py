"""The table of costs that a dry run prints before a launch, of text and of images."""

from collections.abc import Iterable, Mapping, Sequence

from alma.tables import as_text

MEGA = 1e6
GIGA = 1e9
TERA = 1e12


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of them is unknown."""
    summands = list(numbers)
    return None if None in summands else sum(number or 0 for number in summands)


def with_commas(number: int | None) -> str:
    """A number of parameters, updates or epochs: "12,345"; "?" if unknown."""
    return "?" if number is None else f"{number:,}"


def scaled(number: float | None, unit: float, name: str = "") -> str:
    """A number in a unit, with the name of that: "12.3M", from 1000 on "1,234M"; "?" if unknown.

    Below 0.1 with two digits or, of a unit with a name, as a whole number: "0.012", "12,345".
    """
    if number is None:
        return "?"
    in_units = number / unit
    if in_units < 0.1:
        return f"{number:,.0f}" if name else f"{in_units:.2g}"
    return f"{in_units:,.1f}{name}" if in_units < 1000 else f"{in_units:,.0f}{name}"


def in_bytes(number: int) -> str:
    """A number of bytes: "1.2 GB", below a tenth of one "34.5 MB"."""
    if number < GIGA / 10:
        return f"{number / MEGA:,.1f} MB"
    return f"{number / GIGA:,.1f} GB"


def cost_table(
    columns: Sequence[str],
    runs: Iterable[Mapping[str, str]],
    sums: Mapping[str, str] | None,
) -> str:
    """A line of cells by column for each run, and a last one of sums, unless that is None.

    A column without a sum is empty there.
    """
    lines = [list(columns)]
    for run in runs:
        lines.append([run[column] for column in columns])
    if sums is not None:
        lines.append([sums.get(column, "") for column in columns])
    return as_text(lines)
