"""Tables of costs, in Markdown."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alma.report.losses import MeanOverSeeds, t_interval
from benchmarks.retraining.costs import RuleCost
from benchmarks.retraining.rules import RULES
from benchmarks.retraining.streams import SOURCES

OURS = "ALMA plan"
"""The rule that the others are compared with."""
_RIVAL = "UPF"
"""The published rule that the plan is to lose to nowhere."""
_NEAR = 1.1
"""How far above the best rule the plan may be, on each stream and at each price."""


class StreamAtPrice(NamedTuple):
    """A stream at a price."""

    stream: str
    ratio: float


class Score(NamedTuple):
    """How often the plan of ALMA costs less than a rule."""

    wins: int
    ties: int
    losses: int


def mean_with_interval(values: Sequence[float]) -> MeanOverSeeds:
    """Mean over start points with its 90% t-interval; NaN for one start point."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return MeanOverSeeds(mean, math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return t_interval(mean, error, len(values) - 1)


def cells_of(rows: Sequence[RuleCost]) -> dict[StreamAtPrice, dict[str, list[float]]]:
    """Costs over the best fixed cadence by cell and rule, in the order of start points."""
    cells: dict[StreamAtPrice, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: row.start):
        by_rule = cells.setdefault(StreamAtPrice(row.stream, row.ratio), {})
        by_rule.setdefault(row.rule, []).append(row.over_best)
    return cells


def score(cells: dict[StreamAtPrice, dict[str, list[float]]], rule: str) -> Score:
    """Wins, ties and losses of the plan against a rule.

    A tie: the interval of the paired difference holds 0, or there is one start point and a
    difference of less than 1%.
    """
    wins = 0
    losses = 0
    for by_rule in cells.values():
        differences = np.array(by_rule[rule]) - np.array(by_rule[OURS])
        gain = mean_with_interval(differences.tolist())
        low = gain.mean - 0.01 if math.isnan(gain.low) else gain.low
        high = gain.mean + 0.01 if math.isnan(gain.high) else gain.high
        wins += low > 0
        losses += high < 0
    return Score(wins, len(cells) - wins - losses, losses)


def as_markdown(rows: Sequence[RuleCost]) -> str:
    """The summary by rule, the goals of the plan, its worst cases, and all cells."""
    cells = cells_of(rows)
    parts = [
        "Total cost (losses in service and trainings), 1: the best fixed cadence in hindsight. "
        "Intervals: 90%, Student's t; of rules over streams, of cells over start points.",
        _markdown(_summary(cells)),
        "\n".join(goals(cells)),
        f"Where the {OURS} is furthest above the best rule, worst first:",
        _markdown(_worst(cells)),
        "All streams:",
        _markdown(_all(cells)),
    ]
    return "\n\n".join(parts) + "\n"


def goals(cells: dict[StreamAtPrice, dict[str, list[float]]]) -> list[str]:
    """Whether the plan costs least in the mean, is near the best rule, and loses to UPF nowhere."""
    means = {}
    for rule in RULES:
        means[rule] = float(np.mean(list(by_stream(cells, rule).values())))
    least = min(means, key=lambda rule: means[rule])
    far = []
    losses = []
    for cell, by_rule in cells.items():
        costs = {rule: float(np.mean(values)) for rule, values in by_rule.items()}
        place = f"{cell.stream} at {cell.ratio:g}"
        if costs[OURS] > _NEAR * min(costs.values()):
            far.append(place)
        if score({cell: by_rule}, _RIVAL).losses:
            losses.append(place)
    return [
        f"* Lowest mean: {least}, {means[least]:.3f}; {OURS}: {means[OURS]:.3f}.",
        f"* More than 10% above the best rule: {', '.join(far) or 'nowhere'}.",
        f"* Above {_RIVAL} by more than the interval: {', '.join(losses) or 'nowhere'}.",
    ]


