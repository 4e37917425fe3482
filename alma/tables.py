"""Tables with aligned columns, for terminals and text files."""

Table = list[list[str]]
"""Header and rows; all cells are text."""


def as_text(table: Table, left: tuple[int, ...] = (0,)) -> str:
    """The table with aligned columns: those in `left` (-1: the last) to the left, the others to the right."""
    widths = [len(max(cells, key=len)) for cells in zip(*table, strict=True)]
    to_left = {place % len(widths) for place in left}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in to_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
