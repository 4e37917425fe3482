"""Figure style: colours, panels, axes, labels at line ends, legends and files."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from alma.files import atomic_write

WAIT_RAMP = ("#E08A00", "#EE7B51", "#DC5E66", "#BC3A85", "#960FA3", "#6600A7", "#2C0594")
"""Colours of waiting times, from short to long, after matplotlib's plasma; see `wait_colours`."""
HEAT = "Blues"
"""matplotlib's colours of a heat map: dark is large."""
WRITTEN = 12
"""Most rows and columns of a heat map with its values in the cells."""
_INCHES_A_LETTER = 0.065  # of tick labels
LINE_STYLES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX"
GREY = "0.25"
"""Colour of notes, and of legend entries that stand for any colour."""
FAINT: Any = {"linestyle": ":", "linewidth": 1.0, "alpha": 0.8}
"""The look of the untrained part of a line."""
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
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "alma",
    "pdf.fonttype": 42,
}
_METADATA: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata that would change the bytes of a figure from run to run, by format."""

LegendEntries = list[tuple[str, dict[str, Any]]]
"""Labels, each with the properties of its Line2D."""


class Picture(NamedTuple):
    """A figure on disk and its caption."""

    path: Path
    caption: str


class End(NamedTuple):
    """A label for the point (x, y) of a line, usually its last."""

    x: float
    y: float
    text: str
    look: Mapping[str, Any]  # of the line; has its color


def drawing() -> AbstractContextManager[None]:
    """A context with matplotlib's settings for the project's figures."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def save(figure: Any, path: Path, formats: Iterable[str] = ("png", "svg", "pdf")) -> None:
    """Write a figure at `path`, a PNG, and beside it as SVG and PDF with selectable text."""
    figure.draw_without_rendering()
    thin_ticks(figure)
    figure.set_layout_engine("none")  # keep the layout: each file would compute it again
    for suffix in formats:
        place = path if suffix == "png" else path.with_suffix(f".{suffix}")
        look = {"dpi": 200, "bbox_inches": "tight", "metadata": _METADATA[suffix]}
        drawn = io.BytesIO()  # matplotlib hides the error of a full disk behind one of its own
        figure.savefig(drawn, format=suffix, **look)
        with atomic_write(place, "wb") as file:
            file.write(drawn.getbuffer())


