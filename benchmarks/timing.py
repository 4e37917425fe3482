"""How repeated measurements are written."""

import statistics
from collections.abc import Callable


def spread(ratios: list[float], form: Callable[[float], float] = float) -> str:
    """`median [quartile-quartile]`."""
    values = sorted(form(ratio) for ratio in ratios)
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"
