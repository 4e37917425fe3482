"""The picture of the brief: loss by age, or the metric with its forecast."""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alma.learners import colour_of
from alma.report import style
from alma.report.advice.advice import Advice
from alma.report.advice.candidates import Candidate
from alma.report.advice.forecast import interval
from alma.report.advice.period import Period
from alma.report.advice.plain_words import side
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport
from alma.report.advice.retraining_words import certain, has_evidence
from alma.report.metric import percent_of_perplexity
from alma.report.periods import dated_names

_LARGE: Any = {"font.size": 11, "axes.labelsize": 11}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Of groups of losses, after Okabe and Ito."""


def _retrainings(report: Advice | MatrixReport) -> list[Retraining]:
    """What the report says about how often to retrain, if that is its question."""
    if isinstance(report, MatrixReport):
        return report.groups
    return [report.retraining] if report.retraining and report.asks_how_often else []


def picture(report: Advice | MatrixReport) -> bytes:
    """The picture that answers the question of the report, with its answer marked, as SVG.

    How often to retrain: loss against age by the fitted laws. Which model: the metric of the choice
    and its rivals over the stream.
    """
    retrainings = _retrainings(report)
    with style.drawing():
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_LARGE):  # a telephone shows the picture at two thirds of its size
            figure = Figure(figsize=(6, 3.4), layout="constrained")
            axes = figure.add_subplot()
            if retrainings:
                _draw_ages(axes, retrainings, isinstance(report, MatrixReport))
            elif isinstance(report, Advice):
                _draw_forecasts(axes, report)
            axes.legend(fontsize=10, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
            image = io.BytesIO()
            metadata = style.METADATA["svg"]
            figure.savefig(image, format="svg", bbox_inches="tight", metadata=metadata)
    return image.getvalue()


def _draw_ages(axes: Any, retrainings: Sequence[Retraining], named: bool) -> None:
    """Extra loss by age with its interval, as sentences state it, such as in points of error.

    The age at which the answer retrains is marked.

    `named`: whether the labels of the losses are names for readers.
    """
    first = retrainings[0]
    metric = first.metric
    for i, retraining in enumerate(retrainings):
        every = _marked_cadence(retraining)
        oldest = max(retraining.cadences[-1], every or 0)
        colour = _COLOURS[i % len(_COLOURS)]
        ages = np.linspace(0, oldest, 25)
        mean, low, high = _shown(retraining, ages)
        label = retraining.losses.label if named else "models of this kind"
        axes.plot(ages, mean, label=label, color=colour)
        axes.fill_between(ages, low, high, alpha=0.15, color=colour)
        if every:
            (at_mark,), _, _ = _shown(retraining, [every])
            label = f"retrain {retraining.period.every(every)}"
            look = style.dot(colour, hollow=not has_evidence(retraining)) | {"markersize": 9}
            axes.plot([every], [at_mark], linestyle="", label=label, **look)
            axes.axvline(every, color=colour, linestyle=":")
    axes.set_xlabel(f"age of the model ({first.period.plural})")
    label = f"{metric.unit}\nworse than a new model, 90%"
    if metric.in_percent:
        label = "worse than a new model\n(% of perplexity), 90%"
    axes.set_ylabel(label)


def _shown(retraining: Retraining, ages: Any) -> Any:
    """Extra loss at these ages as sentences state it, (mean and ends of the interval, ages)."""
    metric = retraining.metric
    curves = np.transpose([retraining.extra_at(age) for age in ages])
    if metric.in_percent:
        return np.vectorize(percent_of_perplexity)(metric.nats * curves)
    return curves


def _marked_cadence(retraining: Retraining) -> int | None:
    """The cadence that the answer names, also as the cheaper course; None: it retrains never."""
    if retraining.unknown:
        return None
    if math.isnan(retraining.price):
        return retraining.choice.every
    plan = retraining.plan
    if plan.first is None or not certain(retraining) or plan.trainings < 2:
        return None
    return plan.every


def _draw_forecasts(axes: Any, report: Advice) -> None:
    """The metric so far and its forecast with an interval, of the choice and its rivals."""
    from matplotlib.ticker import MaxNLocator

    shown: dict[str, Candidate] = {}
    period = Period("mega-batch")
    if report.choice:
        shown["recommended"] = report.choice
        period = Period.of(dated_names(report.choice.result))
    for comparison in report.comparisons:
        rival = comparison.other
        shown[f"instead: {side(rival.sides[comparison.question], period)}"] = rival
    learners: list[str] = []
    for name, candidate in shown.items():
        learner = candidate.result.learner
        look = style.variant(colour_of(learner), learners.count(learner))
        learners.append(learner)
        width = 2.4 if candidate is report.choice else 1.1
        _draw_forecast(axes, report, candidate, {"label": name, "linewidth": width} | look)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel(f"{period.noun} (beyond the last dot: forecast, 90%)")
    axes.set_ylabel(f"{report.display.name}\n{report.tested_on.strip()}".strip())
    axes.set_ylim(0, None)


def _draw_forecast(axes: Any, report: Advice, candidate: Candidate, look: dict[str, Any]) -> None:
    """The metric of a candidate so far, and its forecast: a band, or a bar of a single one."""
    factor = report.display.factor
    colour = look["color"]
    times = [t for t in candidate.values if t >= candidate.ends[0]]
    values = [factor * candidate.values[t] for t in times]
    axes.plot(times, values, marker=".", **look)
    draws, _ = candidate.draws
    low, high = factor * interval(draws)
    median = factor * np.median(draws, 0)
    to_come = candidate.to_come
    if len(to_come) > 1:
        axes.plot(to_come, median, drawstyle="steps-post", **look | {"label": None})
        axes.fill_between(to_come, low, high, step="post", alpha=0.15, color=colour)
    else:
        sides = (median - low, high - median)
        axes.errorbar(to_come, median, sides, color=colour, linestyle="", marker="_", capsize=4)