def thin_ticks(figure: Any) -> None:
    """Drop tick labels of x axes that would touch another; powers of ten stay first. The figure is drawn."""
    from matplotlib.ticker import FixedLocator

    for axes in (axes for axes in figure.axes if axes.name == "rectilinear"):
        low, high = sorted(axes.get_xlim())
        ticks = [tick for tick in axes.xaxis.get_major_ticks() if tick.label1.get_visible()]
        shown = [tick for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
        drawn = {tick.get_loc(): tick.label1.get_window_extent() for tick in shown}
        kept: list[float] = []
        for at in sorted(drawn, key=lambda at: (at > 0 and not math.log10(at).is_integer(), at)):
            apart = (drawn[at].x0 > drawn[k].x1 + 4 or drawn[at].x1 < drawn[k].x0 - 4 for k in kept)
            if all(apart):
                kept.append(at)
        if len(kept) < len(drawn):
            axes.xaxis.set_major_locator(FixedLocator(sorted(kept)))


def wait_colours(waits: Iterable[int]) -> dict[int, str]:
    """A colour of WAIT_RAMP for each waiting time, spread over the ramp; distinct for up to seven."""
    known = sorted(set(waits))
    steps = max(1, len(known) - 1)
    return {wait: WAIT_RAMP[round(i * (len(WAIT_RAMP) - 1) / steps)] for i, wait in enumerate(known)}


def variant(colour: str, rank: int) -> dict[str, Any]:
    """Look of the line of a learner's variant 0, 1, ...: its colour, ever lighter, and a line style."""
    share = 0.15 * min(rank, 4)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    lighter = "#" + "".join(f"{round(part + share * (255 - part)):02X}" for part in parts)
    return {"color": lighter, "linestyle": LINE_STYLES[rank % len(LINE_STYLES)]}


def dot(colour: str, marker: str = "o", hollow: bool = False) -> dict[str, Any]:
    """Look of a point, white inside if `hollow`."""
    edge = {"markeredgecolor": colour if hollow else "white", "markeredgewidth": 0.9 if hollow else 0.4}
    return {"marker": marker, "markersize": 4.5, "markerfacecolor": "white" if hollow else colour, **edge}


def mark(marker: str = "o", hollow: bool = False) -> dict[str, Any]:
    """Look of a legend entry for points of any colour."""
    return {"linestyle": "", **dot(GREY, marker, hollow)}


def subplots(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of (width, height) `inches`, and its axes as an array (rows, columns), with grid lines.

    `options` go to matplotlib's Figure.subplots. Without pyplot, which would keep the figure in memory.
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
    figure, panels = subplots(rows, columns, (1.8 + width * columns, 0.5 + height * rows), **options)
    for axes in list(panels.flat)[len(names) :]:
        axes.remove()
    for axes in panels.flat[max(0, len(names) - columns) : len(names)]:  # the lowest panel of each column
        axes.tick_params(labelbottom=True)
    found = dict(zip(names, panels.flat, strict=False))
    for name, axes in found.items():
        axes.set_title(name)
    return figure, found


def name_axes(figure: Any, panels: Sequence[Any], x: str, y: str) -> None:
    """Label the axes of a single panel, or those that several panels share."""
    if len(panels) == 1:
        panels[0].set(xlabel=x, ylabel=y)
    else:
        figure.supxlabel(x, fontsize="medium")
        figure.supylabel(y, fontsize="medium")


def number_axis(
    axes: Any, name: str, values: Sequence[float], log_from: float = 10, dense_below: float = 1e3
) -> None:
    """Set scale and ticks of axis "x" or "y" for `values`, with numbers such as 2,000 or 1M.

    The scale is logarithmic if all values are positive and span more than a factor of `log_from`. Its ticks
    are at 1, 2, 5 times powers of ten, denser within a factor of 10, and at powers only from a factor of
    `dense_below`.
    """
    from matplotlib import ticker

    axis = getattr(axes, f"{name}axis")
    if min(values, default=0) > 0 and max(values) > log_from * min(values):
        axes.set(**{f"{name}scale": "log"})
        span = max(values) / min(values)
        short = (1, 1.5, 2, 3, 5, 7) if span > 4 else (1, 1.5, *range(2, 10))
        subs = short if span < 10 else (1, 2, 5) if span < dense_below else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif all(value == int(value) for value in values):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    large = max(values, default=0) >= 1e5
    axis.set_major_formatter(ticker.EngFormatter(sep="") if large else ticker.StrMethodFormatter("{x:,.6g}"))


def colour_scale(values: Sequence[float], logarithmic: bool = False) -> Any:
    """A scale of heat-map colours that spans the values."""
    from matplotlib import colors

    low, high = min(values, default=1), max(values, default=1)
    high = high if high > low else low + 0.1 * (low or 1)
    return colors.LogNorm(low, high) if logarithmic else colors.Normalize(low, high)


def heat_map(axes: Any, cells: Sequence[Sequence[float]], scale: Any) -> Any:
    """Draw a matrix, with row 1 at the top; NaN leaves a cell empty. Returns the image.

    Up to WRITTEN rows and columns, values are written in the cells.
    """
    from matplotlib import ticker

    rows, columns = len(cells), len(cells[0])
    box = (0.5, columns + 0.5, rows + 0.5, 0.5)
    image = axes.imshow(cells, norm=scale, cmap=HEAT, aspect="auto", extent=box, interpolation="nearest")
    axes.grid(visible=False)
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        every = ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])
        axis.set_major_locator(ticker.FixedLocator(range(1, count + 1)) if count <= WRITTEN else every)
    for i, row in enumerate(cells if max(rows, columns) <= WRITTEN else (), start=1):
        for j, value in enumerate(row, start=1):
            if value == value:  # not NaN
                text = f"{value:,.0f}" if value >= 99.95 else f"{value:.{1 if value >= 0.95 else 2}f}"
                colour = "white" if scale(value) > 0.55 else "black"
                axes.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)
    return image


def name_columns(figure: Any, panels: Sequence[Any], names: Sequence[Sequence[str]]) -> None:
    """Write names, those of each panel, in place of the numbers of heat maps' columns, if there are any.

    Panels with the same names share those below the lowest panel of each column.
    """
    if not any(names):
        return
    shared = len({tuple(each) for each in names}) == 1
    lowest = {axes.get_subplotspec().colspan.start: axes for axes in panels}.values()
    longest = max(len(name) for each in names for name in each)
    rows = 1 if shared else figure.axes[0].get_gridspec().nrows
    figure.set_figheight(figure.get_figheight() + rows * _INCHES_A_LETTER * longest)
    for axes, own in zip(panels, names, strict=True):
        axes.xaxis.set_major_formatter(lambda x, _, own=own: dict(enumerate(own, 1)).get(x, ""))
        axes.tick_params(axis="x", labelrotation=90, labelbottom=not shared or axes in lowest)


def frame_diagonal(axes: Any, size: int) -> None:
    """Frame the first `size` cells of the diagonal of a heat map."""
    from matplotlib.patches import Rectangle

    for i in range(1, size + 1):
        look: Any = {"fill": False, "edgecolor": "black", "linewidth": max(0.3, min(1.1, 12 / size))}
        look |= {"clip_on": False, "zorder": 3}
        axes.add_patch(Rectangle((i - 0.5, i - 0.5), 1, 1, **look))


