"""The paper's figures of image runs: 1 (right), 2, 3, 4, 7, 8, 9; the first draft's radar plots and ablation.

`python -m alma.report --figures vision` draws them.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.records import Run
from alma.report import style
from alma.report.figures import Curve, draw_curve, over_time
from alma.report.results import Result, compute, memory
from alma.report.style import COLOURS, LINE_STYLES, MARKERS, LegendEntries, Picture, add_legend, number_axis
from alma.report.vision import select
from alma.report.vision.select import Missing, Pair, Spoke, cer, distinct, methods, size, wait

CER, TFLOPS = "cumulative error rate (CER)", "training compute (TFLOPs)"
_ALIGNED = (("center", "bottom"), ("right", "center"), ("center", "top"), ("left", "center"))
_FILLS = dict(zip(LINE_STYLES, ("full", "none", "left", "top"), strict=True))
_GREY = "0.25"  # of legend entries that stand for any colour


def write_paper_figures(runs: Sequence[Run], out: Path) -> tuple[list[Picture], list[str]]:
    """Write every figure that the runs support to `out` as PNG, for each data set and B.

    Returns the pictures, and a line for each run that is left out and each figure that cannot be drawn.
    """
    import matplotlib

    done, remarks = select.finished(runs)
    pictures: list[Picture] = []
    with matplotlib.rc_context(style.PRINT):
        for stem, results in select.data_sets(done).items():
            shown, excess = select.at_most(len(COLOURS), results)
            if excess:
                waits = ", ".join(map(str, excess))
                remarks.append(f"{stem}: more waiting times than colours, left out: {waits}")
            for name, (make, caption) in FIGURES.items():
                try:
                    found = make(shown)
                except Missing as reason:
                    remarks.append(f"{stem} {name}: {reason}")
                    continue
                for suffix, figure in found.items():
                    path = out / f"{stem}_{name}{suffix}.png"
                    figure.savefig(path, dpi=200, bbox_inches="tight")
                    pictures.append(Picture(path, caption))
    return pictures, remarks


def learning_curves(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 1 right: error over time of one learner and size; a colour per waiting time."""
    shown, colours = select.most_waits(results), _colours(results)
    figure, ((axes,),) = style.subplots(1, 1, (4.4, 2.9))
    for result in shown:
        _draw_error(axes, result, colours[wait(result)])
    axes.set(title=f"{_title(results)}: {shown[0].method}, {_size_label(shown[0])}")
    _label_error_axes(figure, [axes], shown)
    add_legend(figure, {"waiting time": _waits(shown, colours)})
    return {"": figure}


def cost_trade_offs(results: Sequence[Result]) -> dict[str, Any]:
    """Figures 2 and 7 (top): CER against training compute, and against parameters, without replay."""
    shown = select.without_replay(results)
    if len(shown) < 2:
        raise Missing("only one configuration without --replay")
    figure, ((left, right),) = style.subplots(1, 2, (7.0, 3.2), sharey=True)
    markers = _markers(distinct(wait, results))
    for axes, cost in ((left, compute), (right, memory)):
        curves = select.cer_against(shown, cost)
        for found in curves:
            colour, line = _look(found.result, results)
            axes.errorbar(found.x, found.y, found.deviation, linestyle="none", ecolor=colour, elinewidth=0.8)
            fill = _FILLS[line]  # distinguishes methods of a single size, which have no line
            look = _dot(markers[wait(found.result)], colour, fill)
            axes.plot(found.x, found.y, line, color=colour, **look)
        number_axis(axes, "x", [x for found in curves for x in found.x], log_from=5, dense_below=20)
    _label_cer_axes([left, right], [y for found in curves for y in found.y], shown)
    left.set(xlabel=TFLOPS, ylabel=CER, title=_title(results))
    right.set(xlabel="cumulative parameters, Mem", title=_title(results))
    marks = [(f"w = {w}", _mark(markers[w])) for w in distinct(wait, shown)]
    learners = _method_entries(shown, results)
    for _, look in learners:
        fill = _FILLS[look["linestyle"]]
        look |= _dot("o", look["color"], fill) if fill != "full" else {}
    add_legend(figure, {"learner": learners, "waiting time": marks})
    return {"": figure}


