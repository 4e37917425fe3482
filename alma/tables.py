"""Tables with aligned columns, for terminals and text files."""

Table = list[list[str]]
"""Header and rows; all cells are text."""


def as_text(table: Table, left: tuple[int, ...] = (0,)) -> str:
    """The table with aligned columns: those in `left` (-1: the last) to the left, the others to the right."""
    widths = [len(max(cells, key=len)) for cells in zip(*table, strict=True)]
    columns = [
        [cell.rjust(width) for cell in cells]
        for cells, width in zip(zip(*table, strict=True), widths, strict=True)
    ]
    for place in left:
        columns[place] = [row[place].ljust(widths[place]) for row in table]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))
