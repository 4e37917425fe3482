"""The picture of the brief: loss by age, or the metric with its forecast."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from alma.report import style
from alma.report.advice.advice import Advice
from alma.report.advice.candidates import Candidate
from alma.report.advice.forecast import interval
from alma.report.advice.period import Period
from alma.report.advice.plain_words import side
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport
from alma.report.metric import percent_of_perplexity
from alma.report.periods import dated_names


def _retrainings(report: Advice | MatrixReport) -> list[Retraining]:
    """What the report says about how often to retrain."""
    if isinstance(report, MatrixReport):
        return report.groups
    return [report.retraining] if report.retraining else []


def picture(report: Advice | MatrixReport) -> bytes:
    """The picture as SVG: loss against age by the fitted laws.

    Without a law, the metric of the choice and its rivals over the stream.
    """
    with style.drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        retrainings = _retrainings(report)
        if retrainings:
            _draw_ages(axes, retrainings, isinstance(report, MatrixReport))
        elif isinstance(report, Advice):
            _draw_forecasts(axes, report)
        axes.legend(fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
        image = io.BytesIO()
        metadata = style.METADATA["svg"]
        figure.savefig(image, format="svg", bbox_inches="tight", metadata=metadata)
        return image.getvalue()


def _draw_ages(axes: Any, retrainings: Sequence[Retraining], named: bool) -> None:
    """Extra loss by age with its interval, as sentences state it, such as in points of error.

    `named`: whether the labels of the losses are names for readers.
    """
    first = retrainings[0]
    metric = first.metric
    for retraining in retrainings:
        ages = np.linspace(0, retraining.cadences[-1], 25)
        curves = np.transpose([retraining.extra_at(age) for age in ages])
        if metric.in_percent:
            curves = np.vectorize(percent_of_perplexity)(metric.nats * curves)
        mean, low, high = curves
        label = retraining.losses.label if named else "models of this kind"
        (line,) = axes.plot(ages, mean, label=label)
        axes.fill_between(ages, low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel(f"age of the model ({first.period.plural})")
    label = f"{metric.unit} worse than a new model, 90%"
    if metric.in_percent:
        label = "worse than a new model (%), 90%"
    axes.set_ylabel(label)


def _draw_forecasts(axes: Any, report: Advice) -> None:
    """The metric so far and its forecast with an interval, of the choice and its rivals."""
    from matplotlib.ticker import MaxNLocator

    factor = report.display.factor
    shown: dict[str, Candidate] = {}
    period = Period("mega-batch")
    if report.choice:
        shown["recommended"] = report.choice
        period = Period.of(dated_names(report.choice.result))
    for comparison in report.comparisons:
        rival = comparison.other
        shown[f"instead: {side(rival.sides[comparison.question], period)}"] = rival
    for name, candidate in shown.items():
        times = [t for t in candidate.values if t >= candidate.ends[0]]
        values = [factor * candidate.values[t] for t in times]
        (line,) = axes.plot(times, values, label=name, marker=".")
        color = line.get_color()
        draws, _ = candidate.draws
        low, high = factor * interval(draws)
        median = factor * np.median(draws, 0)
        to_come = candidate.to_come
        if len(to_come) > 1:
            axes.plot(to_come, median, linestyle="--", color=color, drawstyle="steps-post")
            axes.fill_between(to_come, low, high, step="post", alpha=0.15, color=color)
        else:
            sides = (median - low, high - median)
            axes.errorbar(to_come, median, sides, color=color, linestyle="", marker="_", capsize=4)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel(f"{period.noun} (dashed or with a bar: forecast, 90%)")
    axes.set_ylabel(f"{report.display.name}\n{report.tested_on.strip()}".strip())
    axes.set_ylim(0, None)
