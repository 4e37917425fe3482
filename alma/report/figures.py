"""Figures for runs of any kind: the metric over the stream, drift, and the front."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.learners import colour_of
from alma.report import compare, style
from alma.report.front import front
from alma.report.results import Result, Rows
from alma.report.style import number_axis

MeasureAt = Callable[[Rows, int], float]  # a number of one run at t, or over the stream up to t


class Curve(NamedTuple):
    """A line: points (x, y) and the standard deviation of y over seeds."""

    result: Result
    x: list[float]
    y: list[float]
    deviation: list[float]


def write_figures(results: Sequence[Result], out: Path) -> list[Path]:
    """Write all figures of the results of one table to `out`; returns the paths of the PNG files.

    Figures over time include the untrained model's error, but not its perplexity, which is too
    large (see `displays.DISPLAYS`).
    """
    paths = []
    with style.drawing():
        for name, make in (("over_time", over_time_figure), ("front", front)):
            figure = make(results)
            if figure:
                paths.append(out / f"{results[0].stem}_{name}.png")
                style.save(figure, paths[-1])
    return paths


def over_time_figure(results: Sequence[Result]) -> Any:
    """A figure of the metric over the stream, with a line per result.

    More than six results are divided into panels, one per learner and replay (`by_kind`).
    """
    members = by_kind(results)
    inches = (3.6, 3.0) if len(members) == 1 else (2.5, 2.2)
    figure, panels = style.named_panels(list(members), inches, sharex=True, sharey=True)
    figure.suptitle(results[0].stream)
    curves: list[Curve] = []
    legend: dict[str, style.LegendEntries] = {}
    for name, axes in panels.items():
        axes.title.set(color=colour_of(members[name][0].learner), fontweight="bold")
        for result, look in zip(members[name], looks(members[name]), strict=True):
            curves.append(draw_over_time(axes, result, **look))
            legend.setdefault(name, []).append((result.label, look))
    label = f"test {results[0].display.name}"
    spans = {span.text for span in compare.spans_of_test_sets(results)}
    if len(spans) == 1:
        label += f"\n({spans.pop()})"
    frame_over_time(figure, [(list(panels.values()), curves)], label)
    style.add_legend(figure, legend)
    return figure


def over_time(result: Result) -> Curve:
    """The metric at each t that figures show (see `displays.DISPLAYS`)."""
    times = [t for t in result.times if result.display.untrained or not result.waiting(t)]
    return curve(result, times, lambda rows, t: t, lambda rows, t: rows[t]["value"])


def curve(result: Result, times: Sequence[int], x: MeasureAt, y: MeasureAt) -> Curve:
    """The line of a result: x and y at each of `times`, averaged over seeds.

    y and its deviation are multiplied by `Display.factor`.
    """
    line = Curve(result, [], [], [])
    factor = result.display.factor
    for t in times:
        mean, deviation = result.over_seeds(lambda rows: y(rows, t))  # noqa: B023
        line.x.append(result.over_seeds(lambda rows: x(rows, t))[0])  # noqa: B023
        line.y.append(factor * mean)
        line.deviation.append(factor * deviation)
    return line


def draw_curve(axes: Any, curve: Curve, steps: bool = False, **look: Any) -> Curve:
    """Draw a line with a dot at its end and a band of ±1 standard deviation. Returns the curve.

    `look` goes to Axes.plot. With `steps`, a value holds until the next point.
    """
    end = {
        "marker": "o",
        "markersize": 3,
        "markevery": slice(-1, None),
        "clip_on": False,
        "zorder": 3,
    }
    axes.plot(curve.x, curve.y, drawstyle="steps-post" if steps else "default", **(end | look))
    if any(curve.deviation):
        low = [mean - deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
        high = [mean + deviation for mean, deviation in zip(curve.y, curve.deviation, strict=True)]
        # A faint fill with edges, because the colours of overlapping bands would mix to brown.
        band = {
            "facecolor": (look["color"], 0.07),
            "edgecolor": (look["color"], 0.45),
            "linewidth": 0.4,
        }
        axes.fill_between(curve.x, low, high, step="post" if steps else None, **band)
    return curve


def draw_over_time(axes: Any, result: Result, **look: Any) -> Curve:
    """Draw the metric over time in steps, since a model stays deployed until the next stage.

    The untrained part is dotted. Returns the trained part.
    """
    whole = over_time(result)
    start = sum(result.waiting(int(t)) for t in whole.x)
    faint: Any = {"linestyle": ":", "linewidth": 1.0, "alpha": 0.8, "drawstyle": "steps-post"}
    axes.plot(whole.x[: start + 1], whole.y[: start + 1], color=look["color"], **faint)
    rest = Curve(result, whole.x[start:], whole.y[start:], whole.deviation[start:])
    return draw_curve(axes, rest, steps=True, **look)


def frame_over_time(
    figure: Any,
    rows: Sequence[tuple[Sequence[Any], Sequence[Curve]]],
    label: str,
    area: bool = False,
) -> None:
    """Scale and label the axes of panels that `draw_over_time` has drawn.

    Each of `rows` is a pair: panels that share a y axis, and the curves in them. With `area`, the y
    axis is linear from 0, so that the area below a line is its CER; otherwise it is logarithmic if
    the values span more than a factor of 3. Its range includes the dotted untrained part, which is
    most of the CER of a learner that waits.
    """
    times = [0, *(t for _, curves in rows for curve in curves for t in curve.result.times)]
    all_panels = [axes for panels, _ in rows for axes in panels]
    for panels, curves in rows:
        values = [y for curve in curves for y in over_time(curve.result).y] or [1.0]
        for axes in panels:
            number_axis(axes, "x", times)
            number_axis(axes, "y", values, log_from=math.inf if area else 3)
            low = min(values)
            high = max(values)
            if axes.get_yscale() == "log":
                margin = max(high / low, 1.1) ** 0.06
                axes.set_ylim(low / margin, high * margin)
            else:
                margin = 0.06 * (high - low or abs(high) or 1)
                axes.set_ylim(0 if area else low - margin, high + margin)
            if len(all_panels) > 1:
                axes.xaxis.get_major_locator().set_params(nbins=4)
    style.name_axes(figure, all_panels, "mega-batch t", label)


def looks(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Colour and line style of each result in a panel.

    Each learner has its own colour, lighter for each further variant or waiting time.
    """
    colours = [colour_of(result.learner) for result in results]
    return [style.variant(colour, colours[:i].count(colour)) for i, colour in enumerate(colours)]


def by_kind(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Divide the results into panels, by the panel's name.

    Up to six results are in one panel with the name ""; more are divided by learner and replay.
    """
    members: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.rank):
        name = result.learner + (", replay" if result.config["replay"] else "")
        members.setdefault(name if len(results) > 6 else "", []).append(result)
    return members
