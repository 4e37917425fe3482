"""Figure style: colours, markers, panels, axes, labels and files."""

import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito

LEARNER_COLOURS = {
    "sm": "#0072B2",
    "ens": "#D55E00",
    "umix": "#009E73",
    "gens": "#CC79A7",
    "gmoe": "#D29200",
    "moe": "#3FA0DA",
    "ff": "#8A5A33",
}
"""Colour of each learner, the same in every figure and page; readable on white and on dark backgrounds.

Hues after Okabe and Ito. Colours that a colour-blind reader confuses by hue differ in lightness.
"""
EXTENSION_COLOURS = ("#7557C4", "#6B8E00", "#B03A5B", "#5F7A87")
"""Colours of learners that are not in LEARNER_COLOURS; see `learner_colour`."""
WAIT_RAMP = ("#F0A02C", "#EE7B51", "#DC5E66", "#BC3A85", "#960FA3", "#6600A7", "#2C0594")
"""Colours of waiting times, from short to long, after matplotlib's plasma; see `wait_colours`."""
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
PRINT: Any = {"font.size": 8, "axes.titlesize": 8.5, "legend.fontsize": 8, "lines.linewidth": 1.1}
"""matplotlib's settings for the paper's figures."""

LegendEntries = list[tuple[str, dict[str, Any]]]
"""Labels, each with the properties of its Line2D."""


class Picture(NamedTuple):
    """A figure on disk and its caption."""

    path: Path
    caption: str


def learner_colour(learner: str) -> str:
    """The colour of a learner; that of an extension depends on its name alone."""
    unknown = EXTENSION_COLOURS[zlib.crc32(learner.encode()) % len(EXTENSION_COLOURS)]
    return LEARNER_COLOURS.get(learner, unknown)


def wait_colours(waits: Iterable[int]) -> dict[int, str]:
    """A colour of WAIT_RAMP for each waiting time, spread over the ramp; distinct for up to seven."""
    known = sorted(set(waits))
    steps = max(1, len(known) - 1)
    return {wait: WAIT_RAMP[round(i * (len(WAIT_RAMP) - 1) / steps)] for i, wait in enumerate(known)}


def subplots(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of (width, height) `inches`, and its axes as an array (rows, columns), with grid lines.

    `options` go to matplotlib's Figure.subplots. Without pyplot, which would keep the figure in memory.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    return figure, panels


def named_panels(
    names: Sequence[str], inches: tuple[float, float] = (2.0, 2.0), **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A figure and its panels by name, at most three per row; `inches` are the size of a panel."""
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    width, height = inches
    figure, panels = subplots(rows, columns, (1.8 + width * columns, 0.5 + height * rows), **options)
    for axes in list(panels.flat)[len(names) :]:
        axes.remove()
    for axes in panels.flat[max(0, len(names) - columns) : len(names)]:  # the lowest panel of each column
        axes.tick_params(labelbottom=True)
    found = dict(zip(names, panels.flat, strict=False))
    for name, axes in found.items():
        axes.set_title(name)
    return figure, found


def number_axis(
    axes: Any, name: str, values: Sequence[float], log_from: float = 10, dense_below: float = 1e3
) -> None:
    """Set scale and ticks of axis "x" or "y" for `values`, with numbers such as 2,000 or 1M.

    The scale is logarithmic if all values are positive and span more than a factor of `log_from`. Its ticks
    are at 1, 2, 5 times powers of ten, or at powers only if the values span a factor of `dense_below`.
    """
    from matplotlib import ticker

    axis = getattr(axes, f"{name}axis")
    if min(values, default=0) > 0 and max(values) > log_from * min(values):
        axes.set(**{f"{name}scale": "log"})
        few_decades = max(values) < dense_below * min(values)
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif all(value == int(value) for value in values):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    large = max(values, default=0) >= 1e5
    axis.set_major_formatter(ticker.EngFormatter(sep="") if large else ticker.StrMethodFormatter("{x:,.6g}"))


def add_legend(figure: Any, groups: Mapping[str, LegendEntries]) -> None:
    """Add a legend to the right of all panels, with a heading for each group of entries."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    headings = []
    for heading, entries in groups.items():
        headings.append(len(handles))
        handles.append(Line2D([], [], linestyle="", label=heading))
        handles += [Line2D([], [], **look, label=textwrap.fill(label, 34)) for label, look in entries]
    legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize="small")
    for place in headings:
        legend.get_texts()[place].set(fontweight="bold", x=-30)
