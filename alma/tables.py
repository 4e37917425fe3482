"""Tables with aligned columns and short numbers, for terminals and text files."""

from alma.escape import terminal

Table = list[list[str]]  # header and rows; all cells are text


def as_text(table: Table, left: tuple[int, ...] = (0,)) -> str:
    """The table with aligned columns: those in `left` (-1: the last) to the left, the others to the right."""
    columns = [list(map(terminal, cells)) for cells in zip(*table, strict=True)]
    to_left = {place % len(columns) for place in left}
    for place, cells in enumerate(columns):
        width = max(map(len, cells))
        columns[place] = [cell.ljust(width) if place in to_left else cell.rjust(width) for cell in cells]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def number(value: float) -> str:
    """A number with three digits, or all digits before the point from 1000 on: "0.0312", "12,345"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
