"""Tables of repeated measurements."""

import csv
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from alma.tables import as_text

Rows = list[dict[str, Any]]


class Table(NamedTuple):
    """Measurements; `name` is that of the CSV file."""

    name: str
    title: str
    rows: Rows


def spread(ratios: list[float]) -> str:
    """`median [first quartile-third quartile]`."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def show(folder: Path, table: Table) -> None:
    """Print a table and write it as CSV."""
    header = list(table.rows[0])
    with open(folder / f"{table.name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=header)
        writer.writeheader()
        writer.writerows(table.rows)
    print(f"\n{table.title}")
    print(as_text([header, *([str(value) for value in row.values()] for row in table.rows)]))
