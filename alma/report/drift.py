"""Figures of streams that drift: evaluation matrices, experts by held-out part, loss against age."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.learners import colour_of
from alma.report import age_table, figures, style
from alma.report.age_table import Aged
from alma.report.results import Result, matrix, mean_and_deviation
from alma.report.style import Picture

_MATRIX = (
    "Test {metric} after each mega-batch (rows) on the held-out part of each mega-batch (columns), averaged "
    "over seeds, in one colour scale. Frames mark the diagonal (in-distribution); the past is to its left "
    "(backward transfer), the future to its right (forward transfer).{waiting}"
)
_WAITING = " Rows in which a learner waits for its first stage are empty."
_EXPERTS = (
    "Share of the tokens of each held-out part that the router sends to each expert, by Switch layer, after "
    "the last mega-batch; first seed."
)
_STALENESS = (
    "Loss against age, in {unit}: mean over seeds, with a band of ±1 standard deviation. The age of a cell "
    "of the evaluation matrix is its mega-batch minus the newest one that the model was trained on. Left: "
    "loss beyond that of the model whose newest training data are of that mega-batch. Models of a higher age "
    "have trained less. Right: loss above the best model of these configurations on that mega-batch."
)
_MERGED = re.compile(
    r"^(\d{4})-\d{4}\.\.\d{4}-(\d{4})$"
)  # as data_prep.dates names merged periods of N years


def write_drift(results: Sequence[Result], out: Path) -> list[Picture]:
    """Write the figures of results of one table to `out`; [] if no run has such numbers."""
    first = results[0]
    results = sorted(results, key=lambda result: result.rank)
    shown = [(result, cells) for result in results if (cells := mean_matrix(result))]
    parts = [(result, *layer) for result in results for layer in experts_by_part(result).items()]
    pictures = []
    with style.drawing():
        if shown:
            waits = any(math.isnan(row[0]) for _, cells in shown for row in cells)
            caption = _MATRIX.format(metric=first.metric, waiting=_WAITING * waits)
            pictures.append(Picture(out / f"{first.stem}_matrix.png", caption))
            style.save(_matrices(shown), pictures[-1].path)
        if parts:
            pictures.append(Picture(out / f"{first.stem}_matrix_experts.png", _EXPERTS))
            style.save(_experts(parts), pictures[-1].path)
    return pictures


def write_staleness(found: Sequence[Aged], out: Path) -> list[Picture]:
    """Write the figure of losses against age of one table to `out`; [] without any."""
    if not found:
        return []
    first = found[0].result
    path = out / f"{first.stem}_staleness.png"
    with style.drawing():
        style.save(_staleness(found), path)
    return [Picture(path, _STALENESS.format(unit=age_table.unit(first)))]


def mean_matrix(result: Result) -> list[list[float]]:
    """The evaluation matrix: rows t = 1, 2, ..., columns the held-out parts; mean over seeds, as displayed.

    Rows of the untrained model are NaN where figures leave it out (see `results.DISPLAYS`). [] if a repeat
    has no matrix.
    """
    found = [matrix(rows) for rows in result.repeats]
    if not all(found):
        return []
    return [
        [
            math.nan if result.waiting(t) and not result.display.untrained else result.display.factor * mean
            for mean in (sum(cells) / len(cells) for cells in zip(*(each[t] for each in found), strict=True))
        ]
        for t in range(1, result.progress + 1)
    ]


def experts_by_part(result: Result) -> dict[str, list[list[float]]]:
    """By layer, rows of experts with their share (%) of each held-out part, after the last mega-batch.

    Of the first seed: experts of different seeds have nothing in common. {} if the row has no such shares.
    """
    parts = result.repeats[0][result.times[-1]]["extra"].get("matrix_experts") or [{}]
    found = {layer: zip(*(part[layer] for part in parts), strict=True) for layer in parts[0]}
    return {layer: [[100 * share for share in row] for row in rows] for layer, rows in found.items()}


def periods(result: Result) -> list[str]:
    """The periods of the held-out parts of a dated stream; else []. 2004-2005..2006-2007 is 2004-2007."""
    found = result.repeats[0][result.times[-1]]["extra"].get("matrix_periods", [])
    return [_MERGED.sub(r"\1-\2", period) for period in found]


def _matrices(shown: Sequence[tuple[Result, list[list[float]]]]) -> Any:
    """A panel per result."""
    display = shown[0][0].display
    values = [value for _, cells in shown for row in cells for value in row if math.isfinite(value)]
    scale = style.colour_scale(values, logarithmic=not display.untrained)
    drawn = [(result, result.label, cells) for result, cells in shown]
    figure, panels = _heat_maps(drawn, scale, "after mega-batch t", f"test {display.name}")
    for axes, (_, cells) in zip(panels, shown, strict=True):
        style.frame_diagonal(axes, len(cells))
    return figure


def _experts(shown: Sequence[tuple[Result, str, list[list[float]]]]) -> Any:
    """A panel per result and layer."""
    scale = style.colour_scale([0, *(value for _, _, cells in shown for row in cells for value in row)])
    drawn = [(result, f"{result.label}, layer {layer}", cells) for result, layer, cells in shown]
    return _heat_maps(drawn, scale, "expert", "share of tokens (%)")[0]


def _heat_maps(
    shown: Sequence[tuple[Result, str, list[list[float]]]], scale: Any, rows: str, bar: str
) -> tuple[Any, list[Any]]:
    """A figure with a heat map for each result, title and matrix, in panels of one shape; and the panels."""
    most = max(len(cells) for _, _, cells in shown)
    columns = max(len(cells[0]) for _, _, cells in shown)
    inches = min(3.6, max(1.9, 0.36 * columns)), min(3.2, max(1.0, 0.27 * most)) + 0.3
    figure, found = style.named_panels([str(i) for i in range(len(shown))], inches)
    panels = list(found.values())
    for axes, (result, title, cells) in zip(panels, shown, strict=True):
        image = style.heat_map(axes, cells, scale)
        axes.set_ylim(most + 0.5, 0.5)
        look = {"color": colour_of(result.learner), "fontweight": "bold"}
        axes.set_title(textwrap.fill(title, round(13 * inches[0])), **look)
    style.name_columns(figure, panels, [periods(result) for result, _, _ in shown])
    style.name_axes(figure, panels, "held-out part of mega-batch", rows)
    style.colour_bar(figure, panels, image, bar)
    return figure, panels


def _staleness(found: Sequence[Aged]) -> Any:
    """Extra loss (left) and regret (right) against age; of many results, a row per learner and replay."""
    found = sorted(found, key=lambda each: each.result.rank)
    unit = age_table.unit(found[0].result)
    members = figures.by_kind([each.result for each in found])
    inches = (8.6, 0.6 + 2.4 * len(members))
    figure, panels = style.subplots(len(members), 2, inches, sharex=True, sharey="col")
    legend: dict[str, style.LegendEntries] = {}
    for row, (name, results) in zip(panels, members.items(), strict=True):
        for axes, title in zip(row, found[0].curves, strict=True):
            axes.set_title(", ".join(filter(None, (name, title))), fontweight="bold")
        for result, look in zip(results, figures.looks(results), strict=True):
            each = next(each for each in found if each.result is result)
            look |= {"marker": "o", "markersize": 3, "markevery": None}
            for axes, by_age in zip(row, each.curves.values(), strict=True):
                _against_age(axes, result, by_age, look)
            legend.setdefault(name, []).append((figures.short_label(result, name), look))
    ages = [at for each in found for at in each.losses.by_age]
    for axes in panels.flat:
        axes.axhline(0, color="0.4", linewidth=0.8, zorder=1)
        axes.axvline(0, color="0.4", linewidth=0.8, zorder=1)
        style.number_axis(axes, "x", ages)
    figure.supxlabel("age (mega-batches)", fontsize="medium")
    figure.supylabel(unit, fontsize="medium")
    style.add_legend(figure, legend)
    return figure


def _against_age(
    axes: Any, result: Result, by_age: Mapping[float, Sequence[float]], look: Mapping[str, Any]
) -> None:
    """Draw the mean and standard deviation of values per seed against age."""
    points = [mean_and_deviation(values) for values in by_age.values()]
    means, deviations = [mean for mean, _ in points], [deviation for _, deviation in points]
    figures.draw_curve(axes, figures.Curve(result, list(by_age), means, deviations), **look)