def small_and_large(results: Sequence[Result]) -> dict[str, Any]:
    """Figures 3 and 7 (bottom): error over time of the smallest and the largest models side by side.

    A row has two learners: a panel with more lines would be illegible.
    """
    usual = [result for result in select.without_replay(results) if not result.settings]
    if not usual:
        raise Missing("no run without --replay and with a learner's usual settings")
    sizes = sorted({min(map(size, usual)), max(map(size, usual))})
    shown = [result for result in usual if size(result) in sizes]
    names = methods(shown)
    rows = [names[i : i + 2] for i in range(0, len(names), 2)]
    inches = 1.1 + 2.9 * len(sizes), 0.4 + 2.2 * len(rows)
    figure, panels = style.subplots(len(rows), len(sizes), inches, sharex=True, sharey=True)
    colours = _colours(results)
    for pair, row in zip(rows, panels, strict=True):
        for hidden, axes in zip(sizes, row, strict=True):
            members = [result for result in shown if result.method in pair and size(result) == hidden]
            for result in members:
                _draw_error(axes, result, colours[wait(result)], LINE_STYLES[pair.index(result.method)])
            there = " and ".join(methods(members))
            axes.set_title(f"{there}, {hidden} {_units(shown[0])}")
            axes.set_visible(bool(members))
    for column in panels.T:  # label the lowest visible panel
        [axes for axes in column if axes.get_visible()][-1].tick_params(labelbottom=True)
    _label_error_axes(figure, list(panels.flat), shown)
    lines = [
        (", ".join(names[i::2]), {"color": _GREY, "linestyle": LINE_STYLES[i]}) for i in (0, 1) if names[i:]
    ]
    add_legend(figure, {_title(results): [], "waiting time": _waits(shown, colours), "learner": lines})
    return {"": figure}


