"""The figures of the report page, as Plotly reads them: JSON with data, layout and config."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import Any

from alma.learners import colour_of
from alma.report import compare
from alma.report.figures import over_time
from alma.report.labels import replay
from alma.report.lm.entries import model_size
from alma.report.results import Measure, Result, compute, memory, non_dominated, rounded

Figure = dict[str, Any]
Choice = tuple[str, dict[str, Any], dict[str, Any]]
"""An entry of a figure's menu: name, new attributes of each trace, new attributes of the axes."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Named, as Plotly's own choice of buttons includes one that sends the data to its server.
_CONFIG: Figure = {"displaylogo": False, "responsive": True}
_CONFIG |= {"modeBarButtons": [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]]}
_HOVER = "%{meta[0]}<br>%{yaxis.title.text}: %{customdata}<br>%{xaxis.title.text}: %{x:,.4~g}<extra></extra>"


def front(results: Sequence[Result]) -> Figure:
    """A point per configuration; a menu chooses measure and cost.

    The first trace is a dashed line through the non-dominated finished configurations.
    """
    display = results[0].display
    measures: dict[str, tuple[Measure, int]] = {
        **{f"{name} {display.name}": (measure, display.factor) for name, measure in compare.AVERAGES.items()},
        **{name.format(total=display.total): (measure, 1) for name, measure in compare.TOTALS.items()},
        f"final {display.name}": (lambda rows: rows[max(rows)]["value"], display.factor),
    }
    costs = {"training compute, Comp (TFLOPs)": compute, "memory, Mem (parameters)": memory}
    line = {"color": "#777", "dash": "dash", "width": 1.5, "shape": "hv"}
    traces: list[Figure] = [{"name": "no other is better in both", "hoverinfo": "skip", "line": line}]
    traces[0]["mode"] = "lines"
    for result, look in zip(results, _looks(results), strict=True):
        marker = {"symbol": look["symbol"], "color": look["color"], "size": look["size"]}
        marker["opacity"] = 1 if result.finished else 0.35
        traces.append(_trace(result) | {"mode": "markers", "marker": marker})
    choices: list[Choice] = []
    for (y_name, (measure, factor)), (x_name, cost) in itertools.product(measures.items(), costs.items()):
        points = [_point(result, cost, measure, factor) for result in results]
        means = [(point["x"][0], point["y"][0]) for point in points]
        known = [i for i, mean in enumerate(means) if None not in mean]
        if known:
            finished = [means[i] for i in known if results[i].finished]
            best = [finished[i] for i in non_dominated(finished)]
            joined: Figure = {"x": [x for x, _ in best], "y": [y for _, y in best]}
            joined |= {"error_y": {}, "customdata": []}
            updates = {key: [point[key] for point in (joined, *points)] for key in joined}
            x, y = zip(*(means[i] for i in known), strict=True)
            choices.append((f"{y_name} / {x_name}", updates, _axes(x_name, y_name, x, y)))
    return _figure(traces, choices)


def _point(result: Result, cost: Measure, measure: Measure, factor: int) -> dict[str, Any]:
    """Mean over seeds with its deviation; `customdata` has y as text."""
    mean, deviation = result.over_seeds(lambda rows: factor * measure(rows))
    return {
        "x": [rounded(result.over_seeds(cost)[0])],
        "y": [rounded(mean)],
        "error_y": {"type": "data", "array": [rounded(deviation) or 0], "thickness": 1.2, "width": 0},
        "customdata": [compare.spread(measure, result, scaled=factor != 1)],
    }


def curves(results: Sequence[Result]) -> Figure:
    """The test metric of each configuration over the mega-batches; a value is held until the next stage.

    Untrained errors are dotted; untrained perplexity is left out.
    """
    traces: list[Figure] = []
    for result, look in zip(results, _looks(results), strict=True):
        curve = over_time(result)
        points = list(zip(curve.x, curve.y, curve.deviation, strict=True))
        steps = [
            p for i, p in enumerate(points) if not i or p[1:] != points[i - 1][1:] or i == len(points) - 1
        ]
        waiting = [p for p in steps if result.waiting(int(p[0]))]
        trained = steps[len(waiting) :]
        if trained:
            traces.append(_line(result, trained, look, {"width": look["width"], "dash": look["dash"]}))
        if waiting:
            faint = _line(result, [*waiting, *trained[:1]], look, {"width": 1.2, "dash": "dot"})
            traces.append(faint | {"opacity": 0.4, "showlegend": not trained})
    values = [y for trace in traces for y in trace["y"] if y is not None]
    name = f"test {results[0].display.name}"
    axes = _axes("mega-batch t", name, [0, results[0].megabatches], values)
    return _figure(traces, [(name, {}, axes)])


