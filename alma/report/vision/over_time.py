"""Figures of image runs over the stream: 1 (right), 3, 7 (bottom), 9.

Also the first draft's Figure 1 and ablation.
"""

from collections.abc import Sequence
from typing import Any

from alma.learners import colour_of
from alma.report import style
from alma.report.figures import Curve, draw_over_time, frame_over_time
from alma.report.results import Result
from alma.report.style import GREY, LegendEntries
from alma.report.vision import select
from alma.report.vision.select import Missing, distinct, size, wait

_ERROR = "test error (%)"
_OVERLAID = {"sm": "--", "ens": "-"}  # learners of Figure 3, with their line styles
_DRAFT_COLOURS = ("#7A4A21", "#2F5FC4", "#C62828", "#7B2D9B")
"""Brown, blue, red and purple, as in the first draft's Figure 1; see `select.update_rates`."""


def learning_curves(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 1 right: error over time of one learner and size; a colour per waiting time."""
    shown = select.most_waits(results)
    colours = style.wait_colours(map(wait, results))
    title = f"{results[0].stream}: {shown[0].method}, {select.size_label(shown[0])}"
    return _panel(
        title, [(f"w = {wait(r)}", r, {"color": colours[wait(r)]}) for r in shown], area=True
    )


def update_rates(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's Figure 1: curves of tardy, greedy and intermediate updates, and growth."""
    shown = zip(select.update_rates(results).items(), _DRAFT_COLOURS, strict=True)
    lines = [(name, result, {"color": colour}) for (name, result), colour in shown]
    return _panel(results[0].stream, lines, area=True)


def growth_ablation(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's Figure 5 left: gates in a tree, flat gates, no growth, an ensemble."""
    shown = select.ablation(results)
    learners = [result.learner for result in shown.values()]
    lines = []
    for i, (name, result) in enumerate(shown.items()):
        look = style.variant(colour_of(result.learner), learners[:i].count(result.learner))
        lines.append((name, result, look))
    tree = lines[0][1]
    replay = ", replay" if tree.config["replay"] else ""
    return _panel(
        f"{results[0].stream}, {select.size_label(tree)}, w = {wait(tree)}{replay}", lines
    )


def _panel(
    title: str, lines: Sequence[tuple[str, Result, dict[str, Any]]], area: bool = False
) -> dict[str, Any]:
    """A figure with one panel. `lines`: the name, result and look of each."""
    figure, ((axes,),) = style.subplots(1, 1, (5.2, 2.9))
    curves = [draw_over_time(axes, result, **look) for _, result, look in lines]
    axes.set_title(title)
    frame_over_time(figure, [([axes], curves)], _ERROR, area)
    style.add_legend(figure, {"": [(name, look) for name, _, look in lines]})
    return {"": figure}


def small_and_large(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 7 (bottom): error over time of the smallest models (top) and the largest (bottom).

    A panel per learner; a colour per waiting time.
    """
    shown = select.extreme_sizes(results)
    sizes = distinct(size, shown)
    learners = {result.method: result.learner for result in shown}
    colours = style.wait_colours(map(wait, results))
    inches = 1.6 + 1.6 * len(learners), 0.6 + 1.8 * len(sizes)
    figure, grid = style.subplots(len(sizes), len(learners), inches, sharex=True, sharey="row")
    rows: list[tuple[Any, list[Curve]]] = []
    for hidden, row in zip(sizes, grid, strict=True):
        rows.append((row, []))
        for (name, learner), axes in zip(learners.items(), row, strict=True):
            members = [r for r in shown if (r.method, size(r)) == (name, hidden)]
            rows[-1][1].extend(draw_over_time(axes, r, color=colours[wait(r)]) for r in members)
            if not members:
                axes.text(0.5, 0.5, "no run", transform=axes.transAxes, ha="center", color="0.5")
            axes.set_title(f"{name}, {hidden}", color=colour_of(learner), fontweight="bold")
    frame_over_time(figure, rows, _ERROR)
    heading = f"{results[0].stream}, {select.units(shown[0])} {' and '.join(map(str, sizes))}"
    style.add_legend(figure, {heading: [], "waiting time": select.wait_entries(shown, results)})
    return {"": figure}


def two_learners(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 3: error over time of sm and ens in one panel.

    The smallest models are on the left, the largest on the right; a colour per waiting time, a line
    style per learner. Bars above the panel show where waiting wins, in the colour of the waiting
    time with the lowest error, wherever it is not the shortest one.
    """
    shown = [result for result in select.extreme_sizes(results) if result.learner in _OVERLAID]
    if {result.learner for result in shown} != _OVERLAID.keys():
        raise Missing("no runs of both sm and ens")
    sizes = distinct(size, shown)
    colours = style.wait_colours(map(wait, results))
    figure, (row,) = style.subplots(
        1, len(sizes), (1.8 + 2.7 * len(sizes), 2.8), sharex=True, sharey=True
    )
    curves = []
    for hidden, axes in zip(sizes, row, strict=True):
        axes.set_title(select.size_label(next(r for r in shown if size(r) == hidden)), pad=20)
        heights = (1.09, 1.04)  # above the panel, which ends at 1
        for (learner, line), height in zip(_OVERLAID.items(), heights, strict=True):
            members = [r for r in shown if (r.learner, size(r)) == (learner, hidden)]
            curves += [
                draw_over_time(axes, r, color=colours[wait(r)], linestyle=line) for r in members
            ]
            look: Any = {
                "transform": axes.get_xaxis_transform(),
                "solid_capstyle": "butt",
                "linewidth": 3,
            }
            for t, best in select.waiting_wins(members).items() if members else ():
                axes.plot([t, t + 1], [height, height], color=colours[best], clip_on=False, **look)
            place = {"transform": axes.transAxes, "va": "center", "ha": "right"}
            axes.text(-0.01, height, learner if members else "", fontsize=6, color=GREY, **place)
    frame_over_time(figure, [(list(row), curves)], _ERROR)
    lines: LegendEntries = [
        (name, {"color": GREY, "linestyle": line}) for name, line in _OVERLAID.items()
    ]
    bars: LegendEntries = [("where waiting longer has the lowest error", {"linestyle": ""})]
    groups = {"learner": lines, "waiting time": select.wait_entries(shown, results), "bars": bars}
    style.add_legend(figure, {results[0].stream: [], **groups})
    return {"": figure}


def replay_over_time(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 9: error over time without and with replay; a panel per learner at its largest size.

    The run that waits for the whole stream counts as both: replay changes nothing.
    """
    pairs = select.replay_pairs(results)
    largest: dict[str, int] = {}
    for one, _ in pairs:
        largest[one.method] = max(size(one), largest.get(one.method, 0))
    figure, panels = style.named_panels(list(largest), sharex=True, sharey=True)
    colours = style.wait_colours(map(wait, results))
    curves = []
    for name, axes in panels.items():
        of_panel = [r for r in results if r.method == name and size(r) == largest[name]]
        shown = [pair for pair in pairs if pair[0] in of_panel]
        whole = [r for r in of_panel if wait(r) == r.megabatches and not r.config["replay"]]
        plain = [pair[0] for pair in shown if pair[0] not in whole] + whole
        for line, members in (("-", plain), ("--", [pair[1] for pair in shown])):
            curves += [
                draw_over_time(axes, r, color=colours[wait(r)], linestyle=line) for r in members
            ]
        axes.set_title(f"{name}, {select.size_label(plain[0])}")
    drawn = [curve.result for curve in curves]
    select.colour_titles(panels, drawn, results)
    frame_over_time(figure, [(list(panels.values()), curves)], _ERROR)
    lines: LegendEntries = [
        ("without", {"color": GREY}),
        ("with", {"color": GREY, "linestyle": "--"}),
    ]
    waits = select.wait_entries(drawn, results)
    style.add_legend(figure, {results[0].stream: [], "waiting time": waits, "replay": lines})
    return {"": figure}
