"""Sentences on how often to retrain: the answer, its gain and cost, and how sure it is."""

import math

import numpy as np

from alma.report.advice.amounts import in_unit_of_price, question_of_price, rounded_off, total_cost
from alma.report.advice.law import Change, Grace, Season
from alma.report.advice.questions import NO_EVIDENCE
from alma.report.advice.retraining import Retraining
from alma.tables import number

UNKNOWN = """\
No answer: without losses on the periods before a model's training, drift and lack of training \
cannot be told apart. Test each model on its own period and earlier ones, too"""


def advice_of(retraining: Retraining) -> str:
    """The plan at a price, else the cadence to use; or that there is no evidence."""
    if not retraining.unknown and not math.isnan(retraining.price):
        return when(retraining) if certain(retraining) else NO_EVIDENCE
    every, is_open = retraining.choice
    if retraining.unknown or (is_open and every == retraining.cadences[-1]):
        return NO_EVIDENCE
    return retraining.period.every(every)


def certain(retraining: Retraining) -> bool:
    """Whether there is evidence for the plan, and enough since the drift changed."""
    return retraining.plan.evident and not retraining.laws.just_changed


def answer(retraining: Retraining) -> str:
    """The advice in a sentence without its period."""
    if retraining.unknown:
        return UNKNOWN
    if not math.isnan(retraining.price):
        return _answer_at_price(retraining)
    every, is_open = retraining.choice
    most_frequent = retraining.cadences[0]
    rarest = retraining.cadences[-1]
    name = retraining.period.every(every)
    costs = costs_to_come(retraining, every)
    if every != rarest:
        gain = retraining.metric.interval(*rounded_off(retraining, retraining.gain(every, rarest)))
        text = f"{name.capitalize()}, {costs}: {gain} better than {retraining.period.every(rarest)}"
        return f"{text}; whether more often is worth it is open" if is_open else text
    gain_of_most = retraining.gain(most_frequent, rarest)
    if is_open:
        cheaper = f"until more models are tested, {name} is cheaper, {costs}"
        text = f"{NO_EVIDENCE.capitalize()}: {cheaper}"
        if gain_of_most.low > 0 and not retraining.drifts:
            return f"{text}. More training gains, whether age matters or not"
        return text
    most = retraining.metric.text(max(0.0, gain_of_most.high))
    least = retraining.metric.text(retraining.least_gain)
    limit = f"more often gains {most} at most, and {least} would be worth it"
    return f"{name.capitalize()} is enough, {costs}: {limit}"


def _answer_at_price(retraining: Retraining) -> str:
    """Sentences: the plan, its savings, and the prices between which it stays the best.

    If the saving may be zero: that there is no evidence, and the cheaper course.
    """
    plan = retraining.plan
    horizon = retraining.period.span(retraining.horizon)
    course = when(retraining)
    count = f"({plan.trainings} in {horizon})"
    if retraining.counted_from:
        count = f"({plan.trainings} in {horizon}, counted from {retraining.counted_from})"
    factor = retraining.money or 1.0
    unit = unit_of_cost(retraining)
    if retraining.laws.just_changed:
        return (
            f'{NO_EVIDENCE.capitalize()}: the drift has just changed. "{course}" {count} is the '
            "best guess; test models on further periods to know what it saves"
        )
    if not plan.evident:
        name = plan.undecided[-1]  # never, if that is open
        saving = rounded_off(retraining, plan.savings[name]).text(factor)
        return (
            f'{NO_EVIDENCE.capitalize()}: "{course}" {count} may save {saving} against {name}, '
            f"in {unit}: the interval holds zero. "
            "Until more models are tested, the cheaper course is not to retrain"
        )
    text = f"{course} {count}"
    savings = savings_against(retraining)
    text += f": it costs {total_cost(retraining)} in all"
    if savings:
        text += f" and saves {' and '.join(savings)}"
    text += f", in {unit}"
    for name in plan.undecided:
        text += f". No evidence against {name}, but this takes fewer trainings"
    low, high = (in_unit_of_price(retraining, price) for price in plan.flips)
    ends = f"above {low}"
    if plan.flips[1] < math.inf:
        ends = f"from {low} to {high}"
    return f"{text}. So for prices {ends}{beside_twin(retraining)}"


