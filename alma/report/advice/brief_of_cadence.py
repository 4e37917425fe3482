"""The brief on how often to retrain: its sections, for readers who train no models."""

import math
from collections.abc import Sequence

from alma.report.advice import certainty
from alma.report.advice.amounts import question_of_price, rounded_off, total_cost
from alma.report.advice.plain_words import capitalised
from alma.report.advice.questions import NO_EVIDENCE
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_words import (
    UNKNOWN,
    beside_twin,
    costs_to_come,
    of_old_models,
    savings_against,
    unit_of_cost,
    when,
    would_change,
)
from alma.tables import number

ANSWER = "Answer"
HOW_SURE = "How sure"
COSTS = "What it costs and saves"
CHANGES = "What would change it"
OLDER_MODELS = "Older models"


def sections_of(retraining: Retraining) -> dict[str, str]:
    """Sentences by heading; headings without any are left out."""
    sections = {
        ANSWER: answer(retraining),
        HOW_SURE: f"{certainty.of_cadence(retraining)}.",
        COSTS: costs_and_savings(retraining),
        OLDER_MODELS: " ".join(of_old_models(retraining)),
        CHANGES: would_change(retraining),
    }
    return {heading: text for heading, text in sections.items() if text}


def sections_of_groups(groups: Sequence[Retraining]) -> dict[str, str]:
    """The sections of losses from elsewhere: a group each, if there are several."""
    if len(groups) == 1:
        return sections_of(groups[0])
    sections = {}
    for retraining in groups:
        parts = sections_of(retraining)
        texts = [parts.pop(ANSWER)]
        for heading, text in parts.items():
            texts.append(f"{heading}: {text}" if heading == CHANGES else text)
        sections[capitalised(retraining.losses.label)] = " ".join(texts)
    return sections


def answer(retraining: Retraining) -> str:
    """What to do, in a sentence or two."""
    if retraining.unknown:
        return f"{UNKNOWN}."
    if not math.isnan(retraining.price):
        return _planned(retraining)
    every, is_open = retraining.choice
    name = retraining.period.every(every)
    if every != retraining.cadences[-1]:
        text = f"{name.capitalize()}."
        return f"{text} Whether more often is worth it is open." if is_open else text
    if not is_open:
        return f"{name.capitalize()} is enough."
    return f"{NO_EVIDENCE.capitalize()}: {name}, the cheaper course, until more models are tested."


def _planned(retraining: Retraining) -> str:
    """The plan at a price; without evidence the cheaper course."""
    plan = retraining.plan
    if retraining.laws.just_changed:
        course = when(retraining)
        return f'{NO_EVIDENCE.capitalize()}: the drift has just changed. "{course}" is a guess.'
    if not plan.evident:
        return (
            f"{NO_EVIDENCE.capitalize()}: do not retrain, the cheaper course, until more models "
            "are tested."
        )
    text = when(retraining)
    if plan.trainings:
        text += f": {_trainings(plan.trainings)} in {retraining.period.span(retraining.horizon)}"
    return f"{text}."


def _trainings(count: int) -> str:
    return "1 training" if count == 1 else f"{count} trainings"


def costs_and_savings(retraining: Retraining) -> str:
    """What the answer costs, and what it saves or gains; "" without an answer."""
    if retraining.unknown:
        return ""
    if not math.isnan(retraining.price):
        return _of_plan(retraining)
    metric = retraining.metric
    every = retraining.choice.every
    most_frequent = retraining.cadences[0]
    rarest = retraining.cadences[-1]
    costs = capitalised(costs_to_come(retraining, every, plain=True))
    rarest_name = retraining.period.every(rarest)
    if every != rarest:
        gain = metric.interval(*retraining.gain(every, rarest))
        return f"{costs}: {gain} better than {rarest_name}."
    gain = metric.interval(*retraining.gain(most_frequent, rarest))
    frequent_costs = costs_to_come(retraining, most_frequent, plain=True)
    text = f"{costs}. {retraining.period.every(most_frequent).capitalize()}, {frequent_costs}"
    least = metric.text(retraining.least_gain)
    return f"{text}, may gain {gain}; a gain of {least} would be worth it."


def _of_plan(retraining: Retraining) -> str:
    """The total of the plan and what it saves against other plans, with intervals."""
    plan = retraining.plan
    factor = retraining.money or 1.0
    unit = unit_of_cost(retraining, plain=True)
    horizon = retraining.period.span(retraining.horizon)
    if retraining.laws.just_changed:
        return "What it saves is not known until models are tested on further periods."
    if not plan.evident:
        name = plan.undecided[-1]
        saving = rounded_off(retraining, plan.savings[name]).text(factor)
        course = f"{when(retraining)} ({_trainings(plan.trainings)} in {horizon})"
        return f'"{course}" may save {saving} against {name}, in {unit}: the interval holds zero.'
    text = f"It costs {total_cost(retraining)} in {horizon}"
    if plan.trainings and plan.total > 0:
        of_trainings = number(factor * plan.trainings * retraining.price)
        text += f", of which the {_trainings(plan.trainings)} {of_trainings}"
    savings = savings_against(retraining)
    if savings:
        text += f". It saves {' and '.join(savings)}"
    text += f", in {unit}{beside_twin(retraining, plain=True)}."
    return " ".join(filter(None, [text, question_of_price(retraining, plain=True)]))
