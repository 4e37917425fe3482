"""Figures of image runs by cost: the front, 2, 4, 7 (top), 8, and the first draft's radar plots."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from alma.configs import canonical
from alma.report import style
from alma.report.front import TFLOPS, Point, draw_front
from alma.report.results import Result, compute, memory
from alma.report.style import LegendEntries, dot, mark, number_axis
from alma.report.vision import parts, select
from alma.report.vision.select import Missing, Pair, Spoke, cer, distinct, methods, size, wait

CER = "cumulative error rate, CER\n(untrained errors while waiting included)"


def front(results: Sequence[Result]) -> dict[str, Any]:
    """Mean error over t = 1..B against training compute; a line joins those that no other beats in both.

    Raw weights are left out where the figure has their average, except those of the paper's learners.
    """
    if len(results) < 2:
        raise Missing("only one configuration")
    share = 100 / results[0].megabatches
    averaged = {_without_average(result) for result in results if "average" in result.config}
    points = []
    for result in results:
        if result.variant and "average" not in result.config and _without_average(result) in averaged:
            continue
        mean, deviation = result.over_seeds(cer)
        spent, _ = result.over_seeds(compute)
        at = spent, share * mean, share * deviation
        points.append(Point(result, *at, f"w = {wait(result)}", f"{size(result)} units"))
    label = "mean test error over the stream (%),\nuntrained errors while waiting included"
    return {"": draw_front(points, f"{parts.title(results)}: error against compute", label)}


def _without_average(result: Result) -> str:
    return canonical({name: value for name, value in result.config.items() if name != "average"}, "seed")


def cost_trade_offs(results: Sequence[Result]) -> dict[str, Any]:
    """Figures 2 and 7 (top): CER against training compute, and against parameters, without replay."""
    shown = select.without_replay(results)
    if len(shown) < 2:
        raise Missing("only one configuration without --replay")
    figure, ((left, right),) = style.subplots(1, 2, (7.4, 3.4), sharey=True)
    markers = parts.markers(distinct(wait, results))
    for axes, cost in ((left, compute), (right, memory)):
        curves = select.cer_against(shown, cost)
        for found in curves:
            look = parts.look(found.result, results)
            axes.errorbar(
                found.x, found.y, found.deviation, linestyle="none", ecolor=look["color"], elinewidth=0.8
            )
            axes.plot(found.x, found.y, **look, **dot(look["color"], markers[wait(found.result)]))
        number_axis(axes, "x", [x for found in curves for x in found.x], log_from=5, dense_below=100)
    _label_cer_axes([left, right], [y for found in curves for y in found.y], shown)
    left.set(xlabel=TFLOPS, ylabel=CER, title=f"{parts.title(results)}: compute")
    right.set(xlabel="parameters summed over the stream, Mem", title="memory")
    marks = [(f"w = {w}", mark(markers[w])) for w in distinct(wait, shown)]
    style.add_legend(figure, {"learner": parts.method_entries(shown, results), "waiting time": marks})
    return {"": figure}


def replay_at_one_wait(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 4: effect of replay on CER and compute for each learner and size, at one waiting time."""
    pairs = select.at_one_wait(select.replay_pairs(results))
    figure, ((axes,),) = style.subplots(1, 1, (4.8, 3.2))
    plain = [pair[0] for pair in pairs]
    markers = parts.markers(distinct(size, plain))
    for pair in pairs:
        _draw_pair(axes, pair, parts.look(pair[0], results), markers)
    _label_pair_axes([axes], pairs)
    axes.set(xlabel=TFLOPS, ylabel=CER)
    axes.set_title(f"{parts.title(results)}, w = {wait(plain[0])}: effect of replay")
    learners = {"learner": parts.method_entries(plain, results)}
    style.add_legend(figure, learners | _marks_of_pairs(plain, markers))
    return {"": figure}