def savings_against(retraining: Retraining) -> list[str]:
    """What the plan saves, such as "5.23 [-1.41, 11.9] against never", maybe in money."""
    texts = []
    for name, saving in retraining.plan.savings.items():
        saved = rounded_off(retraining, saving).text(retraining.money or 1.0)
        texts.append(f"{saved} against {name}")
    return texts


def unit_of_cost(retraining: Retraining, plain: bool = False) -> str:
    """The unit of the plan's savings and total, and of its limits of the price.

    `plain`: without nats.
    """
    if retraining.money or (plain and retraining.metric.in_percent):
        return "the unit of --price"
    return f"{retraining.unit} summed over periods"


def when(retraining: Retraining) -> str:
    """When the plan retrains, such as "Retrain now, then every quarter"."""
    plan = retraining.plan
    if plan.first is None:
        return "Do not retrain"
    text = f"Retrain in {retraining.period.span(plan.first)}" if plan.first else "Retrain now"
    if plan.trainings > 1:
        text += f", then {retraining.period.every(plan.every)}"
    else:
        text += ", then not again"
    excess = retraining.outlook.excess
    if excess > 0:
        text += f", since the last losses are {number(excess)} above the usual"
    return text


def beside_twin(retraining: Retraining, plain: bool = False) -> str:
    """A sentence: how much more the twin costs, and which of the two to use.

    The twin differs only in --from-scratch. "" if there is none with the same models and periods.
    `plain`: without its label.
    """
    twin = retraining.twin
    if not twin or twin.laws.values.shape != retraining.laws.values.shape or twin.unknown:
        return ""
    gaps = (twin.laws.values - retraining.laws.values)[retraining.laws.ages == 0]
    gap = float(gaps[np.isfinite(gaps)].mean())  # mean difference between new models of the two
    excess = twin.plan.total + retraining.horizon * gap - retraining.plan.total
    verdict = "keep to this one" if excess > 0 else "take that one"
    cost = number((retraining.money or 1.0) * excess)
    name = twin.losses.label
    if plain:
        name = "To begin a training the other way (from the last model, or from scratch)"
    return f". {name} costs {cost} more in all: {verdict}"


def costs_to_come(retraining: Retraining, every: int, plain: bool = False) -> str:
    """The cost of the trainings to come, such as "12 trainings a year, 3 GPU-hours".

    `plain`: without FLOPs.
    """
    period = retraining.period
    if period.dated:
        count = period.calendar.year / every
        span = "a year"
    else:
        count = retraining.horizon / every
        span = f"in {period.span(retraining.horizon)}"
    noun = "training" if count == 1 else "trainings"
    parts = [f"{count:.3g} {noun} {span}"]
    cost = retraining.cost
    flops = None if plain else cost.flops
    for amount, unit in ((flops, "TFLOPs"), (cost.hours, cost.machine)):
        if amount:
            parts.append(f"{number(count * amount)} {unit}")
    return ", ".join(parts)


def lines(retraining: Retraining) -> list[str]:
    """The answer, the loss of old models, an event if there is one, and what this rests on."""
    sentences = [f"{answer(retraining)}.", question_of_price(retraining)]
    sentences += of_old_models(retraining)
    if not retraining.unknown:
        sentences.append(_basis(retraining))
    return list(filter(None, [*sentences, retraining.metric.remark]))


