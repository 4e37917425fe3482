"""What the brief calls configurations, their sides of a question, times and costs."""

import re
from collections.abc import Sequence

from alma.report.advice.candidates import Candidate
from alma.report.advice.period import Period

_LEARNERS = {
    "sm": "a single model",
    "ens": "several models that vote",
    "umix": "several models trained as one",
    "gens": "an ensemble that gains a model with each training",
    "gmoe": "a model that grows with each training",
    "moe": "a mixture of experts of fixed size",
    "ff": "a network that grows with each training",
}
_SIDES = {
    "train now": "training at once",
    "grow": "a model that grows",
    "keep the size": "a model of fixed size",
    "raw weights": "no average of weights",
    "no replay": "new data only",
    "replay yes": "all data so far in each training",
    "last weights": "going on from the last model",
    "anew": "starting from scratch each time",
    "schedule: each stage": "a learning-rate schedule for each training",
    "schedule: continuous": "one learning-rate schedule for all trainings",
}
_REPLAY = re.compile(r"replay (?P<share>[0-9.]+)(?P<recent> recent)?")
_WAIT = re.compile(r"wait for (?P<count>\d+) mega-batches")


def side(text: str, period: Period) -> str:
    """A side of a question, of `alma.report.advice.questions`, for readers who train no models."""
    replay = _REPLAY.fullmatch(text)
    if replay:
        data = "data of the last training" if replay["recent"] else "old data"
        return f"{100 * float(replay['share']):.3g}% {data} in each training"
    wait = _WAIT.fullmatch(text)
    if wait:
        return f"training after every {period.span(int(wait['count']))}"
    return _SIDES.get(text, text)


def configuration(candidate: Candidate) -> str:
    """The name that the user gave, or what the learner is."""
    name = candidate.result.config.get("name")
    return str(name or _LEARNERS.get(candidate.result.learner, candidate.result.learner))


def duration(hours: float) -> str:
    """Such as "3.5 hours", "12 minutes", "less than a minute"."""
    if hours >= 1:
        return f"{hours:.2g} hours" if hours < 100 else f"{hours:,.0f} hours"
    minutes = 60 * hours
    if minutes < 1:
        return "less than a minute"
    whole = round(minutes)
    return "1 minute" if whole == 1 else f"{whole} minutes"


def capitalised(text: str) -> str:
    """With a capital first letter; the others stay."""
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    """The parts as a list in a sentence, such as "a, b and c"."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
