"""Tables with aligned columns, for terminals and text files."""

Table = list[list[str]]
"""Header and rows; all cells are text."""


def as_text(table: Table) -> str:
    """The table with aligned columns: the first to the left, the others to the right."""
    first, *others = [len(max(cells, key=len)) for cells in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
        for row in table
    )