def replay_at_one_wait(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 4: effect of replay on CER and compute for each learner and size, at one waiting time."""
    pairs = select.at_one_wait(select.replay_pairs(results))
    figure, ((axes,),) = style.subplots(1, 1, (4.4, 3.0))
    plain = [pair[0] for pair in pairs]
    markers = _markers(distinct(size, plain))
    for pair in pairs:
        _draw_pair(axes, pair, _look(pair[0], results), markers)
    _label_pair_axes([axes], pairs)
    axes.set(xlabel=TFLOPS, ylabel=CER, title=f"{_title(results)}, waiting time {wait(plain[0])}")
    add_legend(figure, {"learner": _method_entries(plain, results), **_marks_of_pairs(plain, markers)})
    return {"": figure}


def replay_at_all_waits(results: Sequence[Result]) -> dict[str, Any]:
    """Figure 8: effect of replay on CER and compute; a panel per learner, a colour per waiting time."""
    pairs = select.replay_pairs(results)
    plain = [pair[0] for pair in pairs]
    figure, panels = style.named_panels(methods(plain), sharex=True, sharey=True)
    markers, colours = _markers(distinct(size, plain)), _colours(results)
    for pair in pairs:
        _draw_pair(panels[pair[0].method], pair, (colours[wait(pair[0])], "-"), markers)
    _label_pair_axes(list(panels.values()), pairs)
    figure.supxlabel(TFLOPS, fontsize="medium")
    figure.supylabel(CER, fontsize="medium")
    groups = {"waiting time": _waits(plain, colours), **_marks_of_pairs(plain, markers)}
    add_legend(figure, {_title(results): [], **groups})
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
    colours, drawn = _colours(results), []
    for name, axes in panels.items():
        mine = [pair for pair in pairs if pair[0].method == name and size(pair[0]) == largest[name]]
        whole = [
            r for r in results if r.method == name and size(r) == largest[name] and select.single_stage(r)
        ]
        plain = [pair[0] for pair in mine if not select.single_stage(pair[0])] + whole
        for result in plain:
            _draw_error(axes, result, colours[wait(result)])
        for _, result in mine:
            _draw_error(axes, result, colours[wait(result)], "--")
        axes.set_title(f"{name}, {_size_label(plain[0])}")
        drawn += plain + [pair[1] for pair in mine]
    _label_error_axes(figure, list(panels.values()), drawn)
    lines: LegendEntries = [("without", {"color": _GREY}), ("with", {"color": _GREY, "linestyle": "--"})]
    add_legend(figure, {_title(results): [], "waiting time": _waits(drawn, colours), "replay": lines})
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
    measured, colours = select.spokes(members), _colours(results)
    angles = [2 * math.pi * i / len(measured) for i in range(len(measured))]
    figure, panels = style.named_panels(methods(members), (2.4, 2.0), subplot_kw={"projection": "polar"})
    for i, result in enumerate(members):
        radii = [spoke.radii[i] for spoke in measured.values()]
        look = {"color": colours[wait(result)], "marker": ".", "clip_on": False, "zorder": 3}
        panels[result.method].plot([*angles, 0], [*radii, radii[0]], **look)
    for axes in panels.values():
        axes.set_theta_zero_location("N")
        axes.set(rlim=(0, 1), rticks=(0.25, 0.5, 0.75), yticklabels=[], xticks=angles, xticklabels=[])
        axes.set_title(textwrap.fill(axes.get_title(), 22), pad=14)
        for name, angle, (x, y) in zip(measured, angles, _ALIGNED, strict=True):
            look = {"horizontalalignment": x, "verticalalignment": y, "fontsize": "small"}
            axes.text(angle, 1.08, name.replace(" ", "\n"), **look)
    ranges: LegendEntries = [
        (f"{name}: {_extent(spoke)}", {"linestyle": ""}) for name, spoke in measured.items()
    ]
    groups: dict[str, LegendEntries] = {_title(members): [], _size_label(members[0]): []}
    add_legend(figure, groups | {"waiting time": _waits(members, colours), "axes": ranges})
    return figure


def _extent(spoke: Spoke) -> str:
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(places=1, sep="")
    start = short(min(spoke.values)) if spoke.logarithmic else "0"
    return f"{start} to {short(max(spoke.values))}" + (", log" if spoke.logarithmic else "")


def growth_ablation(results: Sequence[Result]) -> dict[str, Any]:
    """The first draft's Figure 5 left: tree gates, flat gates, no growth, and an ensemble of mixtures."""
    shown = select.ablation(results)
    figure, ((axes,),) = style.subplots(1, 1, (4.6, 2.9))
    looks = {name: {"color": COLOURS[i], "linestyle": LINE_STYLES[i]} for i, name in enumerate(shown)}
    for name, result in shown.items():
        _draw_error(axes, result, looks[name]["color"], looks[name]["linestyle"])
    tree = next(iter(shown.values()))
    replay = ", replay" if tree.config["replay"] else ""
    axes.set_title(f"{_title(results)}, {_size_label(tree)}, w = {wait(tree)}{replay}")
    _label_error_axes(figure, [axes], list(shown.values()))
    add_legend(figure, {"learner": list(looks.items())})
    return {"": figure}


_CER = (
    "CER is eq. 1, so at most B, and includes the untrained errors of a learner that waits. The paper's axes "
    "(to 3,500 at B = 100, to 1,200 at B = 500) have another scale, which the paper does not define."
)
FIGURES: dict[str, tuple[Callable[[Sequence[Result]], dict[str, Any]], str]] = {
    "learning_curves": (learning_curves, "Figure 1 right: test error over the stream, by waiting time."),
    "trade_offs": (
        cost_trade_offs,
        "Figures 2 and 7 (top): CER against cost, without replay. Lines join the sizes of a learner at one "
        f"waiting time. {_CER}",
    ),
    "over_time": (small_and_large, "Figures 3 and 7 (bottom): error over time of small and of large models."),
    "replay": (replay_at_one_wait, f"Figure 4: CER and compute, from without to with replay. {_CER}"),
    "replay_waits": (replay_at_all_waits, f"Figure 8: CER and compute, from without to with replay. {_CER}"),
    "replay_over_time": (
        replay_over_time,
        "Figure 9: error over time without and with replay. Replay trains on (B / w + 1) / 2 times as many "
        "examples if w divides B: at B = 100, 5.5 times for w = 10 and 50.5 times for w = 1. The paper's "
        "4.5x and 122.5x (appendix E) are wrong.",
    ),
    "radar": (
        radars,
        "First draft, Figures 3, 4, 6 and 7: smaller is better. The centre is 0; on a logarithmic axis the "
        "smallest value is at a tenth of the radius. Test FLOPs are for one example at each t.",
    ),
    "ablation": (
        growth_ablation,
        "First draft, Figure 5 left: tree gates and flat gates; if there are such runs, also mixtures "
        "without growth (moe) and an ensemble of mixtures, each trained on the data of one stage (gens).",
    ),
}
"""By name: a function of the results that returns figures by suffix of the file name, or raises Missing; and
the caption of these figures, with the paper's errata."""


def _title(results: Sequence[Result]) -> str:
    return f"{results[0].config['dataset']}, B = {results[0].config['megabatches']}"


def _size_label(result: Result) -> str:
    return f"{size(result)} {_units(result)}"


def _units(result: Result) -> str:
    return "channels" if result.config.get("arch") == "vgg" else "hidden units"


def _look(result: Result, results: Sequence[Result]) -> tuple[str, str]:
    """Colour of the learner, and line style of the method among the learner's methods."""
    peers = methods(r for r in results if r.rank == result.rank)
    return COLOURS[result.rank % len(COLOURS)], LINE_STYLES[peers.index(result.method) % len(LINE_STYLES)]


def _colours(results: Sequence[Result]) -> dict[int, str]:
    """Colour of each waiting time, the same in all figures of a data set."""
    return dict(zip(distinct(wait, results), COLOURS, strict=False))


def _markers(values: Sequence[int]) -> dict[int, str]:
    return {value: MARKERS[i % len(MARKERS)] for i, value in enumerate(values)}


def _waits(shown: Sequence[Result], colours: Mapping[int, str]) -> LegendEntries:
    return [(f"w = {w}", {"color": colours[w], "linewidth": 2}) for w in distinct(wait, shown)]


def _method_entries(shown: Sequence[Result], results: Sequence[Result]) -> LegendEntries:
    looks = {result.method: _look(result, results) for result in shown}
    return [(name, {"color": colour, "linestyle": line}) for name, (colour, line) in looks.items()]


def _dot(marker: str, colour: str, fill: str = "full") -> dict[str, Any]:
    """Properties of a point; `fill` is a value of _FILLS, where "none" is white inside."""
    whole = fill == "full"
    edge = {"markeredgecolor": "white" if whole else colour, "markeredgewidth": 0.4 if whole else 0.9}
    look = {"marker": marker, "markersize": 4.5, "markerfacecolor": colour, "markerfacecoloralt": "white"}
    return look | edge | ({"markerfacecolor": "white"} if fill == "none" else {"fillstyle": fill})


def _mark(marker: str, fill: str = "full") -> dict[str, Any]:
    return {"linestyle": "", **_dot(marker, _GREY, fill)}


def _marks_of_pairs(plain: Sequence[Result], markers: Mapping[int, str]) -> dict[str, LegendEntries]:
    """Legend entries of sizes, and of hollow and filled points."""
    sizes = [(str(hidden), _mark(markers[hidden])) for hidden in distinct(size, plain)]
    return {_units(plain[0]): sizes, "replay": [("without", _mark("o", "none")), ("with", _mark("o"))]}


def _draw_error(axes: Any, result: Result, colour: str, line: str = "-") -> None:
    """Draw error over time: dotted while untrained, with a dot at the end (the only such point if w = B)."""
    found = over_time(result)
    start = sum(result.waiting(t) for t in result.times)
    axes.plot(found.x[: start + 1], found.y[: start + 1], ":", color=colour, alpha=0.7, linewidth=0.9)
    trained = Curve(result, found.x[start:], found.y[start:], found.deviation[start:])
    end = {"marker": "o", "markersize": 3, "markevery": [-1], "clip_on": False, "zorder": 3}
    draw_curve(axes, trained, colour, line, linewidth=0.9, **end)


def _label_error_axes(figure: Any, panels: Sequence[Any], shown: Sequence[Result]) -> None:
    """Label the axes of error over time. The error is logarithmic, as the untrained one dwarfs the rest."""
    values = [y for result in shown for y in over_time(result).y]
    for axes in panels:
        number_axis(axes, "x", shown[0].times)
        number_axis(axes, "y", values, log_from=3, dense_below=100)
    if len(panels) == 1:
        panels[0].set(xlabel="mega-batch t", ylabel="test error (%)")
    else:
        figure.supxlabel("mega-batch t", fontsize="medium")
        figure.supylabel("test error (%)", fontsize="medium")


def _label_cer_axes(panels: Sequence[Any], values: Sequence[float], shown: Sequence[Result]) -> None:
    """Number the CER axes, and add an axis with the mean error (CER / B) to the right of the last panel."""
    share = 100 / shown[0].config["megabatches"]
    for axes in panels:
        number_axis(axes, "y", values, log_from=4, dense_below=100)
    right = panels[-1].secondary_yaxis("right", functions=(lambda y: y * share, lambda y: y / share))
    number_axis(right, "y", [value * share for value in values], log_from=4, dense_below=100)
    right.set_ylabel("mean error (%)")


def _draw_pair(axes: Any, pair: Pair, look: tuple[str, str], markers: Mapping[int, str]) -> None:
    """Draw a line from the result without replay (hollow point) to the one with replay (filled point)."""
    colour, line = look
    x, points = [r.over_seeds(compute)[0] for r in pair], [r.over_seeds(cer) for r in pair]
    y, deviation = zip(*points, strict=True)
    axes.plot(x, y, line, color=colour, linewidth=0.9)
    axes.errorbar(x, y, deviation, linestyle="none", ecolor=colour, elinewidth=0.8)
    for i, fill in enumerate(("none", "full")):
        axes.plot(x[i], y[i], "", color=colour, **_dot(markers[size(pair[i])], colour, fill))


def _label_pair_axes(panels: Sequence[Any], pairs: Sequence[Pair]) -> None:
    """Number the axes of pairs; a single panel gets an axis with the mean error."""
    both = [result for pair in pairs for result in pair]
    for axes in panels:
        number_axis(axes, "x", [r.over_seeds(compute)[0] for r in both], log_from=5, dense_below=20)
        number_axis(axes, "y", [r.over_seeds(cer)[0] for r in both], log_from=4, dense_below=100)
    if len(panels) == 1:
        _label_cer_axes(panels, [r.over_seeds(cer)[0] for r in both], both)
