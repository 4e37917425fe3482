"""`alma advise --brief`: one screen for readers who know no nats, as Markdown or HTML, with one picture."""

import base64
import io
from html import escape
from pathlib import Path

import numpy as np

from alma.files import atomic_write, make_directory
from alma.report import age, style
from alma.report.advice.advice import Advice
from alma.report.advice.cadence import Retraining
from alma.report.advice.comparison import Comparison
from alma.report.advice.forecast import interval
from alma.report.advice.matrix import MatrixReport
from alma.report.advice.text import number

_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body{{font:16px/1.5 sans-serif;max-width:44em;margin:2em auto;padding:0 1em}}
img{{max-width:100%}}</style><h1>{title}</h1>
"""


def lines(report: Advice | MatrixReport) -> list[tuple[str, str]]:
    """Headings with their sentences: what to do, what it gains and costs, how sure, what would change it."""
    if isinstance(report, MatrixReport):
        return [
            (each.losses.label, " ".join(each.lines)) for each in report.found if isinstance(each, Retraining)
        ]
    if not report.choice:
        return [("Recommendation", " ".join(report.remarks))]
    choice = report.choice
    known = [each for each in report.comparisons if each.evidence]
    open_ = [each for each in report.comparisons if not each.evidence]
    found = [
        ("Recommendation", f"Use {choice.label}. {report.summary}"),
        ("What it gains", " ".join(_gain(report, each) for each in known) or "No difference is certain yet."),
        (
            "What it costs",
            f"{number(choice.compute)} TFLOPs, {number(choice.hours)} hours of training over {report.span}.",
        ),
        (
            "How sure",
            f"{len(known)} of {len(report.comparisons)} answers have evidence, at 90%.",
        ),
    ]
    if report.retraining:
        found.insert(1, ("How often to retrain", " ".join(report.retraining.lines[:2])))
    settled = [f"{each.question.capitalize()} {_settle(each)}" for each in open_]
    return [
        *found,
        ("What would change it", " ".join([*settled, *report.remarks]) or "Nothing that was measured."),
    ]


def _gain(report: Advice, each: Comparison) -> str:
    kind = "points of error" if report.display.factor > 1 else "% of perplexity"
    better, worse = (each.choice, each.other) if each.difference >= 0 else (each.other, each.choice)
    mean, low, high = (abs(value) for value in report.difference(each))
    sides = f"{better.sides[each.question]} instead of {worse.sides[each.question]}"
    least, most = sorted((low, high))
    return f"{sides.capitalize()}: {number(mean)} {kind} fewer ({number(least)} to {number(most)})."


def _settle(each: Comparison) -> str:
    if each.seeds is None:
        return f"Too close to call against {each.other.label}."
    return f"{each.seeds} seeds a side would settle it against {each.other.label}."


def write_brief(report: Advice | MatrixReport, path: Path | None) -> str:
    """Write the brief to `path`, .md with a picture beside it or .html with it inside; returns its text."""
    found = lines(report)
    title = f"Advice: {report.title}" if isinstance(report, Advice) else "How often to retrain"
    text = "\n\n".join([f"# {title}", *(f"**{heading}.** {body}" for heading, body in found)]) + "\n"
    if path is None:
        return text
    make_directory(path.parent)
    picture = _picture(report)
    if path.suffix == ".html":
        body = "".join(f"<p><b>{escape(heading)}.</b> {escape(line)}</p>\n" for heading, line in found)
        source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
        page = f'{_PAGE.format(title=escape(title))}{body}<img alt="" src="{source}">\n'
    else:
        with atomic_write(path.with_suffix(".svg"), "wb") as image:
            image.write(picture)
        page = f"{text}\n![{title}]({path.with_suffix('.svg').name})\n"
    with atomic_write(path) as file:
        file.write(page)
    return text


def _picture(report: Advice | MatrixReport) -> bytes:
    """Loss by age of what to retrain, or the metric of the choice and its rivals, with forecasts, as SVG."""
    with style.drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        if isinstance(report, Advice):
            often = [report.retraining] if report.retraining else []
        else:
            often = [each for each in report.found if isinstance(each, Retraining)]
        for each in often:
            curve = {a: np.mean(v) for a, v in age.staleness_curve(each.losses).items() if a >= 0}
            values = [100 * np.expm1(v) if each.unit.startswith("nats") else v for v in curve.values()]
            axes.plot([a / each.period.size for a in curve], values, marker="o", label=each.losses.label)
            axes.set_xlabel(f"{each.period.noun}s since training")
            axes.set_ylabel(
                "worse than a new model (%)" if each.unit.startswith("nats") else "points of error worse"
            )
        if isinstance(report, Advice) and not often and report.choice:
            for candidate in {
                each.label: each for each in [report.choice, *(c.other for c in report.comparisons)]
            }.values():
                t, ahead = list(candidate.values), list(range(candidate.now + 1, candidate.until + 1))
                (line,) = axes.plot(
                    t, [report.shown(candidate.values[at]) for at in t], label=candidate.label
                )
                middle = [report.shown(float(np.median(candidate.at(at)))) for at in ahead]
                axes.plot(ahead, middle, color=line.get_color(), linestyle="--")
                low, high = np.array([interval(report.shown(candidate.at(at))) for at in ahead]).T
                axes.fill_between(ahead, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(xlabel="mega-batch (dashed: forecast, 90%)", ylabel=report.display.name, ylim=(0, None))
        axes.legend(fontsize=9)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata=style.METADATA["svg"])
        return drawn.getvalue()
