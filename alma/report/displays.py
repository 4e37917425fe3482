"""How reports show the metrics."""

from typing import NamedTuple


class Display(NamedTuple):
    """How reports show a metric."""

    name: str
    factor: int  # multiplies shown values
    total: str  # name of the sum over t = 1..B
    untrained: bool  # whether figures include the untrained model


DISPLAYS = {
    "error": Display("error (%)", 100, "CER", untrained=True),
    # The untrained perplexity is about the vocabulary size, and would flatten all other values.
    "perplexity": Display("perplexity", 1, "cumulative PPL", untrained=False),
}


def display_of(metric: str) -> Display:
    """How to show a metric. A score (`alma.report.scores`) has factor 1, and figures leave out the
    untrained model."""
    if metric in DISPLAYS:
        return DISPLAYS[metric]
    return Display(metric, 1, f"cumulative {metric}", untrained=False)
