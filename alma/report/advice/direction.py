"""Whether a matrix has its direction turned around: better models where worse ones are expected."""

import itertools
import math
import shlex
from statistics import fmean

from alma.errors import UserError
from alma.report.advice.retraining import Retraining
from alma.report.losses import staleness_curve
from alma.report.metric import Metric

_CERTAIN = 4.0  # half-widths of the 90% interval: hardly ever by chance
_OPPOSITES = {"accuracy": "error", "error": "accuracy"}


def check_direction(retraining: Retraining) -> None:
    """Raise a UserError if models get better with distance, both before and after their training.

    No stream does that: the values have the other direction. The effect of age, in which the amount
    of training cancels, must be below 0 for certain, and by as much as a gain that counts.
    """
    effect = retraining.effect
    half_width = effect.high - effect.mean
    if math.isnan(half_width) or not effect.mean + _CERTAIN * half_width < 0:
        return
    losses = retraining.losses
    if -effect.mean * max(losses.by_age) < retraining.least_gain:
        return
    curve = staleness_curve(losses)
    older = itertools.chain(*(values for age, values in curve.items() if age > 0))
    newer = itertools.chain(*(values for age, values in curve.items() if age < 0))
    if fmean(older) < 0 and fmean(newer) < 0:
        direction = "higher" if retraining.metric.higher_is_better else "lower"
        raise UserError(
            f"{losses.label}: models get better the further the test is from their training, "
            f"before and after it: is {direction} {retraining.metric.name} better, as was read? "
            f"If not, give {_remedy(retraining.metric)}"
        )


def _remedy(metric: Metric) -> str:
    """The options that turn the direction."""
    if metric.name in _OPPOSITES:
        scale = "share" if metric.factor == 100 else "percent"
        return f"--metric {_OPPOSITES[metric.name]}-{scale}"
    flag = "--lower-is-better" if metric.higher_is_better else "--higher-is-better"
    return f"--metric {shlex.quote(metric.name)} {flag}"