def replay_at_all_waits(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 8: effect of replay on CER and compute; a panel per learner, a colour per waiting time."""
    pairs = select.replay_pairs(results)
    plain = [pair[0] for pair in pairs]
    figure, panels = style.named_panels(methods(plain), sharex=True, sharey=True)
    markers, colours = parts.markers(distinct(size, plain)), style.wait_colours(map(wait, results))
    for pair in pairs:
        _draw_pair(panels[pair[0].method], pair, {"color": colours[wait(pair[0])]}, markers)
    parts.colour_titles(panels, plain, results)
    _label_pair_axes(list(panels.values()), pairs)
    style.name_axes(figure, list(panels.values()), TFLOPS, CER)
    waits = parts.wait_entries(plain, results)
    groups = {"waiting time": waits, **_marks_of_pairs(plain, markers)}
    style.add_legend(figure, {f"{parts.title(results)}: effect of replay": [], **groups})
    return {"": figure}


def radars(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's radar plots, one per size; a panel per learner, a polygon per waiting time."""
    shown = select.without_replay(results)
    sizes = {hidden: [r for r in shown if size(r) == hidden] for hidden in distinct(size, shown)}
    figures = {
        f"_h{hidden}": _radar(members, results) for hidden, members in sizes.items() if len(members) > 1
    }
    if not figures:
        raise Missing("no two configurations of one size without --replay")
    return figures


def _radar(members: Sequence[Result], results: Sequence[Result]) -> Any:
    measured, colours = select.spokes(members), style.wait_colours(map(wait, results))
    angles = [2 * math.pi * i / len(measured) for i in range(len(measured))]
    figure, panels = style.named_panels(methods(members), (2.3, 2.3), subplot_kw={"projection": "polar"})
    figure.get_layout_engine().set(wspace=0.14)
    for i, result in enumerate(members):
        radii = [spoke.radii[i] for spoke in measured.values()]
        wider = len([other for other in members[i:] if other.method == result.method])  # where lines coincide
        look = {"color": colours[wait(result)], "marker": ".", "linewidth": 1.2 * wider, "clip_on": False}
        panels[result.method].plot([*angles, 0], [*radii, radii[0]], **look)
    for axes in panels.values():
        axes.set_theta_zero_location("N")
        axes.set(rlim=(0, 1), rticks=(0.25, 0.5, 0.75, 1), yticklabels=[], xticks=angles, xticklabels=[])
        axes.spines["polar"].set_visible(False)
        axes.set_title(textwrap.fill(axes.get_title(), 26), pad=16)
        for name, angle, rotation in zip(measured, angles, (0, 90, 0, -90), strict=True):
            look = {"ha": "center", "va": "center", "rotation": rotation, "fontsize": 7}
            axes.text(angle, 1.13, name, **look)
    parts.colour_titles(panels, members, results)
    ranges: LegendEntries = [
        (f"{name}: {_extent(spoke)}", {"linestyle": ""}) for name, spoke in measured.items()
    ]
    heading = f"{parts.title(members)}, {parts.size_label(members[0])}"
    waits = parts.wait_entries(members, results)
    style.add_legend(figure, {heading: [], "waiting time": waits, "axes (smaller is better)": ranges})
    return figure


def _extent(spoke: Spoke) -> str:
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(places=1, sep="")
    start = short(min(spoke.values)) if spoke.logarithmic else "0"
    return f"{start} to {short(max(spoke.values))}" + (", log" if spoke.logarithmic else "")


def _marks_of_pairs(plain: Sequence[Result], markers: Mapping[int, str]) -> dict[str, LegendEntries]:
    """Legend entries of sizes, and of hollow and filled points."""
    sizes = [(str(hidden), mark(markers[hidden])) for hidden in distinct(size, plain)]
    return {parts.units(plain[0]): sizes, "replay": [("without", mark(hollow=True)), ("with", mark())]}


def _label_cer_axes(panels: Sequence[Any], values: Sequence[float], shown: Sequence[Result]) -> None:
    """Number the CER axes, and add an axis with the mean error (CER / B) to the right of the last panel."""
    share = 100 / shown[0].megabatches
    for axes in panels:
        number_axis(axes, "y", values, log_from=2.5, dense_below=100)
    right = panels[-1].secondary_yaxis("right", functions=(lambda y: y * share, lambda y: y / share))
    number_axis(right, "y", [value * share for value in values], log_from=2.5, dense_below=100)
    right.set_ylabel("mean error, CER / B (%)")


def _draw_pair(axes: Any, pair: Pair, look: dict[str, Any], markers: Mapping[int, str]) -> None:
    """Draw a line from the result without replay (hollow point) to the one with replay (filled point)."""
    x, points = [r.over_seeds(compute)[0] for r in pair], [r.over_seeds(cer) for r in pair]
    y, deviation = zip(*points, strict=True)
    axes.plot(x, y, linewidth=0.9, **look)
    axes.errorbar(x, y, deviation, linestyle="none", ecolor=look["color"], elinewidth=0.8)
    for i, hollow in enumerate((True, False)):
        axes.plot(x[i], y[i], "", color=look["color"], **dot(look["color"], markers[size(pair[i])], hollow))


def _label_pair_axes(panels: Sequence[Any], pairs: Sequence[Pair]) -> None:
    """Number the axes of pairs; a single panel gets an axis with the mean error."""
    both = [result for pair in pairs for result in pair]
    for axes in panels:
        number_axis(axes, "x", [r.over_seeds(compute)[0] for r in both], log_from=5, dense_below=100)
        number_axis(axes, "y", [r.over_seeds(cer)[0] for r in both], log_from=2.5, dense_below=100)
    if len(panels) == 1:
        _label_cer_axes(panels, [r.over_seeds(cer)[0] for r in both], both)
