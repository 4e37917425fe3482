"""Figures of streams that drift: evaluation matrices, loss against age."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from alma.learners import colour_of
from alma.report import age_table, style
from alma.report.age_table import Aged
from alma.report.figures import Curve, by_kind, draw_curve, looks
from alma.report.periods import dated_names
from alma.report.results import Result, matrix, mean_and_deviation

_MATRIX = (
    "Test {metric} after each mega-batch (rows) on the held-out part of each mega-batch "
    "(columns), averaged over seeds, in one colour scale. Frames mark the diagonal "
    "(in-distribution); the past is to its left (backward transfer), the future to its right "
    "(forward transfer).{waiting}"
)
_WAITING = " Rows in which a learner waits for its first stage are empty."
_STALENESS = (
    "Loss against age, in {unit}: mean over seeds, with a band of ±1 standard deviation. The age "
    "of a cell of the evaluation matrix is its mega-batch minus the newest one that the model "
    "was trained on. Left: loss beyond that of the model whose newest training data are of that "
    "mega-batch. Models of a higher age have trained less. Right: loss above the best model of "
    "these configurations on that mega-batch."
)
_HOLES = " Empty cells: the model was not tested there."
WRITTEN = 12  # heat maps with at most so many rows and columns show the values in the cells


def figures(results: Sequence[Result]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, figure, caption) of the figures of drift for the results of one table.

    Heat maps of evaluation matrices, then loss against age; a figure without any numbers is left
    out. Draw and save the figures in the context `style.drawing`.
    """
    shown = []
    for result in sorted(results, key=lambda result: result.rank):
        cells = mean_matrix(result)
        if cells:
            shown.append((result, cells))
    if shown:
        waiting = ""
        for _, cells in shown:
            if any(all(map(math.isnan, row)) for row in cells):
                waiting = _WAITING
        if any(_has_hole(cells) for _, cells in shown):
            waiting += _HOLES
        yield "matrix", _heat_maps(shown), _MATRIX.format(metric=results[0].metric, waiting=waiting)
    aged = age_table.aged(results)
    if aged:
        yield "staleness", _staleness(aged), _STALENESS.format(unit=age_table.unit(aged[0].result))


def _has_hole(cells: list[list[float]]) -> bool:
    """Whether a row has a number and a cell without one."""
    missing = [sum(map(math.isnan, row)) for row in cells]
    return any(0 < count < len(row) for count, row in zip(missing, cells, strict=True))


def mean_matrix(result: Result) -> list[list[float]]:
    """The evaluation matrix to draw: rows t = 1, 2, ..., columns are the held-out parts.

    Cells are means over seeds in the unit of reports (errors in percent). Rows in which no stage is
    complete yet are NaN if figures leave out the untrained model (see `displays.DISPLAYS`). [] if a
    repeat has no matrix.
    """
    matrices = [matrix(rows) for rows in result.repeats]
    if not all(matrices):
        return []
    rows = []
    for t in range(1, result.progress + 1):
        if result.waiting(t) and not result.display.untrained:
            rows.append([math.nan for _ in matrices[0][t]])
        else:
            of_seeds = (of_seed[t] for of_seed in matrices)
            parts = itertools.zip_longest(*of_seeds, fillvalue=math.nan)
            rows.append([result.display.factor * (sum(cells) / len(cells)) for cells in parts])
    most = max(map(len, rows))  # earlier rows are shorter if the stream has grown
    return [row + [math.nan] * (most - len(row)) for row in rows]


