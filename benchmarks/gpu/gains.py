"""The table of the step `ladder`: what each change gains, from the rows of its cases."""

from statistics import median

from benchmarks.gpu.process import Row, shown

FIGURES = (
    *("TFLOP/s", "of a product", "of the data sheet", "GPU idle", "waits / update"),
    *("kernels / update", "host / launch, us", "peak GB", "peak / estimate", "loss"),
)
"""Columns of a row as they are."""
FIRST = "off"


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
