"""The brief on which model to use: its sections, for readers who train no models."""

import math

from alma.report.advice.advice import Advice
from alma.report.advice.brief_of_cadence import ANSWER, CHANGES, COSTS, HOW_SURE
from alma.report.advice.candidates import Candidate
from alma.report.advice.certainty import likely, share_above
from alma.report.advice.comparison import Comparison
from alma.report.advice.period import Period
from alma.report.advice.plain_words import capitalised, configuration, duration, listed, side
from alma.report.losses import MeanOverSeeds
from alma.report.newest import models_of, shown_models
from alma.report.periods import dated_names, holes
from alma.tables import number

_FEW_STAGES = 3  # fewer trainings do not tell how a curve goes on
_CHEAPER = 0.9  # share of the compute below which the other side counts as cheaper
_DEARER = 1.1
_MOST_REPEATS = 20  # as `comparison` tries


def sections_of(report: Advice, choice: Candidate) -> dict[str, str]:
    """Sentences by heading; headings without any are left out."""
    sections = {
        ANSWER: f"Use {name_of_choice(report, choice)}. {_expected(report, choice)}",
        HOW_SURE: _certainty(report),
        COSTS: _costs_and_savings(report, choice),
        CHANGES: " ".join([*_changes(report), *_weaknesses(report, choice)]),
        "The newest data": of_newest_data(report, choice),
    }
    return {heading: text for heading, text in sections.items() if text}


def name_of_choice(report: Advice, choice: Candidate) -> str:
    """What the choice is, such as "a single model: new data only"."""
    period = _period(choice)
    sides = []
    for comparison in report.comparisons:
        sides.append(side(choice.sides[comparison.question], period))
    name = configuration(choice)
    return f"{name}: {', '.join(sides)}" if sides else name


def _period(candidate: Candidate) -> Period:
    return Period.of(dated_names(candidate.result))


def _expected(report: Advice, choice: Candidate) -> str:
    """The forecast of the choice in a sentence."""
    forecast = choice.forecast
    factor = report.display.factor
    mean, low, high = (number(factor * value) for value in forecast)
    interval = f" [{low}, {high}]" if forecast.low <= forecast.high else ""
    first = choice.start + 1
    last = choice.until
    times = f"mega-batches {first} to {last}" if first < last else f"mega-batch {last}"
    value = f"{mean}{interval}{report.metric.of_values}"
    return f"Expected{report.tested_on} after {times}: {value}."


def _other_side(comparison: Comparison) -> str:
    """The other side of a question, for readers."""
    return side(comparison.other.sides[comparison.question], _period(comparison.choice))


def _share(comparison: Comparison) -> float:
    """The probability that the choice is better; NaN with one run of a side."""
    return share_above(MeanOverSeeds(comparison.difference, comparison.low, comparison.high))


def _certainty(report: Advice) -> str:
    """One verdict: how likely the choice beats each other side, the least likely first."""
    shares = {_other_side(comparison): _share(comparison) for comparison in report.comparisons}
    measured = {name: share for name, share in shares.items() if not math.isnan(share)}
    single = [name for name, share in shares.items() if math.isnan(share)]
    texts: list[str] = []
    for name in sorted(measured, key=lambda name: measured[name]):
        verdict = "better than" if not texts else "than"
        texts.append(f"{likely(measured[name])} {verdict} {name}")
    sentences = []
    if texts:
        sentences.append(f"{capitalised(listed(texts))}.")
    if single:
        sentences.append(
            f"Unknown against {listed(single)}: one run of each cannot tell how far runs differ."
        )
    return " ".join(sentences) or "Nothing that was run differs in one decision alone."


def _compute(comparison: Comparison) -> float:
    """The compute to come of the other side, as a share of that of the choice."""
    if not comparison.choice.compute:
        return 1.0
    return comparison.other.compute / comparison.choice.compute


def _costs_and_savings(report: Advice, choice: Candidate) -> str:
    """The cost of the choice, and what it saves against each other side."""
    hours = duration(choice.hours)
    sentences = [f"Training until mega-batch {choice.until} takes {hours} on such a machine."]
    for comparison in report.comparisons:
        difference = report.metric.difference(*report.difference(comparison))
        share = _compute(comparison)
        cost = ""
        if not _CHEAPER <= share <= _DEARER:
            cost = f", which takes {share:.2g} of its compute"
            if share > 1:
                cost = f", which takes {share:.2g} times its compute"
        sentences.append(f"{difference} less than {_other_side(comparison)}{cost}.")
    return " ".join(sentences)


def _changes(report: Advice) -> list[str]:
    """What would settle open questions, and what speaks for the other side."""
    sentences = []
    unsettled = []
    for comparison in report.comparisons:
        name = _other_side(comparison)
        if comparison.evidence:
            continue
        repeats = min(len(comparison.choice.seeds), len(comparison.other.seeds))
        if comparison.seeds:
            sentences.append(
                f"{comparison.seeds} repeats (seeds) of each would settle it against {name}."
            )
        elif repeats < 2:
            sentences.append(f"3 repeats (seeds) of each may settle it against {name}.")
        else:
            unsettled.append(name)
    if unsettled:
        sentences.append(
            f"Against {listed(unsettled)} {_MOST_REPEATS} repeats (seeds) would not settle it: "
            "further mega-batches may."
        )
    cheaper = []
    for comparison in report.comparisons:
        if not comparison.evidence and _compute(comparison) < _CHEAPER:
            cheaper.append(_other_side(comparison))
    if cheaper:
        sentences.append(f"If compute is scarce: {' or '.join(cheaper)}.")
    return sentences


def _weaknesses(report: Advice, choice: Candidate) -> list[str]:
    """What weakens the forecasts."""
    weaknesses = []
    if any(len(candidate.ends) < _FEW_STAGES for candidate in report.candidates):
        weaknesses.append(
            f"Fewer than {_FEW_STAGES} trainings so far, so the forecast is mostly assumed."
        )
    if holes(candidate.result for candidate in report.candidates) and not report.shortage:
        place = choice.result.runs[0].directory
        weaknesses.append(
            f"Not all models were tested on all periods: `alma test {place}` makes these tests."
        )
    return weaknesses


def of_newest_data(report: Advice, choice: Candidate) -> str:
    """What the models of the choice lose on the newest held-out part; "" without periods."""
    of_newest = report.newest
    if not of_newest:
        return ""
    result = next((r for r in of_newest.results if r.label == choice.label), None)
    if result is None:
        return ""
    unit = report.metric.of_values
    factor = result.display.factor
    parts = []
    names = ("the newest model", "the one before", "the oldest")
    models = shown_models(models_of(result, of_newest.part))
    for name, model in zip(names, models, strict=True):
        if model and model.tested:
            mean = factor * sum(model.values) / len(model.values)
            parts.append(f"{name}, trained until {model.until}, has {number(mean)}{unit}")
    if not parts:
        return ""
    text = f"On {of_newest.name}, {listed(parts)}."
    if choice.result.part and dated_names(result):
        test = result.over_seeds(lambda rows: rows[max(rows)]["value"])[0]
        text += (
            f" On the test set, which has none of {of_newest.name}, the newest model has "
            f"{number(factor * test)}{unit}."
        )
    return text
