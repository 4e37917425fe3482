"""How sure an answer is: the probability of a claim in words, with its share.

Words follow the guidance of the IPCC for its authors (Mastrandrea et al., 2010), except that "very
likely" begins at 95%: from there on the 90% interval leaves out zero, so there is evidence.
"""

import math

from scipy.special import ndtr, ndtri

from alma.report.advice.plain_words import capitalised
from alma.report.advice.retraining import Retraining
from alma.report.losses import MeanOverSeeds

_HALF_WIDTH = float(ndtri(0.95))  # of a 90% interval, in standard deviations
_JUST_CHANGED = "Not known: the drift has just changed, and too few models came since"
_WORDS = ((0.95, "very likely"), (0.66, "likely"), (0.33, "about as likely as not"))


def share_above(estimate: MeanOverSeeds, limit: float = 0.0) -> float:
    """The probability that the true value is above `limit`; NaN without an interval.

    By a normal distribution whose 90% interval ends where that of the estimate does, on the side
    of the limit.
    """
    above = estimate.mean - limit
    half_width = estimate.high - estimate.mean
    if above > 0:
        half_width = estimate.mean - estimate.low
    if not math.isfinite(half_width):
        return math.nan
    if half_width == 0:
        return 0.5 + 0.5 * float(above > 0) - 0.5 * float(above < 0)
    return float(ndtr(_HALF_WIDTH * above / half_width))


def likely(share: float) -> str:
    """The share in words and as a number, such as "likely (81%)" or "very likely (over 99%)"."""
    if math.isnan(share):
        return "unknown"
    words = "unlikely"
    for least, name in reversed(_WORDS):
        if share >= least:
            words = name
    percent = f"{math.floor(100 * share)}%"
    if share >= 0.99:
        percent = "over 99%"
    if share < 0.01:
        percent = "under 1%"
    return f"{words} ({percent})"


def of_cadence(retraining: Retraining) -> str:
    """How sure the answer to how often to retrain is, in a sentence without its period."""
    if retraining.unknown:
        return "Unknown: drift and lack of training cannot be told apart"
    if not math.isnan(retraining.price):
        return _of_plan(retraining)
    if retraining.laws.just_changed:
        return _JUST_CHANGED
    every, is_open = retraining.choice
    period = retraining.period
    most_frequent = retraining.cadences[0]
    rarest = retraining.cadences[-1]
    if every != rarest:
        share = share_above(retraining.gain(every, rarest))
        return f"{likely(share)} better than {period.every(rarest)}".capitalize()
    least = retraining.metric.text(retraining.least_gain)
    gain = retraining.gain(most_frequent, rarest)
    share = share_above(gain, retraining.least_gain)
    if not is_open:
        name = f"more often gains less than {least}"
        return capitalised(f"{likely(1 - share)} that {name}")
    share = min(share, share_above(retraining.aged_most), share_above(retraining.effect))
    name = f"{period.every(most_frequent)} gains {least} or more"
    text = capitalised(f"{likely(share)} that {name}")
    return f"{text}; evidence begins at 95%"


def _of_plan(retraining: Retraining) -> str:
    """How sure it is that the plan saves."""
    parts = []
    for name, saving in retraining.plan.savings.items():
        parts.append((share_above(saving), name))
    if not parts:
        return "Certain: no other plan has another number of trainings"
    if retraining.laws.just_changed:
        return _JUST_CHANGED
    if not retraining.plan.evident:
        share, name = min(part for part in parts if part[1] in retraining.plan.undecided)
        text = f"{likely(share)} that training saves against {name}"
        if retraining.plan.first is None:
            text = f"{likely(share)} that this saves against {name}"
        return f"{text.capitalize()}; evidence begins at 95%"
    texts = [f"{likely(share)} to save against {name}" for share, name in parts]
    return ", ".join(texts).capitalize()
