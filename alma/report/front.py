"""The front: mean metric against training compute; the non-dominated configurations are joined."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from alma import metrics
from alma.configs import canonical
from alma.learners import colour_of
from alma.report import newest, style
from alma.report.lm.entries import model_size
from alma.report.results import Result, Rows, average_trained, column, compute, non_dominated
from alma.report.style import LegendEntries, dot, mark, number_axis

TFLOPS = "training compute (TFLOPs)"
CAPTION = (
    "A point per complete configuration: its average over the stream, mean over seeds with the "
    "standard deviation, against training compute; lower left is better. The line joins those "
    "that no other equals or beats in both; labels tell where their waiting time changes. Errors "
    "of the untrained model count while a learner waits; language models are averaged from their "
    "first stage on, at one waiting time."
)
_OF_PART = (
    "A point per configuration: its newest model on {part}, the newest held-out part, since the "
    "test set lacks later periods; mean over seeds with the standard deviation, against training "
    "compute; lower left is better. The line joins those that no other equals or beats in both; "
    "labels tell where their waiting time changes."
)


def caption(results: Sequence[Result]) -> str:
    """The caption of `front`."""
    compared = newest.compared_at(results)
    part = compared[0].part if compared else ""
    return _OF_PART.format(part=part) if part else CAPTION


class Point(NamedTuple):
    """A point of the figure: one result."""

    result: Result
    x: float  # training compute (TFLOPs)
    y: float  # mean metric
    deviation: float  # standard deviation of y over seeds
    note: str = ""  # label, written at non-dominated points where it changes along the line
    size: str = ""  # size of the model; larger models have larger markers

    @property
    def kind(self) -> tuple[str, bool]:
        """Variant and replay, which the marker shows."""
        return self.result.variant, self.result.config["replay"]


def front(results: Sequence[Result]) -> Any:
    """The figure for the complete results of one table; None if fewer than two are left.

    For language models only results with the smallest waiting time are shown: their averages all
    start at the same t, and leave out the untrained perplexity, which would hide all differences.
    Raw weights are left out if the figure has their average, except for the paper's learners.

    Where the test set lacks periods of the stream, the metric is that of the newest held-out part.
    """
    results = newest.compared_at(results)
    if not results:
        return None
    first = results[0]
    is_text = not first.display.untrained
    complete = [result for result in results if result.finished]
    if first.part:  # the newest model counts, though the stream may have gone on
        last = max(result.progress for result in results)
        complete = [result for result in results if result.progress == last]
    least = min((result.waiting_time for result in complete), default=0)
    if is_text and not first.part:
        complete = [result for result in complete if result.waiting_time == least]
    averaged = {_but_average(result) for result in complete if "average" in result.config}

    def measure(rows: Rows) -> float:
        if first.part:
            return first.display.factor * rows[max(rows)]["value"]
        if is_text:
            return first.display.factor * average_trained(rows, max(rows))
        return first.display.factor * metrics.average(column(rows, "value"))

    points = []
    for result in complete:
        is_raw = "average" not in result.config and _but_average(result) in averaged
        if result.variant and is_raw:
            continue
        spent = result.over_seeds(compute)[0]
        mean, deviation = result.over_seeds(measure)
        note = f"w = {result.waiting_time}"
        points.append(Point(result, spent, mean, deviation, note, model_size(result)))
    if len(points) < 2:
        return None
    if first.part:
        label = f"{first.display.name} on {first.part},\nthe newest held-out part"
    elif is_text:
        label = f"average {first.display.name} since t = {least}"
    else:
        label = f"average {first.display.name} over the stream,\nuntrained while waiting included"
    return draw_front(points, f"{first.stream}: {first.metric} against compute", label)


def _but_average(result: Result) -> str:
    """A key that is equal for configurations that differ only in their average of weights."""
    return canonical(result.config, "average", "seed")


def _first_parameters(point: Point) -> int:
    result = point.result
    return result.repeats[0][result.times[0]]["parameters"]


def draw_front(points: Sequence[Point], title: str, y_label: str) -> Any:
    """The figure: a colour per learner; a line joins the points that no other equals or beats.

    If there are variants, each has a filled marker of its own; the paper's learners have hollow
    ones, and a dotted line joins those that no other of them equals or beats.
    """
    figure, ((axes,),) = style.subplots(1, 1, (6.2, 3.6))
    kinds = sorted({point.kind for point in points})
    varied = any(variant for variant, _ in kinds)
    shapes = dict(zip(kinds, itertools.cycle("oD^svPX"), strict=False))
    ascending = sorted(points, key=_first_parameters)
    order = list(dict.fromkeys(point.size for point in ascending))
    smallest = 3.5 if len(order) > 1 else 4.5
    scale = {name: smallest + 1.5 * min(rank, 4) for rank, name in enumerate(order)}
    grey = {"color": "0.55", "linewidth": 1}
    ring = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "markeredgecolor": "0.35"}
    lines: LegendEntries = [("no other is better in both", grey | ring)]
    best = _join(axes, points, grey)
    if varied:
        dotted = grey | {"linestyle": ":"}
        _join(axes, [point for point in points if not point.result.variant], dotted)
        lines.append(("the same among the paper's learners", dotted))
    note = ""
    for point in best:
        area = (scale[point.size] + 4) ** 2
        axes.scatter(
            point.x, point.y, area, facecolors="none", edgecolors="0.35", linewidths=0.8, zorder=3
        )
        if point.note != note:
            look = {"textcoords": "offset points", "va": "bottom", "fontsize": 7, "color": "0.35"}
            axes.annotate(point.note, (point.x, point.y), (7, 3), **look)
        note = point.note
    for point in points:
        colour = colour_of(point.result.learner)
        variant, replay = point.kind
        look = dot(colour, hollow=replay)
        if varied:
            look = dot(colour, shapes[point.kind], hollow=not variant)
        look |= {"markersize": scale[point.size], "zorder": 3 if point in best else 2}
        axes.errorbar(
            point.x, point.y, point.deviation or None, ecolor=colour, elinewidth=0.7, **look
        )
    axes.margins(x=0.2, y=0.12)
    number_axis(axes, "x", [point.x for point in points], log_from=5)
    number_axis(axes, "y", [point.y for point in points], log_from=2.5)
    axes.set(xlabel=TFLOPS, ylabel=y_label, title=title)
    learners = dict.fromkeys(point.result.learner for point in points)
    groups: dict[str, LegendEntries] = {}
    groups["learner"] = [(name, {"linestyle": "", **dot(colour_of(name))}) for name in learners]
    if len(scale) > 1:
        groups["size"] = [(name, mark() | {"markersize": points}) for name, points in scale.items()]
    if varied:
        groups["variant"] = []
        for variant, replay in kinds:
            name = variant or "the paper's learner"
            if replay:
                name += ", replay"
            groups["variant"].append((name, mark(shapes[variant, replay], hollow=not variant)))
    elif any(replay for _, replay in kinds):
        lines.append(("with replay", mark(hollow=True)))
    style.add_legend(figure, groups | {"front": lines})
    return figure


def _join(axes: Any, points: Sequence[Point], look: dict[str, Any]) -> list[Point]:
    """Draw a line through the non-dominated points, and return these, by ascending compute."""
    places = non_dominated([(point.x, point.y) for point in points])
    best = [points[i] for i in places]
    axes.plot([p.x for p in best], [p.y for p in best], drawstyle="steps-post", zorder=1, **look)
    return best