def by_stream(cells: dict[StreamAtPrice, dict[str, list[float]]], rule: str) -> dict[str, float]:
    """The mean cost of a rule over prices and start points, by stream."""
    costs: dict[str, list[float]] = {}
    for cell, by_rule in cells.items():
        costs.setdefault(cell.stream, []).append(float(np.mean(by_rule[rule])))
    return {stream: float(np.mean(of_stream)) for stream, of_stream in costs.items()}


def _summary(cells: dict[StreamAtPrice, dict[str, list[float]]]) -> list[list[str]]:
    """A row for each rule, that of least mean cost first."""
    ratios = sorted({cell.ratio for cell in cells})
    header = ["rule", "mean", f"above {OURS}", "real", "made"]
    header += [f"price {ratio:g}" for ratio in ratios]
    table = [[*header, "worst stream", f"{OURS} wins / ties / losses"]]
    ours = by_stream(cells, OURS)
    summaries = []
    for rule in RULES:
        cost_by_stream = by_stream(cells, rule)
        mean = float(np.mean(list(cost_by_stream.values())))
        difference = [cost_by_stream[stream] - ours[stream] for stream in cost_by_stream]
        row = [rule, f"{mean:.3f}", "" if rule == OURS else _signed(difference)]
        for is_made in (False, True):
            kind = [
                cost for stream, cost in cost_by_stream.items() if is_made_stream(stream) == is_made
            ]
            row.append(f"{np.mean(kind):.3f}" if kind else "")
        means = {cell: float(np.mean(by_rule[rule])) for cell, by_rule in cells.items()}
        for ratio in ratios:
            of_ratio = [cost for cell, cost in means.items() if cell.ratio == ratio]
            row.append(f"{np.mean(of_ratio):.3f}")
        worst = max(means, key=lambda cell: means[cell])
        row.append(f"{means[worst]:.2f}, {worst.stream} at {worst.ratio:g}")
        row.append("" if rule == OURS else " / ".join(map(str, score(cells, rule))))
        summaries.append((mean, row))
    summaries.sort(key=lambda summary: summary[0])
    return table + [row for _, row in summaries]


def _signed(values: Sequence[float]) -> str:
    """The mean with its interval, such as "+.02 [-.01, +.05]"."""
    mean, low, high = mean_with_interval(values)
    text = f"{mean:+.3f}"
    return text if math.isnan(low) else f"{text} [{low:+.3f}, {high:+.3f}]"


def is_made_stream(stream: str) -> bool:
    """Whether the drift of a stream is made."""
    return stream in SOURCES and SOURCES[stream].is_made


def _worst(cells: dict[StreamAtPrice, dict[str, list[float]]]) -> list[list[str]]:
    """The ten cells in which the plan is furthest above the best rule."""
    gaps = []
    for cell, by_rule in cells.items():
        means = {rule: float(np.mean(values)) for rule, values in by_rule.items()}
        best = min(means, key=lambda rule: means[rule])
        ours = means[OURS]
        row = [cell.stream, f"{cell.ratio:g}", f"{ours:.3f}", best, f"{means[best]:.3f}"]
        gaps.append((ours / means[best], row))
    gaps.sort(key=lambda gap: -gap[0])
    header = ["stream", "price", OURS, "best rule", "its cost"]
    return [header] + [row for _, row in gaps[:10]]


def _all(cells: dict[StreamAtPrice, dict[str, list[float]]]) -> list[list[str]]:
    """A row for each stream and price, a column for each rule."""
    table = [["stream", "price", "starts", *RULES]]
    for cell, by_rule in cells.items():
        texts = []
        for rule in RULES:
            mean, low, high = mean_with_interval(by_rule[rule])
            text = f"{mean:.2f}"
            if not math.isnan(low):
                text += f" [{low:.2f}, {high:.2f}]"
            texts.append(text)
        starts = str(len(by_rule[OURS]))
        table.append([cell.stream, f"{cell.ratio:g}", starts, *texts])
    return table


def _markdown(table: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; the first row is the header."""
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
