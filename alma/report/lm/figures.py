"""Figures of language models: Figure 5 of the paper, with its runs in grey, and the front."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.flops import ARCHS, Shape
from alma.learners import colour_of
from alma.report import front, style
from alma.report.figures import curve
from alma.report.lm.entries import Entry, sizes
from alma.report.lm.reference import Reference, reference
from alma.report.results import average_trained, compute, trained
from alma.report.style import MARKERS, LegendEntries, Picture, dot, mark, number_axis

PAPER_TOKENS = 120_000 * 192 * 512
"""Training tokens per stage and member in the paper.

Updates times sequences times length (section 5, App. B.2).
"""
PAPER_VOCABULARY = 50_264
"""GPT-2's 50,257 tokens, padded by fairseq ("following Radford et al.", section 5)."""
_RED = "#CC0000"
_OF_PAPER: dict[str, Any] = {"color": "0.62", "linewidth": 0.8}
_TITLES = (
    "cumulative training compute (TFLOPs)",
    "parameters",
    "experts of all members\n(learners shifted sideways, to keep them apart)",
)
CAPTION = (
    "Figure 5: average perplexity since the first stage against cumulative compute, parameters, "
    "and experts of all members. Each line is a run, with a point per mega-batch t. Red numbers "
    "are the experts per Switch layer of SM. In the right panel, learners are shifted sideways, "
    "since several have the same number of experts."
)
_PAPER = (
    " Grey: the paper's Table 2 for the same settings and sizes. The paper does not tabulate "
    "compute: its points use our FLOP count for the architectures, updates and batches of its "
    "section 5 and appendix B.2, so that equal work has equal x. That count is 45.7 GFLOPs per "
    "input of 512 tokens for base and 126.5 for large; section 6.2 prints 42 and 126."
)


class Trajectory(NamedTuple):
    """The points of a line, by t."""

    x: tuple[list[float], list[float], list[float]]  # compute, parameters, experts
    y: list[float]  # average perplexity
    deviation: list[float]  # standard deviation of y


def write_figures(
    groups: Mapping[str, Sequence[Entry]], out: Path
) -> tuple[list[Picture], list[str]]:
    """Write Figure 5 and the front to `out`, for each group of `find_entries`.

    Returns the pictures, and remarks on what they leave out.
    """
    paper = reference()
    pictures: list[Picture] = []
    remarks: list[str] = []

    def save(figure: Any, name: str, caption: str) -> None:
        pictures.append(Picture(out / f"{name}.png", caption))
        style.save(figure, pictures[-1].path)

    with style.drawing():
        for suffix, entries in groups.items():
            shown = comparable(entries)
            names = [f"{entry.setting} of {entry.size}" for entry in entries if entry not in shown]
            if names:
                protocol = "one waiting time, usual updates, no replay, not from scratch"
                remarks.append(f"not in Figure 5 ({protocol}): {'; '.join(names)}")
            if shown:
                first = trained(shown[0].result.repeats[0])[0]
                figure, matched = figure5(shown, paper, f"average perplexity over {first}..t")
                caption = CAPTION + _PAPER if matched else CAPTION
                save(figure, f"figure5{suffix}", caption)
                remarks.append(
                    f"Figure 5: {matched} of {len(shown)} runs have a counterpart in the paper"
                )
            results = [entry.result for entry in entries]
            figure = front.front(results)
            if figure:
                save(figure, f"front{suffix}", front.caption(results))
            else:
                remarks.append("front: no two complete runs of one waiting time")
    return pictures, remarks


def comparable(entries: Sequence[Entry]) -> list[Entry]:
    """Entries with the paper's protocol, usual updates and the smallest w.

    Their averages start at one t.
    """
    usual = [entry for entry in entries if entry.plain and entry.multiplier == 1]
    usual = [entry for entry in usual if trained(entry.result.repeats[0])]
    least = min((entry.result.waiting_time for entry in usual), default=0)
    return [entry for entry in usual if entry.result.waiting_time == least]


def trajectory(entry: Entry) -> Trajectory:
    """The line of a result."""
    times = trained(entry.result.repeats[0])
    line = curve(entry.result, times, compute, average_trained)
    experts = [float((entry.experts(t) or 1) * (entry.members(t) or 1)) for t in times]
    return Trajectory((line.x, list(map(entry.parameters, times)), experts), line.y, line.deviation)


