"""Figures of any runs: the metric over the stream, and its average against compute and memory (Figure 5)."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma import metrics
from alma.report.results import Result, Rows, column, compute, memory, trained
from alma.report.style import COLOURS, LINE_STYLES, MARKERS, number_axis, subplots

MeasureAt = Callable[[Rows, int], float]
"""A number of one run at t, or over the stream up to t."""


class Curve(NamedTuple):
    """A line: points (x, y) and the standard deviation of y over seeds."""

    result: Result
    x: list[float]
    y: list[float]
    deviation: list[float]


def write_figures(results: Sequence[Result], out: Path) -> list[Path]:
    """Write the figures of results of one metric and one B to `out` as PNG; returns their paths.

    They show the untrained error but not the untrained perplexity (see `results.DISPLAYS`).
    """
    first = results[0]
    shown = first.display.name
    average = f"average {shown}" if first.display.untrained else f"average {shown} since the first stage"
    stem = f"{first.metric}_B{first.config['megabatches']}"
    by_compute = [_average_against(result, compute) for result in results]
    by_memory = [_average_against(result, memory) for result in results]
    figures = {
        "over_time": _figure(list(map(over_time, results)), "mega-batch t", f"test {shown}"),
        "compute": _figure(by_compute, "cumulative training compute, Comp (TFLOPs)", average),
        "memory": _figure(by_memory, "cumulative parameters, Mem", average),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{stem}_{name}.png", dpi=150, bbox_inches="tight")
    return [out / f"{stem}_{name}.png" for name in figures]


def over_time(result: Result) -> Curve:
    """The metric at each t that figures show (see `results.DISPLAYS`)."""
    times = [t for t in result.times if _shown(result, t)]
    return curve(result, times, lambda rows, t: t, lambda rows, t: rows[t]["value"])


def _average_against(result: Result, cost: MeasureAt) -> Curve:
    """A point per t since the first stage: the average over 1..t against the cost up to t."""
    return curve(result, trained(result.repeats[0]), cost, average_of(result))


def average_of(result: Result) -> MeasureAt:
    """The average of the metric over 1..t; for perplexity, since the first stage."""

    def average(rows: Rows, until: int) -> float:
        values = column(rows, "value", until)
        return metrics.average({t: value for t, value in values.items() if _shown(result, t)})

    return average


def _shown(result: Result, t: int) -> bool:
    return result.display.untrained or not result.waiting(t)


def curve(result: Result, times: Sequence[int], x: MeasureAt, y: MeasureAt) -> Curve:
    """x and y at each of `times`, averaged over seeds; y is scaled for display."""

    def at(measure: MeasureAt, t: int) -> tuple[float, float]:
        return result.over_seeds(lambda rows: measure(rows, t))

    factor, points = result.display.factor, [at(y, t) for t in times]
    return Curve(
        result,
        [at(x, t)[0] for t in times],
        [factor * mean for mean, _ in points],
        [factor * deviation for _, deviation in points],
    )


def _styles(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Colour, line and marker of each result: its own colour while there are enough, else its learner's."""
    if len(results) <= len(COLOURS):
        return list(zip(COLOURS, [LINE_STYLES[0]] * len(results), MARKERS, strict=False))
    learners = [result.learner for result in results]
    if len(set(learners)) == 1:
        places = [divmod(i, len(COLOURS))[::-1] for i in range(len(results))]
    else:
        names = sorted(set(learners))
        places = [(names.index(name), learners[:i].count(name)) for i, name in enumerate(learners)]
    return [
        (COLOURS[colour % len(COLOURS)], LINE_STYLES[rank % len(LINE_STYLES)], MARKERS[rank % len(MARKERS)])
        for colour, rank in places
    ]


def _figure(curves: Sequence[Curve], x_label: str, y_label: str) -> Any:
    figure, ((axes,),) = subplots(1, 1, (6.4, 4.2))
    for curve, (colour, line, marker) in zip(curves, _styles([c.result for c in curves]), strict=True):
        label = textwrap.fill(curve.result.label, 36)
        gap = max(1, len(curve.x) // 8)  # few enough markers to see the line, the last at its end
        every = ((len(curve.x) - 1) % gap, gap)
        draw_curve(axes, curve, colour, line, marker=marker, markersize=5, markevery=every, label=label)
    number_axis(axes, "x", [x for curve in curves for x in curve.x])
    number_axis(axes, "y", [y for curve in curves for y in curve.y])
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    return figure


def draw_curve(axes: Any, curve: Curve, colour: str, line: str, **look: Any) -> None:
    """Draw a line with a band of ±1 standard deviation; `look` goes to Axes.plot."""
    axes.plot(curve.x, curve.y, line, color=colour, **look)
    low = [mean - deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
    high = [mean + deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
    axes.fill_between(curve.x, low, high, color=colour, alpha=0.2, linewidth=0)
