"""Figure 5, the trade-offs of language models: average perplexity against compute, parameters and experts.

`python -m alma.report --figures lm` draws it, in grey the paper's numbers where settings and sizes agree.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.flops import ARCHS, Shape
from alma.report.figures import COLOURS, MARKERS, average_of, curve, legend, scale, sheet
from alma.report.lm.reference import Reference, reference
from alma.report.lm.tables import (
    NAMES,
    Entry,
    experts_at,
    match,
    members_at,
    multiplier,
    parameters,
    plain,
    sizes,
)
from alma.report.results import Result, compute, trained
from alma.report.vision.entries import place, wait
from alma.report.vision.figures import Entries, Picture

PAPER_TOKENS = 120_000 * 192 * 512
"""Of a member's stage in the paper: updates, sequences, length (section 5, appendix B.2)."""
PAPER_VOCABULARY = 50_264
"""50,000 BPE units "following Radford et al." (section 5): GPT-2's dictionary as fairseq pads it."""
_GREY, _RED = "0.62", "#CC0000"
_OURS: dict[str, Any] = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.4}
_THEIRS: dict[str, Any] = {"color": _GREY, "linewidth": 0.8, "markersize": 4, "markerfacecolor": "white"}
_FONTS: Any = {"font.size": 8, "axes.titlesize": 8.5, "legend.fontsize": 8, "lines.linewidth": 1.1}
_LEFT_OUT = "not in Figure 5 (one waiting time, usual updates, no replay, not from scratch)"
CAPTION = (
    "Figure 5: average perplexity over mega-batches 1..t against cumulative compute, parameters and experts "
    "(of all members). A line is a run with a point for each t; red numbers are the experts of SM."
)
_PAPER = (
    " Grey: the paper's Table 2 for the same settings and sizes. It has no table of compute: its runs are "
    "drawn at our count for the architectures, updates and batches of its section 5 and appendix B.2, so "
    "that equal work is at equal x. That is 45.7 GFLOPs an input of 512 tokens for base and 126.5 for "
    "large, where section 6.2 prints 42 and 126."
)


class Trajectory(NamedTuple):
    """Points by t: costs (compute, parameters, experts), average perplexity, and its standard deviation."""

    x: tuple[list[float], list[float], list[float]]
    y: list[float]
    deviation: list[float]


def draw(found: Mapping[str, Sequence[Entry]], out: Path, per_word: bool) -> tuple[list[Picture], list[str]]:
    """Figure 5 of the `lm_tables.entries` by B, as PNG files in `out`; and a line on what is left out."""
    import matplotlib

    paper = [] if per_word else reference()
    unit = "perplexity per word" if per_word else "perplexity"
    pictures, remarks = [], []
    with matplotlib.rc_context(_FONTS):
        for suffix, entries in found.items():
            shown = comparable(entries)
            left_out = [f"{entry.setting} of {entry.size}" for entry in entries if entry not in shown]
            if left_out:
                remarks.append(f"{_LEFT_OUT}: {', '.join(left_out)}")
            if not shown:
                continue
            figure, matched = trade_offs(shown, paper, f"average {unit}")
            path = out / f"figure5{suffix}.png"
            figure.savefig(path, dpi=200, bbox_inches="tight")
            pictures.append(Picture(path, CAPTION + (_PAPER if matched else "")))
            if paper:
                remarks.append(f"Figure 5: {matched} of {len(shown)} runs have a counterpart in the paper")
    return pictures, remarks