def _heat_maps(shown: Sequence[tuple[Result, list[list[float]]]]) -> Any:
    """A figure with a heat map for each pair of a result and its matrix, in panels of equal shape.

    Row t = 1 is at the top; NaN leaves a cell empty. Small matrices (WRITTEN) show their values. On
    a dated stream the x axis shows the periods: below the lowest panel of each column if all panels
    have the same periods, else below every panel.
    """
    from matplotlib import colors, patches, ticker

    display = shown[0][0].display
    values = [value for _, cells in shown for row in cells for value in row if math.isfinite(value)]
    low = min(values, default=1)
    high = max(values, default=1)
    if high <= low:
        high = low + 0.1 * (low or 1)
    logarithmic = not display.untrained
    scale = colors.LogNorm(low, high) if logarithmic else colors.Normalize(low, high)
    most = max(len(cells) for _, cells in shown)
    columns = max(len(cells[0]) for _, cells in shown)
    inches = min(3.6, max(1.9, 0.36 * columns)), min(3.2, max(1.0, 0.27 * most)) + 0.3
    figure, by_name = style.named_panels([str(i) for i in range(len(shown))], inches)
    panels = list(by_name.values())
    for axes, (result, cells) in zip(panels, shown, strict=True):
        box = (0.5, len(cells[0]) + 0.5, len(cells) + 0.5, 0.5)
        look = {"cmap": "Blues", "aspect": "auto", "interpolation": "nearest"}
        image = axes.imshow(cells, norm=scale, extent=box, **look)
        axes.grid(visible=False)
        for axis, count in ((axes.xaxis, len(cells[0])), (axes.yaxis, len(cells))):
            every = ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])
            axis.set_major_locator(
                ticker.FixedLocator(range(1, count + 1)) if count <= WRITTEN else every
            )
        frame: Any = {"fill": False, "edgecolor": "black", "clip_on": False, "zorder": 3}
        frame["linewidth"] = max(0.3, min(1.1, 12 / len(cells)))
        for i, row in enumerate(cells, start=1):
            axes.add_patch(patches.Rectangle((i - 0.5, i - 0.5), 1, 1, **frame))
            for j, value in enumerate(row if columns <= WRITTEN else (), start=1):
                if math.isfinite(value):
                    colour = "white" if scale(value) > 0.55 else "black"
                    text = _three_digits(value)
                    axes.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)
        axes.set_ylim(most + 0.5, 0.5)
        title = textwrap.fill(result.label, round(13 * inches[0]))
        axes.set_title(title, color=colour_of(result.learner), fontweight="bold")
    # Of each panel: names of the periods of the held-out parts; empty if the stream is not dated.
    names = [dated_names(result) for result, _ in shown]
    if any(names):
        lowest = {axes.get_subplotspec().colspan.start: axes for axes in panels}.values()
        shared = len(set(map(tuple, names))) == 1
        lines = 1 if shared else panels[0].get_gridspec().nrows
        longest = max(len(name) for of_panel in names for name in of_panel)
        figure.set_figheight(figure.get_figheight() + lines * 0.065 * longest)  # inches a letter
        for axes, periods in zip(panels, names, strict=True):
            period_of = dict(enumerate(periods, start=1))
            axes.xaxis.set_major_formatter(lambda t, _, period_of=period_of: period_of.get(t, ""))
            axes.tick_params(axis="x", labelrotation=90, labelbottom=not shared or axes in lowest)
    style.name_axes(figure, panels, "held-out part of mega-batch", "after mega-batch t")
    legend = figure.colorbar(
        image, ax=panels, label=f"test {display.name}", aspect=25, fraction=0.06
    )
    legend.outline.set_visible(False)
    style.number_axis(legend.ax, "y", (low, high), 1 if logarithmic else math.inf)
    legend.ax.set_ylim(low, high)
    return figure


def _three_digits(value: float) -> str:
    """A value as a cell of a heat map shows it, such as 0.95, 12.3 and 1,234."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 0.95:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _staleness(aged: Sequence[Aged]) -> Any:
    """A figure of extra loss (left) and regret (right) against age, with a line per result.

    More than six results are divided into rows of panels, one per learner and replay (`by_kind`).
    """
    by_result = {id(row.result): row for row in aged}
    members = by_kind([row.result for row in aged])
    inches = (8.6, 0.6 + 2.4 * len(members))
    figure, panels = style.subplots(len(members), 2, inches, sharex=True, sharey="col")
    legend: dict[str, style.LegendEntries] = {}
    for pair, (name, results) in zip(panels, members.items(), strict=True):
        for result, look in zip(results, looks(results), strict=True):
            look |= {"marker": "o", "markersize": 3, "markevery": None}
            for axes, (title, by_age) in zip(
                pair, by_result[id(result)].curves.items(), strict=True
            ):
                axes.set_title(", ".join(filter(None, (name, title))), fontweight="bold")
                spreads = list(map(mean_and_deviation, by_age.values()))
                means = [mean for mean, _ in spreads]
                deviations = [deviation for _, deviation in spreads]
                draw_curve(axes, Curve(result, list(by_age), means, deviations), **look)
            legend.setdefault(name, []).append((result.label, look))
    ages = [at for row in aged for at in row.losses.by_age]
    for axes in panels.flat:
        axes.axhline(0, color="0.4", linewidth=0.8, zorder=1)
        axes.axvline(0, color="0.4", linewidth=0.8, zorder=1)
        style.number_axis(axes, "x", ages)
    style.name_axes(figure, panels.flat, "age (mega-batches)", age_table.unit(aged[0].result))
    style.add_legend(figure, legend)
    return figure
