"""`alma advise --brief`: one screen for readers who train no models, and a picture."""

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
from alma.report.advice.candidates import Candidate
from alma.report.advice.comparison import Comparison
from alma.report.advice.forecast import interval
from alma.report.advice.law import Law
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport
from alma.report.advice.retraining_words import lines as retraining_lines
from alma.tables import number

_SURE = """\
Two numbers after a value are its 90% interval: nine of ten such intervals hold the true value."""
_PERPLEXITY = """\
The number of equally likely tokens that a model in effect chooses from; lower is better."""
_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body{{font:16px/1.5 sans-serif;max-width:44em;margin:2em auto;\
padding:0 1em}}
img{{max-width:100%}}</style><h1>{title}</h1>
"""
_LARGEST_DRAWN = 9.0  # nats; larger losses are left out of the picture


def _retrainings(report: Advice | MatrixReport) -> list[Retraining]:
    """The retraining advice in the report: one per group of losses, or of the choice, if any."""
    if isinstance(report, MatrixReport):
        return report.groups
    return [report.retraining] if report.retraining else []


def lines(report: Advice | MatrixReport) -> dict[str, str]:
    """Sentences by heading: what to do, what it gains and costs, how sure, what would change it."""
    how_often = {}
    for retraining in _retrainings(report):
        count = 3 if retraining.laws.event else 2
        text = " ".join(retraining_lines(retraining)[:count])
        how_often[f"How often to retrain {retraining.losses.label}"] = text
    if isinstance(report, MatrixReport):
        return how_often | {"How sure": _SURE}
    if not report.choice:
        return {"Recommendation": report.summary}
    return _lines_of_choice(report, report.choice, how_often)


def _lines_of_choice(
    report: Advice,
    choice: Candidate,
    how_often: dict[str, str],
) -> dict[str, str]:
    """The sentences of a report with a choice."""
    gains = []
    changes = []
    for comparison in report.comparisons:
        if comparison.evidence:
            gains.append(_gain(report, comparison))
        else:
            changes.append(_would_settle(comparison))
    changes += report.remarks
    name = choice.result.config.get("name", choice.result.learner)
    sides = ", ".join(choice.sides[comparison.question] for comparison in report.comparisons)
    title = f"{name}: {sides}" if sides else name
    value = choice.forecast.text(report.display.factor)
    expected = f"{report.measured}: {value}".replace("t=", "mega-batch ")
    costs = f"{number(choice.compute)} TFLOPs, {number(choice.hours)} hours of training"
    evident = f"{len(gains)} of {len(report.comparisons)} answers have evidence"
    return {
        "Recommendation": f"Use {title}. Expected {expected}.",
        **how_often,
        "What it gains": " ".join(gains) or "No difference is certain yet.",
        "What it costs": f"{costs} until mega-batch {choice.until}.",
        "How sure": f"{evident}. {_SURE}",
        "What would change it": " ".join(changes) or "Nothing that was measured.",
    }


def _gain(report: Advice, comparison: Comparison) -> str:
    """A sentence: how much the better side of a comparison gains over the worse one."""
    better = comparison.choice
    worse = comparison.other
    if comparison.difference < 0:
        better, worse = worse, better
    kind = " points of error" if report.display.factor > 1 else "% of perplexity"
    mean, *ends = (abs(value) for value in report.difference(comparison))
    question = comparison.question
    sides = f"{better.sides[question]} instead of {worse.sides[question]}"
    least, most = (number(end) for end in sorted(ends))
    return f"{sides.capitalize()}: {number(mean)}{kind} less ({least} to {most})."


def _would_settle(comparison: Comparison) -> str:
    """A sentence: how many seeds would give evidence, and whether the other side is cheaper."""
    question = comparison.question
    candidates = (comparison.choice, comparison.other)
    sides = " against ".join(candidate.sides[question] for candidate in candidates)
    seeds = "Too close to call"
    if comparison.seeds:
        seeds = f"{comparison.seeds} seeds a side would tell"
    share = 1.0
    if comparison.choice.compute:
        share = comparison.other.compute / comparison.choice.compute
    cheaper = f", which takes {share:.2g} of the compute" if share < 0.9 else ""
    return f"{question.capitalize()} {seeds}, {sides}{cheaper}."


def write_brief(report: Advice | MatrixReport, path: Path | None) -> str:
    """Write the brief to `path`, unless it is None, and return its text.

    A .md file has a picture beside it, a .html file inside.
    """
    sections = lines(report)
    if "perplexity" in " ".join(sections.values()):
        sections["Perplexity"] = _PERPLEXITY
    title = f"Advice: {report.title}" if isinstance(report, Advice) else "How often to retrain"
    paragraphs = [f"**{heading}.** {body}" for heading, body in sections.items()]
    text = "\n\n".join([f"# {title}", *paragraphs]) + "\n"
    if path is None:
        return text
    make_directory(path.parent)
    picture = _picture(report)
    if path.suffix == ".html":
        page = _html(title, sections, picture)
    else:
        with atomic_write(path.with_suffix(".svg"), "wb") as image:
            image.write(picture)
        page = _markdown(title, sections, path.with_suffix(".svg").name)
    with atomic_write(path) as file:
        file.write(page)
    return text


def _markdown(title: str, sections: dict[str, str], picture: str) -> str:
    """The brief in Markdown, with a link to the file `picture`; text from records is escaped."""
    parts = [f"# {markdown(title)}"]
    for heading, body in sections.items():
        parts.append(f"**{heading}.** {markdown(body)}")
    parts.append(f"![{markdown(title)}]({quote(picture)})\n")
    return "\n\n".join(parts)


def _html(title: str, sections: dict[str, str], picture: bytes) -> str:
    """The page with the picture inside."""
    parts = [_PAGE.format(title=escape(title))]
    for heading, body in sections.items():
        parts.append(f"<p><b>{escape(heading)}.</b> {escape(body)}</p>\n")
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
    parts.append(f'<img alt="{escape(title)}" src="{source}">\n')
    return "".join(parts)


def _picture(report: Advice | MatrixReport) -> bytes:
    """The picture as SVG: loss against age by the fitted laws.

    Without a law, the metric of the choice and its rivals over the stream.
    """
    with style.drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        retrainings = _retrainings(report)
        if retrainings:
            _draw_ages(axes, retrainings)
        elif isinstance(report, Advice):
            _draw_forecasts(axes, report)
        axes.legend(fontsize=9)
        image = io.BytesIO()
        metadata = style.METADATA["svg"]
        figure.savefig(image, format="svg", bbox_inches="tight", metadata=metadata)
        return image.getvalue()


def _draw_ages(axes: Any, retrainings: Sequence[Retraining]) -> None:
    """Extra loss by age with its interval: in percent of perplexity, or points of error."""
    first = retrainings[0]
    is_text = first.unit.startswith("nats")
    for retraining in retrainings:
        size = retraining.period.size
        ages = np.linspace(0, retraining.cadences[-1], 25)
        estimates = []
        for age in ages:
            extra = partial(Law.extra, ages=age * size, ahead=size)
            estimates.append(retraining.laws.estimate(extra))
        curves = np.transpose(estimates)
        if is_text:
            curves = 100 * np.expm1(np.minimum(curves, _LARGEST_DRAWN))
        mean, low, high = curves
        (line,) = axes.plot(ages, mean, label=retraining.losses.label)
        axes.fill_between(ages, low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel(f"age of the model ({first.period.plural})")
    axes.set_ylabel("worse than a new model (%), 90%" if is_text else "points of error worse")


def _draw_forecasts(axes: Any, report: Advice) -> None:
    """The metric so far and its forecast with an interval, of the choice and its rivals."""
    factor = report.display.factor
    shown = {}
    if report.choice:
        shown[report.choice.label] = report.choice
    for comparison in report.comparisons:
        shown[comparison.other.label] = comparison.other
    for candidate in shown.values():
        times = [t for t in candidate.values if t >= candidate.ends[0]]
        values = [factor * candidate.values[t] for t in times]
        (line,) = axes.plot(times, values, label=candidate.label)
        color = line.get_color()
        draws, _ = candidate.draws
        low, high = factor * interval(draws)
        median = factor * np.median(draws, 0)
        to_come = candidate.to_come
        axes.plot(to_come, median, linestyle="--", color=color, drawstyle="steps-post")
        axes.fill_between(to_come, low, high, step="post", alpha=0.15, color=color)
    axes.set_xlabel("mega-batch (dashed: forecast, 90%)")
    axes.set_ylabel(report.display.name)
    axes.set_ylim(0, None)