def comparable(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the paper's protocol and usual updates at the smallest waiting time: averages that start later
    do not compare."""
    usual = [
        e for e in entries if plain(e.result) and multiplier(e.result) == 1 and trained(e.result.repeats[0])
    ]
    least = min((wait(entry.result) for entry in usual), default=0)
    return [entry for entry in usual if wait(entry.result) == least]


def trajectory(result: Result) -> Trajectory:
    """The line of a result."""
    times = trained(result.repeats[0])
    line = curve(result, times, compute, average_of(result))
    counts = [(experts_at(result, t) or 1) * (members_at(result, t) or 1) for t in times]
    return Trajectory(
        (line.x, [parameters(result, t) for t in times], list(map(float, counts))), line.y, line.deviation
    )


def paper_trajectory(result: Result, paper: Sequence[Reference]) -> Trajectory | None:
    """The paper's line for the same setting and size, up to the first t that it lacks."""
    costs: list[tuple[float, float, float]] = []
    seen: list[float] = []
    averages = []
    for t in trained(result.repeats[0]):
        line = match(result, t, paper)
        if line is None or t not in line.perplexity:
            break
        count, _, members = line.experts.partition("@")
        seen.append(line.perplexity[t])
        stages = result.repeats[0][t]["stage"] + 1
        training = int(members) if line.learner == "ens" else 1  # gens trains its newest member only
        spent = paper_stage(line.size, int(count)) * stages * training
        costs.append((spent, line.parameters, float(count) * int(members or 1)))
        averages.append(sum(seen) / len(seen))
    if not seen:
        return None
    compute_, size, experts = map(list, zip(*costs, strict=True))
    return Trajectory((compute_, size, experts), averages, [0.0] * len(seen))


def paper_stage(size: str, experts: int) -> float:
    """TFLOPs of training a member of the paper's `base` or `large` model for a stage."""
    arch = ARCHS[f"switch_gmoe_{size}"]
    shape = Shape(arch.layers, arch.dim, 4 * arch.dim, PAPER_VOCABULARY, 512, experts, moe_freq=2)
    return shape.training_flops(PAPER_TOKENS) / 1e12


def trade_offs(shown: Sequence[Entry], paper: Sequence[Reference], y_label: str) -> tuple[Any, int]:
    """The figure, and the number of results drawn with the paper's line."""
    from matplotlib.ticker import MaxNLocator

    figure, (panels,) = sheet(1, 3, (10.6, 3.5), sharey=True)
    ours = [(entry, trajectory(entry.result)) for entry in shown]
    theirs = [(entry, found) for entry in shown if (found := paper_trajectory(entry.result, paper))]
    marks = dict(zip(sizes(shown), itertools.cycle(MARKERS), strict=False))
    both = [line for _, line in theirs + ours]
    titles = (
        "cumulative training compute (TFLOPs)",
        "parameters",
        "experts of all members (learners side by side)",
    )
    for i, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        values = [x for line in both for x in line.x[i]]
        apart = 0.022 * (max(values) - min(values)) if title == titles[2] else 0
        for entry, line in theirs:
            _draw(axes, entry, line, i, apart, {**_THEIRS, "marker": marks[entry.size]})
        for entry, line in ours:
            _draw(
                axes, entry, line, i, apart, {**_OURS, "color": _colour(entry), "marker": marks[entry.size]}
            )
        scale(axes, "x", values, log_from=4, dense_below=100)
        scale(axes, "y", [y for line in both for y in line.y], log_from=8)
        axes.set_xlabel(title)
    panels[2].set_xscale("linear")
    panels[2].xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 10], integer=True))
    panels[0].set_ylabel(y_label)
    _number(panels[0], ours)
    learners = {NAMES.get(e.learner, e.learner): {"color": _colour(e)} for e in shown}
    marked = [(name, {**_OURS, "color": "0.25", "linestyle": "", "marker": m}) for name, m in marks.items()]
    groups: dict[str, Entries] = {"learner": list(learners.items()), "size": marked}
    if theirs:
        groups["paper"] = [("same setting and size", {**_THEIRS, "marker": "o"})]
    legend(figure, groups)
    return figure, len(theirs)


def _draw(axes: Any, entry: Entry, line: Trajectory, i: int, apart: float, look: dict[str, Any]) -> None:
    """A line over cost i; learners are drawn `apart`, for several have the same number of experts."""
    x = [value + apart * (place(entry.result) - 2) for value in line.x[i]]
    axes.errorbar(x, line.y, line.deviation, linestyle="none", ecolor=look["color"], elinewidth=0.8)
    axes.plot(x, line.y, **look)


def _colour(entry: Entry) -> str:
    return COLOURS[place(entry.result) % len(COLOURS)]


def _number(axes: Any, ours: Sequence[tuple[Entry, Trajectory]]) -> None:
    """Red numbers of experts before the first points of SM, moved apart where points are close."""
    points = [
        (line.x[0][0], line.y[0], count)
        for entry, line in ours
        if entry.learner == "sm" and (count := experts_at(entry.result, entry.result.times[-1]))
    ]
    axes.margins(x=0.09)
    low, high = axes.get_ylim()
    least = 0.04 * (high - low)
    last = (0.0, low - least)
    for x, y, count in sorted(points):
        at = max(y, last[1] + least) if x < 1.5 * last[0] else y
        look = {"textcoords": "offset points", "ha": "right", "va": "center", "color": _RED, "fontsize": 7}
        axes.annotate(str(count), (x, at), (-5, 0), **look)
        last = x, at
