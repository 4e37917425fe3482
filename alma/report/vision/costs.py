"""Figures of image runs by cost: the front, 2, 4, 7 (top), 8, and the first draft's radar plots."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from alma.report import style
from alma.report.front import TFLOPS
from alma.report.front import front as front_of
from alma.report.results import Result, compute, memory
from alma.report.style import LegendEntries, dot, mark, number_axis
from alma.report.vision import select
from alma.report.vision.select import Missing, Pair, cer, distinct, methods, size, wait

CER = "cumulative error rate, CER\n(untrained errors while waiting included)"


def front(results: Sequence[Result]) -> dict[str, Any]:
    """Mean error over t = 1..B against training compute."""
    figure = front_of(results)
    if not figure:
        raise Missing("only one configuration")
    return {"": figure}


def against_costs(results: Sequence[Result]) -> dict[str, Any]:
    """Figures 2 and 7 (top): CER against training compute and parameters, without replay."""
    shown = select.without_replay(results)
    if len(shown) < 2:
        raise Missing("only one configuration without --replay")
    figure, ((left, right),) = style.subplots(1, 2, (7.4, 3.4), sharey=True)
    markers = dict(zip(distinct(wait, results), itertools.cycle(style.MARKERS), strict=False))
    for axes, cost in ((left, compute), (right, memory)):
        curves = select.cer_against(shown, cost)
        for curve in curves:
            look = select.look(curve.result, results)
            axes.plot(curve.x, curve.y, **look, **dot(look["color"], markers[wait(curve.result)]))
            bars = {"linestyle": "none", "ecolor": look["color"], "elinewidth": 0.8}
            axes.errorbar(curve.x, curve.y, curve.deviation, **bars)
        number_axis(axes, "x", [x for curve in curves for x in curve.x], log_from=5)
    _label_cer_axes([left, right], [y for curve in curves for y in curve.y], shown)
    left.set(xlabel=TFLOPS, ylabel=CER, title=f"{results[0].stream}: compute")
    right.set(xlabel="parameters summed over the stream, Mem", title="memory")
    marks = [(f"w = {w}", mark(markers[w])) for w in distinct(wait, shown)]
    style.add_legend(
        figure, {"learner": select.method_entries(shown, results), "waiting time": marks}
    )
    return {"": figure}


def replay_at_one_wait(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 4: effect of replay on CER and compute by learner and size, at one waiting time."""
    pairs = select.at_one_wait(select.replay_pairs(results))
    figure, ((axes,),) = style.subplots(1, 1, (4.8, 3.2))
    plain = [pair[0] for pair in pairs]
    marks = _draw_pairs([(axes, select.look(pair[0], results)["color"], pair) for pair in pairs])
    axes.set(xlabel=TFLOPS, ylabel=CER)
    axes.set_title(f"{results[0].stream}, w = {wait(plain[0])}: effect of replay")
    _label_cer_axes([axes], [r.over_seeds(cer)[0] for pair in pairs for r in pair], plain)
    style.add_legend(figure, {"learner": select.method_entries(plain, results)} | marks)
    return {"": figure}


