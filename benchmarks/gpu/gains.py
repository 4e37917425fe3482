"""The table of the step `ladder`: what each change gains, from the rows of its cases."""

from statistics import median

from benchmarks.gpu.process import Row, shown

FIGURES = (
    *("TFLOP/s", "of a product", "of the data sheet", "GPU idle", "waits / update"),
    *("kernels / update", "host / launch, us", "peak GB", "peak / estimate", "loss"),
)
"""Columns of a row as they are."""
FIRST = "off"
COMPARED = (FIRST, "all")
"""Trainings whose kernels are shown by kind."""


def gains(rows: list[Row]) -> list[list[str]]:
    """A line for each training, with its speed against `off` and against the training before it."""
    header = ["case", "flags", "tokens/s", "/ off", "/ before", *FIGURES]
    lines = [header]
    first = None
    earlier = None
    for row in rows:
        if "tokens/s" not in row:
            continue
        speed = median(row["tokens/s"])
        name = row["case"]["case"]
        if name == FIRST:
            first = speed
        line = [name, row["case"]["flags"], shown(row["tokens/s"])]
        for peer in (first, earlier):
            line.append(f"{speed / peer:.2f}" if peer else "")
        lines.append(line + [shown(row.get(figure, "")) for figure in FIGURES])
        earlier = speed
    return lines


def by_kind(rows: list[Row]) -> list[list[str]]:
    """Milliseconds of an update by kind of kernel, without changes and with all."""
    columns = {}
    for row in rows:
        name = row["case"].get("case")
        if name in COMPARED and "ms by kind" in row:
            columns[name] = row["ms by kind"]
    kinds = list(dict.fromkeys(kind for column in columns.values() for kind in column))
    lines = [["ms of an update", *columns]]
    for kind in kinds:
        lines.append([kind, *(shown(column.get(kind, 0.0)) for column in columns.values())])
    return lines
