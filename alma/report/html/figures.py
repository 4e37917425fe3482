"""The interactive front of the report page, as Plotly reads it: JSON with data, layout and config."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import Any

from alma.learners import colour_of
from alma.report import compare
from alma.report.labels import replay
from alma.report.lm.entries import model_size
from alma.report.results import Measure, Result, compute, memory, non_dominated, rounded

Figure = dict[str, Any]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down")
# Named, as Plotly's own choice of buttons includes one that sends the data to its server.
_CONFIG: Figure = {"displaylogo": False, "responsive": True}
_CONFIG |= {"modeBarButtons": [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]]}
_HOVER = "%{meta[0]}<br>%{yaxis.title.text}: %{customdata}<br>%{xaxis.title.text}: %{x:,.4~g}<extra></extra>"


def front(results: Sequence[Result]) -> Figure:
    """A point per configuration; a menu chooses measure and cost.

    Colour by learner, symbol by waiting time, open with replay, size by the model's size. The first trace is
    a dashed line through the non-dominated finished configurations.
    """
    display = results[0].display
    measures: dict[str, tuple[Measure, int]] = {
        **{f"{name} {display.name}": (measure, display.factor) for name, measure in compare.AVERAGES.items()},
        **{name.format(total=display.total): (measure, 1) for name, measure in compare.TOTALS.items()},
        f"final {display.name}": (lambda rows: rows[max(rows)]["value"], display.factor),
    }
    costs: dict[str, Measure] = {
        "training compute, Comp (TFLOPs)": compute,
        "memory, Mem (parameters)": memory,
    }
    line = {"color": "#777", "dash": "dash", "width": 1.5, "shape": "hv"}
    traces: list[Figure] = [{"name": "no other is better in both", "hoverinfo": "skip", "line": line}]
    traces[0]["mode"] = "lines"
    waits = sorted({result.waiting_time for result in results})
    sizes = sorted(set(map(model_size, results)), key=lambda size: (len(size), size))
    for result in results:
        symbol = SYMBOLS[waits.index(result.waiting_time) % len(SYMBOLS)]
        marker = {
            "symbol": symbol + "-open" * (replay(result.config) != "no"),
            "color": colour_of(result.learner),
            "size": 8 + 3 * min(3, sizes.index(model_size(result))),
            "opacity": 1 if result.finished else 0.35,
        }
        named = {"name": plain(result.label), "meta": [_about(result)], "hovertemplate": _HOVER}
        traces.append(named | {"mode": "markers", "marker": marker})
    buttons: list[Figure] = []
    for (y_name, (measure, factor)), (x_name, cost) in itertools.product(measures.items(), costs.items()):
        points: list[Figure] = []
        for result in results:
            mean, deviation = result.over_seeds(lambda rows: factor * measure(rows))  # noqa: B023
            error = {"type": "data", "array": [rounded(deviation) or 0], "thickness": 1.2, "width": 0}
            point: Figure = {
                "x": [rounded(result.over_seeds(cost)[0])],
                "y": [rounded(mean)],
                "error_y": error,
            }
            points.append(point | {"customdata": [compare.spread(measure, result, scaled=factor != 1)]})
        means = [(point["x"][0], point["y"][0]) for point in points]
        known = [i for i, mean in enumerate(means) if None not in mean]
        if known:
            finished = [means[i] for i in known if results[i].finished]
            best = [finished[i] for i in non_dominated(finished)]
            joined: Figure = {"x": [x for x, _ in best], "y": [y for _, y in best]}
            joined |= {"error_y": {}, "customdata": []}
            updates = {key: [point[key] for point in (joined, *points)] for key in joined}
            axes: Figure = {}
            shown_values = zip(*(means[i] for i in known), strict=True)
            for axis, name, shown in zip(("xaxis", "yaxis"), (x_name, y_name), shown_values, strict=True):
                spans = min(shown) > 0 and max(shown) > 10 * min(shown)
                axes |= {f"{axis}.title": {"text": name}, f"{axis}.type": "log" if spans else "linear"}
                axes[f"{axis}.autorange"] = True
            buttons.append({"label": f"{y_name} / {x_name}", "method": "update", "args": [updates, axes]})
    grid: Figure = {"gridcolor": "#e6eaee", "linecolor": "#d5dce2", "zeroline": False}
    grid |= {"automargin": True, "exponentformat": "e"}
    layout: Figure = {"hovermode": "closest", "showlegend": True, "hoverlabel": {"align": "left"}}
    layout |= {"margin": {"l": 64, "r": 16, "t": 48, "b": 48}, "font": {"color": "#1b2229", "size": 13}}
    layout |= {"plot_bgcolor": "white", "xaxis": grid, "yaxis": grid}
    if buttons:  # the first choice is made
        updates, axes = buttons[0]["args"]
        for key, values in updates.items():
            for trace, value in zip(traces, values, strict=True):
                trace[key] = value
        for key, value in axes.items():
            name, attribute = key.split(".")
            layout[name] = layout[name] | {attribute: value}
        place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        layout["updatemenus"] = [place | {"buttons": buttons}]
    return {"data": traces, "layout": layout, "config": _CONFIG}


def _about(result: Result) -> str:
    """Hover text of a configuration."""
    size = model_size(result)
    about = f"learner {result.learner}, waiting time {result.waiting_time}" + f", size {size}" * bool(size)
    about += f", replay {replay(result.config)}"
    about += f", not finished (t = {result.progress} of {result.megabatches})" * (not result.finished)
    seeds = ", ".join(str(run.config["seed"]) for run in result.runs)
    return f"<b>{plain(result.label)}</b><br>{plain(about)}<br>seed{'s' * (', ' in seeds)} {plain(seeds)}"


def plain(text: str) -> str:
    """Text from records as Plotly shows it, which reads tags and templates in text."""
    return escape(text, quote=False).replace("%{", "%&#123;")
