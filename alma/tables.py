"""Tables with aligned columns and short numbers, for terminals and text files."""

from alma.escape import terminal

Table = list[list[str]]  # header and rows; all cells are text


def as_text(table: Table, left: tuple[int, ...] = (0,)) -> str:
    """The table with aligned columns, to the right except those in `left` (-1: the last)."""
    columns = [list(map(terminal, cells)) for cells in zip(*table, strict=True)]
    to_left = {place % len(columns) for place in left}
    for place, cells in enumerate(columns):
        width = max(map(len, cells))
        columns[place] = [
            cell.ljust(width) if place in to_left else cell.rjust(width) for cell in cells
        ]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def number(value: float) -> str:
    """A number in a sentence, with three digits, or all before the point: "0.0312", "12,345"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def fixed(value: float) -> str:
    """A number in a column, with two decimals below 1000: "0.50", "123.46", "12,345", "0.031"."""
    return f"{value:{decimals(value)}}"


def decimals(value: float) -> str:
    """The format that `fixed` uses for `value`, to show its deviation in the same format."""
    if abs(value) >= 1000:
        return ",.0f"
    if abs(value) >= 0.1 or value == 0:
        return ".2f"
    return ".2g"