def _line(
    result: Result, points: Sequence[tuple[float, float, float]], look: dict[str, Any], line: Figure
) -> Figure:
    """A line through points (t, mean, deviation)."""
    texts = [
        compare.number(y) + f" ±{compare.number(deviation)}" * (deviation > 0) for _, y, deviation in points
    ]
    return _trace(result) | {
        "x": [t for t, *_ in points],
        "y": [rounded(y) for _, y, _ in points],
        "customdata": texts,
        "mode": "lines" if len(points) > 30 else "lines+markers",
        "line": {"shape": "hv", "color": look["color"], **line},
        "marker": {"symbol": look["symbol"], "size": 6},
        "legendgroup": result.label,
    }


def _looks(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Colour by learner, symbol and dash by waiting time, open with replay, size by the model's size."""
    waits = sorted({result.waiting_time for result in results})
    sizes = sorted(set(map(model_size, results)), key=lambda size: (len(size), size))
    looks = []
    for result in results:
        wait, size = waits.index(result.waiting_time), min(3, sizes.index(model_size(result)))
        symbol = SYMBOLS[wait % len(SYMBOLS)] + "-open" * (replay(result.config) != "no")
        look = {"color": colour_of(result.learner), "symbol": symbol, "dash": DASHES[wait % len(DASHES)]}
        looks.append(look | {"size": 8 + 3 * size, "width": 1.6 + 0.6 * size})
    return looks


def _trace(result: Result) -> Figure:
    """Name and hover text of a configuration."""
    size, name = model_size(result), plain(result.label)
    about = f"learner {result.learner}, waiting time {result.waiting_time}" + f", size {size}" * bool(size)
    about += f", replay {replay(result.config)}"
    about += f", not finished (t = {result.progress} of {result.megabatches})" * (not result.finished)
    seeds = ", ".join(str(run.config["seed"]) for run in result.runs)
    meta = f"<b>{name}</b><br>{plain(about)}<br>seed{'s' * (', ' in seeds)} {plain(seeds)}"
    return {"name": name, "meta": [meta], "hovertemplate": _HOVER}


def plain(text: str) -> str:
    """Text from records as Plotly shows it, which reads tags and templates in text."""
    return escape(text, quote=False).replace("%{", "%&#123;")


def _axes(x_name: str, y_name: str, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """New attributes of the layout: names and scales of the axes, logarithmic from a factor of 10."""
    axes: dict[str, Any] = {}
    for axis, name, values in (("xaxis", x_name, x), ("yaxis", y_name, y)):
        spans = min(values, default=0) > 0 and max(values) > 10 * min(values)
        axes |= {f"{axis}.title": {"text": name}, f"{axis}.type": "log" if spans else "linear"}
        axes[f"{axis}.autorange"] = True
    return axes


def _figure(traces: list[Figure], choices: Sequence[Choice]) -> Figure:
    """The traces with a menu; the first choice is made."""
    axis: Figure = {"gridcolor": "#e6eaee", "linecolor": "#d5dce2", "zeroline": False}
    axis |= {"automargin": True, "exponentformat": "e"}
    layout: Figure = {"hovermode": "closest", "showlegend": True, "hoverlabel": {"align": "left"}}
    layout |= {"margin": {"l": 64, "r": 16, "t": 48, "b": 48}, "font": {"color": "#1b2229", "size": 13}}
    layout |= {"plot_bgcolor": "white", "xaxis": axis, "yaxis": axis}
    if choices:
        _, updates, axes = choices[0]
        for key, values in updates.items():
            for trace, value in zip(traces, values, strict=True):
                trace[key] = value
        for key, value in axes.items():
            name, attribute = key.split(".")
            layout[name] = layout[name] | {attribute: value}
    if len(choices) > 1:
        buttons = [{"label": name, "method": "update", "args": new} for name, *new in choices]
        place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        layout["updatemenus"] = [place | {"buttons": buttons}]
    return {"data": traces, "layout": layout, "config": _CONFIG}