def colour_bar(figure: Any, panels: Sequence[Any], image: Any, label: str) -> None:
    """Add the scale of the colours of an image to the right of all panels."""
    from matplotlib import colors

    bar = figure.colorbar(image, ax=list(panels), label=label, aspect=25, fraction=0.06)
    bar.outline.set_visible(False)
    low, high = image.norm.vmin, image.norm.vmax
    number_axis(bar.ax, "y", (low, high), 1 if isinstance(image.norm, colors.LogNorm) else math.inf)
    bar.ax.set_ylim(low, high)


def frame(axes: Any, values: Sequence[float]) -> None:
    """Limit the y axis, whose scale is set, to `values` and a small margin."""
    low, high = min(values), max(values)
    if axes.get_yscale() == "log":
        margin = max(high / low, 1.1) ** 0.06
        axes.set_ylim(low / margin, high * margin)
    else:
        margin = 0.06 * (high - low or abs(high) or 1)
        axes.set_ylim(low - margin, high + margin)


def label_ends(figure: Any, ends: Mapping[Any, Sequence[End]]) -> None:
    """Write labels to the right of their points, by axes, moved up or down until none overlaps another.

    If a panel is too low for its labels, the figure gets a legend instead. Call it last: it places the labels
    for the figure as it is.
    """
    line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 1, "relpos": (0, 0.5)}
    look = {"textcoords": "offset points", "va": "center", "fontsize": 7, "annotation_clip": False}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.2}
    notes = {
        axes: [
            axes.annotate(
                textwrap.fill(end.text, 30),
                (end.x, end.y),
                (9, 0),
                color=end.look["color"],
                arrowprops={**line, "color": end.look["color"]},
                **look,
            )
            for end in some
        ]
        for axes, some in ends.items()
    }
    figure.draw_without_rendering()  # sets the layout, hence all positions
    for axes, some in notes.items():
        boxes = [note.get_window_extent() for note in some]
        if sum(box.height for box in boxes) > axes.bbox.height:
            for note in (note for some in notes.values() for note in some):
                note.remove()
            add_legend(figure, {"": [(end.text, dict(end.look)) for some in ends.values() for end in some]})
            return
        move_apart(axes, some)


def move_apart(axes: Any, notes: Sequence[Any]) -> None:
    """Move annotations with offsets in points up or down until none overlaps another, within the axes.

    The figure has been drawn: its layout is set.
    """
    boxes = [note.get_window_extent() for note in notes]
    points = 72 / axes.figure.dpi
    for column in _columns([(box.x0, box.x1) for box in boxes]):
        middles = [(boxes[i].y0 + boxes[i].y1) / 2 for i in column]
        gap = max(boxes[i].height for i in column)
        for i, old, new in zip(column, middles, spread(middles, gap, *axes.bbox.intervaly), strict=True):
            x, y = notes[i].get_position()
            notes[i].set_position((x, y + (new - old) * points))


def _columns(spans: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Positions of the horizontal spans (left, right) in groups that overlap."""
    groups: list[list[int]] = []
    right = float("-inf")
    for i in sorted(range(len(spans)), key=lambda i: spans[i]):
        if spans[i][0] > right:
            groups.append([])
        groups[-1].append(i)
        right = max(right, spans[i][1])
    return groups


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `values`, at least `gap` apart, in the same order, within low..high if there is room.

    Values that are too close form a group, which is centred at their mean.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[list[float]] = []
    for i in order:
        groups.append([values[i]])
        while len(groups) > 1 and _edges(groups[-2], gap)[1] + gap > _edges(groups[-1], gap)[0]:
            upper = groups.pop()
            groups[-1] += upper
    placed = [_edges(group, gap)[0] + gap * k for group in groups for k in range(len(group))]
    last = len(placed) - 1
    placed = [min(place, high - gap * (last - k) - gap / 2) for k, place in enumerate(placed)]
    placed = [max(place, low + gap * k + gap / 2) for k, place in enumerate(placed)]
    return [place for _, place in sorted(zip(order, placed, strict=True))]


def _edges(group: Sequence[float], gap: float) -> tuple[float, float]:
    """Lowest and highest position of a group of `spread`."""
    middle, half = sum(group) / len(group), gap * (len(group) - 1) / 2
    return middle - half, middle + half


def add_legend(figure: Any, groups: Mapping[str, LegendEntries]) -> None:
    """Add a legend to the right of all panels, with a heading for each group of entries."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    headings = []
    for heading, entries in groups.items():
        headings.append(len(handles))
        handles.append(Line2D([], [], linestyle="", label=heading))
        handles += [Line2D([], [], **look, label=textwrap.fill(label, 24)) for label, look in entries]
    narrow: Any = {"handlelength": 1.4, "handletextpad": 0.5, "borderaxespad": 0.1, "borderpad": 0.1}
    legend = figure.legend(
        handles=handles, loc="outside right upper", frameon=False, fontsize="small", **narrow
    )
    for place in headings:
        legend.get_texts()[place].set(fontweight="bold", x=-14)