def paper_trajectory(entry: Entry, paper: Sequence[Reference]) -> Trajectory | None:
    """The paper's curve for the same setting and size, up to the first t without a number."""
    line_of_paper = Trajectory(([], [], []), [], [])
    spent, parameters, experts = line_of_paper.x
    perplexities: list[float] = []
    for t in trained(entry.result.repeats[0]):
        line = entry.match(t, paper)
        if line is None or t not in line.perplexity:
            break
        count, _, members = line.experts.partition("@")
        arch = ARCHS[f"switch_gmoe_{line.size}"]
        shape = Shape(
            arch.layers, arch.dim, 4 * arch.dim, PAPER_VOCABULARY, 512, int(count), moe_freq=2
        )
        of_stage = shape.training_flops(PAPER_TOKENS) / 1e12
        stages = entry.result.repeats[0][t]["stage"] + 1
        # gens trains only its newest member.
        training = int(members) if line.learner == "ens" else 1
        spent.append(of_stage * stages * training)
        parameters.append(line.parameters)
        experts.append(float(count) * int(members or 1))
        perplexities.append(line.perplexity[t])
        line_of_paper.y.append(sum(perplexities) / len(perplexities))
        line_of_paper.deviation.append(0.0)
    return line_of_paper if perplexities else None


def figure5(shown: Sequence[Entry], paper: Sequence[Reference], y_label: str) -> tuple[Any, int]:
    """The figure, and the number of results with a counterpart in the paper."""
    from matplotlib.ticker import MaxNLocator

    figure, (panels,) = style.subplots(1, 3, (10.6, 3.5), sharey=True)
    markers = dict(zip(sizes(shown), itertools.cycle(MARKERS), strict=False))
    drawn: list[tuple[Entry, Trajectory, dict[str, Any]]] = []
    for entry in shown:
        line_of_paper = paper_trajectory(entry, paper)
        if line_of_paper:
            look = _OF_PAPER | dot("0.62", markers[entry.size], hollow=True)
            drawn.append((entry, line_of_paper, look))
    matched = len(drawn)
    lines = [(entry, trajectory(entry)) for entry in shown]
    names: dict[str, dict[str, Any]] = {}
    for entry, line in lines:
        peers = sorted(
            {e.result.variant for e in shown if e.result.learner == entry.result.learner}
        )
        look = style.variant(colour_of(entry.result.learner), peers.index(entry.result.variant))
        names[entry.method] = look
        drawn.append((entry, line, look | dot(look["color"], markers[entry.size])))
    for i, (axes, title) in enumerate(zip(panels, _TITLES, strict=True)):
        values = [x for _, line, _ in drawn for x in line.x[i]]
        # Shift the points sideways by learner: several learners have the same number of experts.
        shift = 0.012 * (max(values) - min(values)) if i == 2 else 0
        for entry, line, look in drawn:
            x = [value + shift * (entry.result.rank - 2) for value in line.x[i]]
            axes.errorbar(
                x, line.y, line.deviation, linestyle="none", ecolor=look["color"], elinewidth=0.8
            )
            axes.plot(x, line.y, **look)
        number_axis(axes, "x", values, log_from=4)
        number_axis(axes, "y", [y for _, line, _ in drawn for y in line.y], log_from=8)
        axes.set_xlabel(title)
    panels[2].set_xscale("linear")
    panels[2].xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 10], integer=True))
    panels[0].set_ylabel(y_label)
    panels[0].margins(x=0.2)  # room for the red numbers
    counts = sorted({entry.experts(entry.result.times[-1]) or 0 for entry in shown})
    for entry, line in lines:
        count = entry.experts(entry.result.times[-1])
        if entry.method == "SM" and count:  # in a column of its own, so that numbers do not overlap
            start = (line.x[0][0], line.y[0])
            at = (-4 - 8 * counts.index(count), 0)
            text: Any = {
                "textcoords": "offset points",
                "ha": "right",
                "va": "center",
                "fontsize": 7,
            }
            panels[0].annotate(str(count), start, at, color=_RED, annotation_clip=False, **text)
    marks = [(name, mark(marker)) for name, marker in markers.items()]
    groups: dict[str, LegendEntries] = {"learner": list(names.items()), "size": marks}
    if matched:
        groups["paper"] = [("same setting and size", _OF_PAPER | dot("0.62", hollow=True))]
    if panels[0].texts:
        number = {"linestyle": "", "color": _RED, "marker": f"${panels[0].texts[-1].get_text()}$"}
        groups["red number"] = [("experts per Switch layer of SM", number)]
    style.add_legend(figure, groups)
    return figure, matched
