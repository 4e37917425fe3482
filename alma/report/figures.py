"""Figures of a report: the metric over the stream, and the trade-offs with compute and memory (Figure 5)."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma import metrics
from alma.report.results import Result, Rows, column, compute, memory, trained

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"

Measure = Callable[[Rows, int], float]
"""A number of one run up to or at t."""


class Curve(NamedTuple):
    """One line: points (x, y) and the standard deviation of y over seeds, all of the same length."""

    result: Result
    x: list[float]
    y: list[float]
    deviation: list[float]


def draw(results: Sequence[Result], out: Path) -> list[Path]:
    """Draw the figures of results of one metric and one B as PNG files in `out`; returns their paths.

    The untrained model's perplexity (t = 0 and while waiting) is left out: it is the vocabulary's
    size, and would flatten everything else. Its error is drawn.
    """
    metric, megabatches = results[0].metric, results[0].config["megabatches"]
    stem = f"{metric}_B{megabatches}"
    over_time = [_over_time(result) for result in results]
    # Perplexity before the first stage is left out of these averages too.
    averaged = (
        f"average {results[0].unit}" if metric == "error" else "average perplexity since the first stage"
    )
    figures = {
        out / f"{stem}_over_time.png": (over_time, "mega-batch t", f"test {results[0].unit}"),
        out / f"{stem}_compute.png": (
            [_trade_off(result, compute) for result in results],
            "cumulative training compute, Comp (TFLOPs)",
            averaged,
        ),
        out / f"{stem}_memory.png": (
            [_trade_off(result, memory) for result in results],
            "cumulative parameters, Mem",
            averaged,
        ),
    }
    for path, (curves, x_label, y_label) in figures.items():
        _plot(curves, path, x_label, y_label)
    return list(figures)


def _over_time(result: Result) -> Curve:
    """The metric at each t."""
    times = [t for t in result.times if _shown(result, t)]
    return curve(result, times, lambda rows, t: t, lambda rows, t: rows[t]["value"])


def _trade_off(result: Result, cost: Measure) -> Curve:
    """The average of the metric over 1..t against the cost up to t: one point per t since the first stage."""
    return curve(result, trained(result.repeats[0]), cost, average_of(result))


def average_of(result: Result) -> Measure:
    """The average of the metric over 1..t; of perplexity since the first stage."""

    def average(rows: Rows, until: int) -> float:
        values = column(rows, "value", until)
        return metrics.average({t: value for t, value in values.items() if _shown(result, t)})

    return average


def _shown(result: Result, t: int) -> bool:
    return result.metric == "error" or not result.waiting(t)


def curve(result: Result, times: Sequence[int], x: Measure, y: Measure) -> Curve:
    """x and y at each of the times, averaged over seeds; y in the result's unit."""

    def at(measure: Measure, t: int) -> tuple[float, float]:
        return result.over_seeds(lambda rows: measure(rows, t))

    points = [at(y, t) for t in times]
    return Curve(
        result,
        [at(x, t)[0] for t in times],
        [result.scale * mean for mean, _ in points],
        [result.scale * deviation for _, deviation in points],
    )


def _styles(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Colour, line and marker per result: a colour each while they last, else one colour per learner."""
    if len(results) <= len(COLOURS):
        return list(zip(COLOURS, [LINES[0]] * len(results), MARKERS, strict=False))
    learners = [result.config["learner"] for result in results]
    if len(set(learners)) == 1:
        places = [divmod(i, len(COLOURS))[::-1] for i in range(len(results))]
    else:
        places = [
            (sorted(set(learners)).index(name), learners[:i].count(name)) for i, name in enumerate(learners)
        ]
    return [
        (COLOURS[colour % len(COLOURS)], LINES[rank % len(LINES)], MARKERS[rank % len(MARKERS)])
        for colour, rank in places
    ]


def _plot(curves: Sequence[Curve], path: Path, x_label: str, y_label: str) -> None:
    """One figure, legend to the right; a band of one standard deviation where there are several seeds."""
    figure, ((axes,),) = sheet(1, 1, (6.4, 4.2))
    for curve, (colour, line, marker) in zip(curves, _styles([c.result for c in curves]), strict=True):
        label = textwrap.fill(curve.result.label, 36)
        gap = max(1, len(curve.x) // 8)  # so few that the line shows between them, and one at the end
        every = ((len(curve.x) - 1) % gap, gap)
        draw_curve(axes, curve, colour, line, marker=marker, markersize=5, markevery=every, label=label)
    scale(axes, "x", [x for curve in curves for x in curve.x])
    scale(axes, "y", [y for curve in curves for y in curve.y])
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def sheet(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """An empty figure of that width and height, and its axes as an array (rows, columns), with a grid.

    `options` are those of matplotlib's Figure.subplots. No pyplot: nothing is kept, no display is needed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    return figure, panels


def grid(
    names: Sequence[str], inches: tuple[float, float] = (2.0, 2.0), **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A figure with a panel for each name, at most three in a row."""
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    wide, tall = inches
    figure, panels = sheet(rows, columns, (1.8 + wide * columns, 0.5 + tall * rows), **options)
    for axes in list(panels.flat)[len(names) :]:
        axes.remove()
    for axes in panels.flat[max(0, len(names) - columns) : len(names)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    found = dict(zip(names, panels.flat, strict=False))
    for name, axes in found.items():
        axes.set_title(name)
    return figure, found


def draw_curve(axes: Any, curve: Curve, colour: str, line: str, **look: Any) -> None:
    """A line, and around it a band of one standard deviation; `look` are further options of Axes.plot."""
    axes.plot(curve.x, curve.y, line, color=colour, **look)
    low = [mean - deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
    high = [mean + deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
    axes.fill_between(curve.x, low, high, color=colour, alpha=0.2, linewidth=0)


def scale(
    axes: Any, name: str, values: Sequence[float], log_from: float = 10, dense_below: float = 1e3
) -> None:
    """Number axis "x" or "y" plainly; logarithmic for positive values whose largest is more than `log_from`
    times the smallest, with ticks at 1, 2 and 5 (else at 1) where it is less than `dense_below` times."""
    from matplotlib import ticker

    axis = getattr(axes, f"{name}axis")
    if min(values, default=0) > 0 and max(values) > log_from * min(values):
        axes.set(**{f"{name}scale": "log"})
        few_decades = max(values) < dense_below * min(values)
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif all(value == int(value) for value in values):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    large = max(values, default=0) >= 1e5
    axis.set_major_formatter(ticker.EngFormatter(sep="") if large else ticker.StrMethodFormatter("{x:,.6g}"))


def legend(figure: Any, groups: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]) -> None:
    """A legend to the right of all panels: headings, and under each its entries (label, look of a Line2D)."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    headings = []
    for heading, entries in groups.items():
        headings.append(len(handles))
        handles.append(Line2D([], [], linestyle="", label=heading))
        handles += [Line2D([], [], **look, label=textwrap.fill(label, 34)) for label, look in entries]
    drawn = figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    for place in headings:
        drawn.get_texts()[place].set(fontweight="bold", x=-30)