def replay_at_all_waits(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 8: effect of replay on CER and compute.

    A panel per learner, a colour per waiting time.
    """
    pairs = select.replay_pairs(results)
    plain = [pair[0] for pair in pairs]
    figure, panels = style.named_panels(methods(plain), sharex=True, sharey=True)
    colours = style.wait_colours(map(wait, results))
    marks = _draw_pairs([(panels[pair[0].method], colours[wait(pair[0])], pair) for pair in pairs])
    select.colour_titles(panels, plain, results)
    style.name_axes(figure, list(panels.values()), TFLOPS, CER)
    if len(panels) == 1:
        _label_cer_axes(
            list(panels.values()), [r.over_seeds(cer)[0] for pair in pairs for r in pair], plain
        )
    title = f"{results[0].stream}: effect of replay"
    style.add_legend(
        figure, {title: [], "waiting time": select.wait_entries(plain, results)} | marks
    )
    return {"": figure}


def _draw_pairs(pairs: Sequence[tuple[Any, str, Pair]]) -> dict[str, LegendEntries]:
    """Draw lines from results without replay (hollow points) to those with replay (filled points).

    `pairs`: the panel, colour and results of each. Returns the entries of the legend.
    """
    plain = [pair[0] for _, _, pair in pairs]
    markers = dict(zip(distinct(size, plain), itertools.cycle(style.MARKERS), strict=False))
    for axes, colour, pair in pairs:
        x = [r.over_seeds(compute)[0] for r in pair]
        y, deviation = zip(*(r.over_seeds(cer) for r in pair), strict=True)
        axes.plot(x, y, linewidth=0.9, color=colour)
        axes.errorbar(x, y, deviation, linestyle="none", ecolor=colour, elinewidth=0.8)
        for i, hollow in enumerate((True, False)):
            axes.plot(x[i], y[i], "", color=colour, **dot(colour, markers[size(pair[i])], hollow))
    results = [result for _, _, pair in pairs for result in pair]
    for axes in {id(axes): axes for axes, _, _ in pairs}.values():
        number_axis(axes, "x", [r.over_seeds(compute)[0] for r in results], log_from=5)
        number_axis(axes, "y", [r.over_seeds(cer)[0] for r in results], log_from=2.5)
    sizes = [(str(hidden), mark(markers[hidden])) for hidden in distinct(size, plain)]
    return {
        select.units(plain[0]): sizes,
        "replay": [("without", mark(hollow=True)), ("with", mark())],
    }


def _label_cer_axes(
    panels: Sequence[Any], values: Sequence[float], shown: Sequence[Result]
) -> None:
    """Number the CER axes; to the right of the last panel, add one of the mean error (CER / B)."""
    share = 100 / shown[0].megabatches
    for axes in panels:
        number_axis(axes, "y", values, log_from=2.5)
    right = panels[-1].secondary_yaxis(
        "right", functions=(lambda y: y * share, lambda y: y / share)
    )
    number_axis(right, "y", [value * share for value in values], log_from=2.5)
    right.set_ylabel("mean error, CER / B (%)")


def radars(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's radar plots, one per size.

    A panel per learner, a polygon per waiting time.
    """
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(places=1, sep="")
    shown = select.without_replay(results)
    figures = {}
    for hidden in distinct(size, shown):
        members = [result for result in shown if size(result) == hidden]
        if len(members) < 2:
            continue
        measured = select.spokes(members)
        colours = style.wait_colours(map(wait, results))
        angles = [2 * math.pi * i / len(measured) for i in range(len(measured))]
        figure, panels = style.named_panels(
            methods(members), (2.3, 2.3), subplot_kw={"projection": "polar"}
        )
        figure.get_layout_engine().set(wspace=0.14)
        for i, result in enumerate(members):
            radii = [spoke.radii[i] for spoke in measured.values()]
            methods_from_here = [later.method for later in members[i:]]
            # Earlier lines are wider, so that all are visible where they coincide.
            wider = methods_from_here.count(result.method)
            look = {
                "color": colours[wait(result)],
                "marker": ".",
                "linewidth": 1.2 * wider,
                "clip_on": False,
            }
            panels[result.method].plot([*angles, 0], [*radii, radii[0]], **look)
        for axes in panels.values():
            axes.set_theta_zero_location("N")
            axes.set(
                rlim=(0, 1),
                rticks=(0.25, 0.5, 0.75, 1),
                yticklabels=[],
                xticks=angles,
                xticklabels=[],
            )
            axes.spines["polar"].set_visible(False)
            axes.set_title(textwrap.fill(axes.get_title(), 26), pad=16)
            for name, angle, rotation in zip(measured, angles, (0, 90, 0, -90), strict=True):
                axes.text(
                    angle, 1.13, name, ha="center", va="center", rotation=rotation, fontsize=7
                )
        select.colour_titles(panels, members, results)
        ranges: LegendEntries = []
        for name, spoke in measured.items():
            text = f"{name}: 0 to {short(max(spoke.values))}"
            if spoke.logarithmic:
                text = f"{name}: {short(min(spoke.values))} to {short(max(spoke.values))}, log"
            ranges.append((text, {"linestyle": ""}))
        heading = f"{results[0].stream}, {select.size_label(members[0])}"
        waits = select.wait_entries(members, results)
        style.add_legend(
            figure, {heading: [], "waiting time": waits, "axes (smaller is better)": ranges}
        )
        figures[f"_h{hidden}"] = figure
    if not figures:
        raise Missing("no two configurations of one size without --replay")
    return figures
