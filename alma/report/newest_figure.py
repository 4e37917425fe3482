"""The figure of a stream with periods: its models on the newest held-out part."""

import math
from collections.abc import Sequence
from typing import Any

from alma.learners import colour_of
from alma.report import newest, style
from alma.report.figures import Curve, by_kind, draw_curve, looks
from alma.report.periods import period_names
from alma.report.results import Result, mean_and_deviation

_CAPTION = (
    "Test {metric} on {part}, the newest held-out part, of each model, by the newest period that "
    "it was trained on: mean over seeds, with a band of ±1 standard deviation. To the left are "
    "older models."
)
_MOST_NAMES = 15  # of periods, to write all of them
_LETTER = 0.065  # inches


def figure(results: Sequence[Result]) -> tuple[Any, str] | None:
    """The figure and its caption; None without periods, or if no model was tested."""
    from matplotlib.ticker import FixedLocator

    shown = newest.with_periods(results)
    if not shown:
        return None
    part = newest.newest_part(shown)
    curves = {id(result): _curve(result, part) for result in shown}
    shown = [result for result in shown if curves[id(result)].x]
    if not shown:
        return None
    members = by_kind(shown)
    inches = (4.4, 3.0) if len(members) == 1 else (2.8, 2.2)
    drawing, panels = style.named_panels(list(members), inches, sharex=True, sharey=True)
    legend: dict[str, style.LegendEntries] = {}
    for name, axes in panels.items():
        axes.title.set(color=colour_of(members[name][0].learner), fontweight="bold")
        for result, look in zip(members[name], looks(members[name]), strict=True):
            points = look | {"marker": "o", "markersize": 3, "markevery": None}
            draw_curve(axes, curves[id(result)], **points)
            legend.setdefault(name, []).append((result.label, points))
    values = [value for curve in curves.values() for value in curve.y]
    times = [t for curve in curves.values() for t in curve.x]
    longest_list = max((period_names(result) for result in shown), key=len)
    names = dict(enumerate(longest_list, start=1))
    for axes in panels.values():
        style.number_axis(axes, "x", times, log_from=math.inf)  # periods are evenly spaced
        style.number_axis(axes, "y", values, log_from=3)
        if len(names) <= _MOST_NAMES:
            axes.xaxis.set_major_locator(FixedLocator(list(names)))
        axes.xaxis.set_major_formatter(lambda t, _: names.get(t, ""))
        axes.tick_params(axis="x", labelrotation=90)
    longest = max(map(len, names.values()))
    drawing.set_figheight(drawing.get_figheight() + _LETTER * longest)
    name = newest.part_name(shown, part)
    display = shown[0].display.name
    label = f"test {display} on {name}"
    style.name_axes(drawing, list(panels.values()), "model trained until", label)
    style.add_legend(drawing, legend)
    return drawing, _CAPTION.format(metric=shown[0].metric, part=name)


def _curve(result: Result, part: int) -> Curve:
    """The metric on the part against the newest mega-batch of each model's training data."""
    line = Curve(result, [], [], [])
    for model, until in newest.by_model(result, part):
        mean, deviation = mean_and_deviation(model.values)
        line.x.append(float(until))
        line.y.append(result.display.factor * mean)
        line.deviation.append(result.display.factor * deviation)
    return line
