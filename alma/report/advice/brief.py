"""`alma advise --brief`: one screen for readers who train no models, Markdown or HTML, and a picture."""

import base64
import io
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from alma.escape import markdown
from alma.files import atomic_write, make_directory
from alma.report import style
from alma.report.advice.advice import Advice
from alma.report.advice.cadence import Retraining
from alma.report.advice.comparison import Comparison
from alma.report.advice.forecast import interval
from alma.report.advice.matrix import MatrixReport
from alma.report.advice.staleness import Law
from alma.report.tables import number

_SURE = "Two numbers after a value are its 90% interval: nine of ten such intervals hold the true value."
_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body{{font:16px/1.5 sans-serif;max-width:44em;margin:2em auto;padding:0 1em}}
img{{max-width:100%}}</style><h1>{title}</h1>
"""


def _retraining(report: Advice | MatrixReport) -> list[Retraining]:
    """What the report says about how often to retrain."""
    found = report.found if isinstance(report, MatrixReport) else [report.retraining]
    return [each for each in found if each]


def lines(report: Advice | MatrixReport) -> dict[str, str]:
    """Sentences by heading: what to do, what it gains and costs, how sure, what would change it."""
    often = {}
    for each in _retraining(report):
        said = each.lines[: 3 if each.laws.event else 2]
        often[f"How often to retrain {each.losses.label}"] = " ".join(said)
    if isinstance(report, MatrixReport):
        return often | {"How sure": _SURE}
    if not (choice := report.choice):
        return {"Recommendation": report.summary}
    known = [each for each in report.comparisons if each.evidence]
    settled = [_settle(each) for each in report.comparisons if not each.evidence]
    name = choice.result.config.get("name", choice.result.learner)
    sides = ", ".join(choice.sides[each.question] for each in report.comparisons)
    value = choice.forecast.text(report.display.factor)
    expected = f"{report.measured}: {value}".replace("t=", "mega-batch ")
    costs = f"{number(choice.compute)} TFLOPs, {number(choice.hours)} hours of training"
    return {
        "Recommendation": f"Use {name}{': ' * bool(sides)}{sides}. Expected {expected}.",
        **often,
        "What it gains": " ".join(_gain(report, each) for each in known) or "No difference is certain yet.",
        "What it costs": f"{costs} until mega-batch {choice.until}.",
        "How sure": f"{len(known)} of {len(report.comparisons)} answers have evidence. {_SURE}",
        "What would change it": " ".join([*settled, *report.remarks]) or "Nothing that was measured.",
    }


def _gain(report: Advice, each: Comparison) -> str:
    kind = " points of error" if report.display.factor > 1 else "% of perplexity"
    better, worse = (each.choice, each.other) if each.difference >= 0 else (each.other, each.choice)
    mean, *ends = (abs(value) for value in report.difference(each))
    sides = f"{better.sides[each.question]} instead of {worse.sides[each.question]}"
    least, most = map(number, sorted(ends))
    return f"{sides.capitalize()}: {number(mean)}{kind} less ({least} to {most})."


def _settle(each: Comparison) -> str:
    sides = " against ".join(one.sides[each.question] for one in (each.choice, each.other))
    seeds = f"{each.seeds} seeds a side would tell" if each.seeds else "Too close to call"
    share = each.other.compute / each.choice.compute if each.choice.compute else 1.0
    cheaper = f", which takes {share:.2g} of the compute" if share < 0.9 else ""
    return f"{each.question.capitalize()} {seeds}, {sides}{cheaper}."


def write_brief(report: Advice | MatrixReport, path: Path | None) -> str:
    """Write the brief to `path`, .md with a picture beside it or .html with it inside; returns its text."""
    found = lines(report)
    if "perplexity" in " ".join(found.values()):
        meaning = "The number of equally likely tokens that a model in effect chooses from; lower is better."
        found["Perplexity"] = meaning
    title = f"Advice: {report.title}" if isinstance(report, Advice) else "How often to retrain"
    text = "\n\n".join([f"# {title}", *(f"**{heading}.** {body}" for heading, body in found.items())]) + "\n"
    if path is None:
        return text
    make_directory(path.parent)
    picture = _picture(report)
    if path.suffix == ".html":
        body = "".join(f"<p><b>{escape(each)}.</b> {escape(line)}</p>\n" for each, line in found.items())
        source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
        page = f'{_PAGE.format(title=escape(title))}{body}<img alt="{escape(title)}" src="{source}">\n'
    else:
        with atomic_write(path.with_suffix(".svg"), "wb") as image:
            image.write(picture)
        parts = (f"**{heading}.** {markdown(body)}" for heading, body in found.items())
        page = "\n\n".join([f"# {markdown(title)}", *parts])
        page += f"\n\n![{markdown(title)}]({quote(path.with_suffix('.svg').name)})\n"
    with atomic_write(path) as file:
        file.write(page)
    return text


def _picture(report: Advice | MatrixReport) -> bytes:
    """Loss by age of what to retrain, by its law, or else the metric of the choice and its rivals, as SVG."""
    with style.drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        if often := _retraining(report):
            _draw_ages(axes, often)
        elif isinstance(report, Advice):
            _draw_forecasts(axes, report)
        axes.legend(fontsize=9)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata=style.METADATA["svg"])
        return drawn.getvalue()


def _draw_ages(axes: Any, often: Sequence[Retraining]) -> None:
    text = often[0].unit.startswith("nats")
    for each in often:
        ages, size = np.linspace(0, each.cadences[-1], 25), each.period.size
        laws = [each.laws.estimate(partial(Law.extra, ages=age * size, ahead=size)) for age in ages]
        mean, low, high = 100 * np.expm1(np.minimum(np.transpose(laws), 9.0)) if text else np.transpose(laws)
        (line,) = axes.plot(ages, mean, label=each.losses.label)
        axes.fill_between(ages, low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel(f"age of the model ({often[0].period.plural})")
    axes.set_ylabel("worse than a new model (%), 90%" if text else "points of error worse")


def _draw_forecasts(axes: Any, report: Advice) -> None:
    factor = report.display.factor
    rivals = [report.choice, *(each.other for each in report.comparisons)]
    for candidate in {each.label: each for each in rivals if each}.values():
        known = {t: factor * value for t, value in candidate.values.items() if t >= candidate.ends[0]}
        (line,) = axes.plot(list(known), list(known.values()), label=candidate.label)
        draws, _ = candidate.draws
        low, high = factor * interval(draws)
        ahead = {"color": line.get_color(), "drawstyle": "steps-post"}
        axes.plot(candidate.to_come, factor * np.median(draws, 0), linestyle="--", **ahead)
        axes.fill_between(candidate.to_come, low, high, step="post", alpha=0.15, color=line.get_color())
    axes.set(xlabel="mega-batch (dashed: forecast, 90%)", ylabel=report.display.name, ylim=(0, None))