def of_old_models(retraining: Retraining) -> list[str]:
    """How much worse older models are, an event of the stream if there is one, a recent change."""
    if retraining.unknown:
        return []
    sentences = [_loss_of_old_models(retraining)]
    if retraining.laws.event:
        sentences.append(_event(retraining))
    if not retraining.laws.newest_fit:
        sentences.append(
            "The newest losses do not fit those before: the drift has begun, ended or changed, or "
            'a model or test is at fault. The answer rests on what was before; "as last time" has '
            "the newest."
        )
    return sentences


def would_change(retraining: Retraining) -> str:
    """What would change the answer."""
    if retraining.unknown:
        return "Tests of each model on its own period and earlier ones."
    plural = retraining.period.plural
    further = f"Further {plural}, with each model tested on them, would narrow the intervals."
    if not math.isnan(retraining.price):
        plan = retraining.plan
        if not certain(retraining):
            return further
        low, high = (in_unit_of_price(retraining, price) for price in plan.flips)
        ends = f"below {low}" if plan.flips[0] > 0 else ""
        if plan.flips[1] < math.inf:
            ends = f"{ends} or above {high}" if ends else f"above {high}"
        return f"A price of a training {ends} changes how many pay." if ends else further
    if retraining.choice.open:
        return f"{further} A price of a training (--price) tells what pays."
    least = retraining.metric.text(retraining.least_gain)
    return f"A gain below {least} that counts (--worth), or a price of a training (--price)."


def has_evidence(retraining: Retraining) -> bool:
    """Whether the answer has evidence."""
    return advice_of(retraining) != NO_EVIDENCE


def _loss_of_old_models(retraining: Retraining) -> str:
    """How much worse models of some ages are than a new one."""
    metric = retraining.metric
    shown = [k for k in retraining.cadences if k == 3]
    parts = []
    for age in dict.fromkeys([retraining.cadences[0], *shown, retraining.cadences[-1]]):
        extra = metric.older(*rounded_off(retraining, retraining.extra_at(age)))
        parts.append(f"{retraining.period.span(age)} old is {extra}")
    text = f"A model {', one '.join(parts)} than a new one."
    return f"{text} Percent: of perplexity." if metric.in_percent else text


def _event(retraining: Retraining) -> str:
    """The season or break of the stream."""
    laws = retraining.laws
    if isinstance(laws.event, Season):
        wave = retraining.metric.interval(*laws.estimate(lambda law: law.s))
        return (
            f"The stream has a season: a model half a year old is {wave} worse for that alone, "
            "one a year old not at all."
        )
    assert laws.event
    if isinstance(laws.event, Grace):
        grace = retraining.period.span(laws.event.length / retraining.period.size)
        return f"Age adds nothing before {grace}."
    if isinstance(laws.event, Change):
        return _change(retraining, laws.event)
    since = (retraining.losses.periods[-1] - laws.event.first) / retraining.period.size
    when = retraining.period.span(since)
    return f"The stream broke {when} before the last period; no other break is expected."


def _change(retraining: Retraining, change: Change) -> str:
    """Since when the stream drifts at another rate, and whether that is enough to know it."""
    since = (retraining.losses.periods[-1] - change.first) / retraining.period.size
    when = retraining.period.span(since)
    text = f"The drift changed {when} before the last period: only losses since then count"
    if retraining.laws.too_little_since_change:
        return f"{text}, too few to know what retraining saves."
    return f"{text}."


def _basis(retraining: Retraining) -> str:
    """How fast loss rises with age, whether the stream drifts, and which ages were measured."""
    period = retraining.period
    slope = rounded_off(retraining, retraining.slope)
    drift = "no evidence that the stream drifts"
    if retraining.drifts:
        drift = "the stream drifts"
        if slope.low <= 0:
            drift += ", though not along this line"
    ages = [age / period.size for age in retraining.ages_measured]
    return (
        f"{retraining.metric.change(slope.text())} a {period.noun} of age on average, "
        f"amount of training taken out: {drift}. Ages from {period.span(min(ages))} to "
        f"{period.span(max(ages))} were measured; "
        f"others follow the law age^{retraining.laws.whole.c:g}."
    )
