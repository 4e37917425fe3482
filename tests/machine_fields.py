"""Rows of results without the fields that differ between machines."""

from collections.abc import Iterable

from alma.records import MACHINE_FIELDS


def without_machine_fields(rows: Iterable[dict], *further: str) -> list[dict]:
    """The rows without what measures the machine, and without the `further` fields."""
    left_out = {*MACHINE_FIELDS, *further}
    comparable = []
    for row in rows:
        comparable.append({key: value for key, value in row.items() if key not in left_out})
    return comparable
