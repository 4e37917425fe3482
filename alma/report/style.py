"""Figure style: colours, panels, axes, legends and files."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from alma.files import atomic_write

WAIT_RAMP = ("#E08A00", "#EE7B51", "#DC5E66", "#BC3A85", "#960FA3", "#6600A7", "#2C0594")
"""Ramp of colours for waiting times, from short to long, after matplotlib's plasma."""
LINE_STYLES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX"
GREY = "0.25"  # colour of notes, and of legend entries that stand for any colour
SETTINGS: Any = {
    "font.size": 8,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the first is part of matplotlib
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "legend.fontsize": 8,
    "lines.linewidth": 1.1,
    "svg.fonttype": "none",  # write text as text, not as paths
    "svg.hashsalt": "alma",
    "pdf.fonttype": 42,
}
METADATA: dict[str, dict[str, None]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
"""Metadata to write into figures, by format: without dates, so that their bytes are repeatable."""

LegendEntries = list[tuple[str, dict[str, Any]]]  # labels, each with the properties of its Line2D


class Picture(NamedTuple):
    """A figure on disk and its caption."""

    path: Path
    caption: str


def drawing() -> AbstractContextManager[None]:
    """A context with matplotlib's settings for the project's figures."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def save(figure: Any, path: Path, formats: Iterable[str] = ("png", "svg", "pdf")) -> None:
    """Write a figure at `path`, a PNG, and beside it as SVG and PDF with selectable text."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # keep the layout; otherwise each file computes it again
    for suffix in formats:
        # Drawn in memory: matplotlib would hide the error of a full disk behind one of its own.
        drawn = io.BytesIO()
        figure.savefig(
            drawn, format=suffix, dpi=200, bbox_inches="tight", metadata=METADATA[suffix]
        )
        with atomic_write(
            path if suffix == "png" else path.with_suffix(f".{suffix}"), "wb"
        ) as file:
            file.write(drawn.getbuffer())


def wait_colours(waits: Iterable[int]) -> dict[int, str]:
    """A colour for each waiting time, evenly spread over WAIT_RAMP.

    The colours are distinct for up to seven waiting times.
    """
    ascending = sorted(set(waits))
    steps = max(1, len(ascending) - 1)
    return {
        wait: WAIT_RAMP[round(i * (len(WAIT_RAMP) - 1) / steps)] for i, wait in enumerate(ascending)
    }


def variant(colour: str, rank: int) -> dict[str, Any]:
    """Look of the line of a learner's variant number `rank` = 0, 1, ...

    Each further variant is lighter than the learner's `colour`, and has another line style.
    """
    share = 0.15 * min(rank, 4)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    lighter = "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)
    return {"color": lighter, "linestyle": LINE_STYLES[rank % len(LINE_STYLES)]}


def dot(colour: str, marker: str = "o", hollow: bool = False) -> dict[str, Any]:
    """Look of a point, white inside if `hollow`."""
    edge = {
        "markeredgecolor": colour if hollow else "white",
        "markeredgewidth": 0.9 if hollow else 0.4,
    }
    return {
        "marker": marker,
        "markersize": 4.5,
        "markerfacecolor": "white" if hollow else colour,
        **edge,
    }


def mark(marker: str = "o", hollow: bool = False) -> dict[str, Any]:
    """Look of a legend entry for points of any colour."""
    return {"linestyle": "", **dot(GREY, marker, hollow)}


def subplots(
    rows: int, columns: int, inches: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """A figure of (width, height) `inches` and its axes, an array (rows, columns), with grid lines.

    `options` go to matplotlib's Figure.subplots. pyplot is not used: it keeps figures in memory.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def named_panels(
    names: Sequence[str], inches: tuple[float, float] = (2.0, 2.0), **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A figure and its panels by name, at most three in a row; `inches` are the size of a panel."""
    rows = -(-len(names) // 3)
    columns = -(-len(names) // rows)
    width, height = inches
    figure, panels = subplots(
        rows, columns, (1.8 + width * columns, 0.5 + height * rows), **options
    )
    for axes in list(panels.flat)[len(names) :]:
        axes.remove()
    by_name = dict(zip(names, panels.flat, strict=False))
    for i, (name, axes) in enumerate(by_name.items()):
        axes.set_title(name)
        if i >= len(names) - columns:  # no panel is below this one in its column
            axes.tick_params(labelbottom=True)
    return figure, by_name


def name_axes(figure: Any, panels: Sequence[Any], x: str, y: str) -> None:
    """Label the axes of a single panel, or those that several panels share."""
    if len(panels) == 1:
        panels[0].set(xlabel=x, ylabel=y)
    else:
        figure.supxlabel(x, fontsize="medium")
        figure.supylabel(y, fontsize="medium")


def number_axis(axes: Any, name: str, values: Sequence[float], log_from: float = 10) -> None:
    """Set scale and ticks of axis "x" or "y" for `values`, with numbers such as 2,000 or 1M.

    The scale is logarithmic if all values are positive and span more than a factor of `log_from`.
    An x axis has fewer ticks, since its labels stand side by side.
    """
    from matplotlib import ticker

    axis = getattr(axes, f"{name}axis")
    low = min(values, default=0)
    high = max(values, default=0)
    if low > 0 and high > log_from * low:
        axes.set(**{f"{name}scale": "log"})
        if name == "x":
            axis.set_major_locator(_log_locator_of_x(low, high))
        else:
            axis.set_major_locator(_log_locator_of_y(low, high))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif all(value == int(value) for value in values):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    digits = ticker.EngFormatter(sep="") if high >= 1e5 else ticker.StrMethodFormatter("{x:,.6g}")
    axis.set_major_formatter(digits)


_LETTERS_OF_X = 26  # most characters of all tick labels of an x axis, which stand side by side
_TICKS_OF_Y = 9
_LOG_STEPS = ((1, 1.5, *range(2, 10)), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Sets of tick positions, as multiples of each power of ten, from many ticks to few."""


def _log_ticks(low: float, high: float, steps: Sequence[float]) -> list[float]:
    """Ticks from the power of ten below `low` to beyond the one above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps]


def _log_locator_of_x(low: float, high: float) -> Any:
    """A locator with the most ticks whose labels fit side by side.

    If not even the powers of ten fit, every second one has a tick.
    """
    from matplotlib import ticker

    for steps in _LOG_STEPS:
        ticks = _log_ticks(low, high, steps)
        labels = [f"{tick:,.6g} " for tick in ticks if low <= tick <= high]
        if sum(map(len, labels)) <= _LETTERS_OF_X:
            return ticker.LogLocator(subs=steps, numticks=7)
    from_the_largest = [tick for tick in ticks if tick <= high][::-2]
    return ticker.FixedLocator(from_the_largest)


def _log_locator_of_y(low: float, high: float) -> Any:
    """A locator with the most ticks, at most _TICKS_OF_Y if possible; else powers of ten."""
    from matplotlib import ticker

    for steps in _LOG_STEPS:
        ticks = [tick for tick in _log_ticks(low, high, steps) if low <= tick <= high]
        if len(ticks) <= _TICKS_OF_Y:
            break
    return ticker.LogLocator(subs=steps, numticks=15)


def add_legend(figure: Any, groups: Mapping[str, LegendEntries]) -> None:
    """Add a legend to the right of all panels, with a heading for each group of entries."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    headings = []
    for heading, entries in groups.items():
        if heading:
            headings.append(len(handles))
            handles.append(Line2D([], [], linestyle="", label=heading))
        handles += [
            Line2D([], [], **look, label=textwrap.fill(label, 24)) for label, look in entries
        ]
    narrow: Any = {
        "handlelength": 1.4,
        "handletextpad": 0.5,
        "borderaxespad": 0.1,
        "borderpad": 0.1,
    }
    legend = figure.legend(
        handles=handles, loc="outside right upper", frameon=False, fontsize="small", **narrow
    )
    for place in headings:
        legend.get_texts()[place].set(fontweight="bold", x=-14)
