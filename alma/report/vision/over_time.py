"""Figures of image runs over the stream: 1 (right), 3, 7 (bottom), 9; the first draft's 1 and ablation."""

from collections.abc import Mapping, Sequence
from typing import Any

from alma.learners import colour_of
from alma.report import style
from alma.report.figures import Curve, draw_over_time, frame_over_time
from alma.report.results import Result
from alma.report.style import GREY, LegendEntries
from alma.report.vision import parts, select
from alma.report.vision.select import Missing, distinct, size, wait

_ERROR = "test error (%)"
_OVERLAID = {"sm": "--", "ens": "-"}
"""Learners of Figure 3, with their line styles."""
_DRAFT_COLOURS = ("#7A4A21", "#2F5FC4", "#C62828", "#7B2D9B")
"""Brown, blue, red and purple, as in the first draft's Figure 1; see `select.update_rates`."""


def learning_curves(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 1 right: error over time of one learner and size; a colour per waiting time."""
    shown, colours = select.most_waits(results), style.wait_colours(map(wait, results))
    figure, ((axes,),) = style.subplots(1, 1, (5.0, 2.9))
    curves = [draw_over_time(axes, result, color=colours[wait(result)]) for result in shown]
    axes.set_title(f"{results[0].stream}: {shown[0].method}, {parts.size_label(shown[0])}")
    frame_over_time(figure, [([axes], curves)], _ERROR, area=True)
    style.add_legend(figure, {"waiting time": parts.wait_entries(shown, results)})
    return {"": figure}


def small_and_large(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 7 (bottom): error over time of the smallest models (top) and the largest (bottom).

    A panel per learner; a colour per waiting time.
    """
    shown = select.extreme_sizes(results)
    sizes = distinct(size, shown)
    learners, colours = {r.method: r.learner for r in shown}, style.wait_colours(map(wait, results))
    inches = 1.6 + 1.6 * len(learners), 0.6 + 1.8 * len(sizes)
    figure, grid = style.subplots(len(sizes), len(learners), inches, sharex=True, sharey="row")
    curves: dict[int, list[Curve]] = {hidden: [] for hidden in sizes}
    for hidden, row in zip(sizes, grid, strict=True):
        for (name, learner), axes in zip(learners.items(), row, strict=True):
            members = [r for r in shown if (r.method, size(r)) == (name, hidden)]
            curves[hidden] += [draw_over_time(axes, r, color=colours[wait(r)]) for r in members]
            axes.text(
                0.5, 0.5, "" if members else "no run", transform=axes.transAxes, ha="center", color="0.5"
            )
            axes.set_title(f"{name}, {hidden}", color=colour_of(learner), fontweight="bold")
    frame_over_time(figure, list(zip(grid, curves.values(), strict=True)), _ERROR)
    heading = f"{results[0].stream}, {parts.units(shown[0])} {' and '.join(map(str, sizes))}"
    style.add_legend(figure, {heading: [], "waiting time": parts.wait_entries(shown, results)})
    return {"": figure}


def two_learners(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 3: error over time of sm and ens in one panel, smallest models (left) and largest (right).

    A colour per waiting time, a line style per learner. Bars above show where waiting wins, and which waiting
    time: where the lowest error is not that of the shortest one.
    """
    shown = [result for result in select.extreme_sizes(results) if result.learner in _OVERLAID]
    if {result.learner for result in shown} != _OVERLAID.keys():
        raise Missing("no runs of both sm and ens")
    sizes, colours = distinct(size, shown), style.wait_colours(map(wait, results))
    figure, (row,) = style.subplots(1, len(sizes), (1.8 + 2.7 * len(sizes), 2.8), sharex=True, sharey=True)
    curves = []
    for hidden, axes in zip(sizes, row, strict=True):
        axes.set_title(parts.size_label(next(r for r in shown if size(r) == hidden)), pad=20)
        for rank, (learner, line) in enumerate(_OVERLAID.items()):
            members = [r for r in shown if (r.learner, size(r)) == (learner, hidden)]
            curves += [draw_over_time(axes, r, color=colours[wait(r)], linestyle=line) for r in members]
            if members:
                _mark_waiting(axes, members, colours, 1.09 - 0.05 * rank)
    frame_over_time(figure, [(list(row), curves)], _ERROR)
    lines: LegendEntries = [(name, {"color": GREY, "linestyle": line}) for name, line in _OVERLAID.items()]
    waits = parts.wait_entries(shown, results)
    bars: LegendEntries = [("where waiting longer has the lowest error", {"linestyle": ""})]
    groups = {"learner": lines, "waiting time": waits, "bars": bars}
    style.add_legend(figure, {results[0].stream: [], **groups})
    return {"": figure}


def _mark_waiting(axes: Any, members: Sequence[Result], colours: Mapping[int, str], height: float) -> None:
    """Mark each t at which a waiting learner has a lower error than the one that waits least.

    `members` are results of a learner and size. The marks have the colour of the waiting time with the lowest
    error; `height` is their place in the panel, whose top is 1.
    """
    for t, best in select.waiting_wins(members).items():
        at = {"transform": axes.get_xaxis_transform(), "solid_capstyle": "butt", "clip_on": False}
        axes.plot([t, t + 1], [height, height], color=colours[best], linewidth=3, **at)
    place = {"transform": axes.transAxes, "va": "center", "ha": "right"}
    axes.text(-0.01, height, members[0].learner, fontsize=6, color=GREY, **place)


def replay_over_time(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 9: error over time without and with replay; a panel per learner at its largest size.

    The run that waits for the whole stream counts as both: replay changes nothing.
    """
    pairs = select.replay_pairs(results)
    largest: dict[str, int] = {}
    for one, _ in pairs:
        largest[one.method] = max(size(one), largest.get(one.method, 0))
    figure, panels = style.named_panels(list(largest), sharex=True, sharey=True)
    colours, curves = style.wait_colours(map(wait, results)), []
    for name, axes in panels.items():
        mine = [pair for pair in pairs if pair[0].method == name and size(pair[0]) == largest[name]]
        whole = [
            r for r in results if r.method == name and size(r) == largest[name] and select.single_stage(r)
        ]
        plain = [pair[0] for pair in mine if not select.single_stage(pair[0])] + whole
        for line, members in (("-", plain), ("--", [pair[1] for pair in mine])):
            curves += [draw_over_time(axes, r, color=colours[wait(r)], linestyle=line) for r in members]
        axes.set_title(f"{name}, {parts.size_label(plain[0])}")
    drawn = [curve.result for curve in curves]
    parts.colour_titles(panels, drawn, results)
    frame_over_time(figure, [(list(panels.values()), curves)], _ERROR)
    lines: LegendEntries = [("without", {"color": GREY}), ("with", {"color": GREY, "linestyle": "--"})]
    waits = parts.wait_entries(drawn, results)
    style.add_legend(figure, {results[0].stream: [], "waiting time": waits, "replay": lines})
    return {"": figure}


def update_rates(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's Figure 1: four curves of tardy, greedy and intermediate updates, and growth."""
    shown = select.update_rates(results)
    figure, ((axes,),) = style.subplots(1, 1, (5.4, 2.9))
    legend = [(name, {"color": colour}) for name, colour in zip(shown, _DRAFT_COLOURS, strict=True)]
    curves = [draw_over_time(axes, shown[name], **look) for name, look in legend]
    axes.set_title(results[0].stream)
    frame_over_time(figure, [([axes], curves)], _ERROR, area=True)
    style.add_legend(figure, {"": legend})
    return {"": figure}


def growth_ablation(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's Figure 5 left: tree gates, flat gates, no growth, and an ensemble of mixtures."""
    shown = select.ablation(results)
    figure, ((axes,),) = style.subplots(1, 1, (5.4, 2.9))
    learners = [result.learner for result in shown.values()]
    curves, legend = [], []
    for i, (name, result) in enumerate(shown.items()):
        look = style.variant(colour_of(result.learner), learners[:i].count(result.learner))
        curves.append(draw_over_time(axes, result, **look))
        legend.append((name, look))
    tree = next(iter(shown.values()))
    replay = ", replay" if tree.config["replay"] else ""
    axes.set_title(f"{results[0].stream}, {parts.size_label(tree)}, w = {wait(tree)}{replay}")
    frame_over_time(figure, [([axes], curves)], _ERROR)
    style.add_legend(figure, {"": legend})
    return {"": figure}
