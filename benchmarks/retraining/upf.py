"""UPF, the uncertainty-performance forecaster (Regol et al., ICML 2025, arXiv 2505.14903).

What could be read: the first page, the authors' article at ai.cash.app (its start), summaries, and
two independent accounts that cite the paper's sections; no code of the authors is public. From
these: a schedule costs the sum of the losses in service plus a price for each training (section 3).
The loss of the model of period i on period j is forecast by a linear regression with an elastic
net on i, j, j - i and the shift of the mean features, fitted to all known pairs. A bounded metric
has a Beta distribution with the forecast as mean and the variance of the residuals (section 3.3 of
one account); others are Gaussian (its appendix). A training is due when the 95% quantile of the
cost of training now is below that of keeping the model (equation 15 there).

Not known from the text, so ours: costs are those of 12 periods to come (the paper knows the
horizon; a rule here does not), of the best schedule by the forecast that begins with a training
or without one; losses of several periods are independent, and their sum is taken as Gaussian, with
the mean and variance that it has. There are no features of the data in a matrix of losses, so their
shift is left out. Pairs of age 0 are left out, since a model serves from the next period on. The
variance is one number, so the quantile seldom decides otherwise than the mean would: uncertainty of
the coefficients has no part in it.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from alma.report.advice.law import Array
from benchmarks.retraining.history import History

AHEAD = 12
"""Periods to come whose costs are compared."""
QUANTILE = 0.95


@dataclass(frozen=True)
class Forecast:
    """Losses of pairs of model and period, as shares of the metric's range, 1 if it has none."""

    centre: Array
    scale: Array
    intercept: float
    coefficients: Array
    deviation: float
    """Of the residuals."""

    def mean(self, until: int, at: int) -> float:
        """Forecast of the loss of a model on a period."""
        features = (_pair(until, at) - self.centre) / self.scale
        return self.intercept + float(features @ self.coefficients)


class PricedSchedule(NamedTuple):
    """A plan for the periods to come."""

    cost: float
    """Forecast losses and prices."""
    trainings: int
    means: tuple[float, ...]
    """Forecast losses in service, a period each."""


def _pair(until: int, at: int) -> Array:
    return np.array([until, at, at - until], float)


def forecast(pairs: Array, losses: Array) -> Forecast:
    """Fit the regression; `pairs` (pairs, 2): model and period; `losses` (pairs,)."""
    from sklearn.exceptions import ConvergenceWarning  # optional
    from sklearn.linear_model import ElasticNetCV

    features = np.array([_pair(until, at) for until, at in pairs.tolist()])
    centre = features.mean(0)
    scale = np.maximum(features.std(0), 1e-12)
    standard = (features - centre) / scale
    net = ElasticNetCV(alphas=30, cv=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # losses without any noise
        net.fit(standard, losses)
    residuals = losses - net.predict(standard)
    deviation = max(float(residuals.std()), 1e-9)
    return Forecast(centre, scale, float(net.intercept_), np.array(net.coef_), deviation)


def best_schedules(fitted: Forecast, model: int, now: int, price: float) -> list[PricedSchedule]:
    """The schedules of least forecast cost: one that trains now, and one that does not.

    model  the model in service; price, as the forecast's losses
    """
    best: list[PricedSchedule] = []  # that begin with a training, from the last period on
    for start in reversed(range(AHEAD)):
        following = _best_from(fitted, now + start, now + start, now, best)
        cost = price + following.cost
        best.insert(0, PricedSchedule(cost, 1 + following.trainings, following.means))
    return [best[0], _best_from(fitted, model, now, now, best[1:])]


def _best_from(
    fitted: Forecast, model: int, since: int, now: int, later: list[PricedSchedule]
) -> PricedSchedule:
    """The best schedule in which a model serves after `since` until a later training or the end.

    later  the best schedules that train 1, 2, ... periods after `since`
    """
    served: list[float] = []
    candidates = []
    for at in range(since + 1, now + AHEAD + 1):
        served.append(fitted.mean(model, at))
        following = PricedSchedule(0.0, 0, ())
        if len(served) <= len(later):
            following = later[len(served) - 1]
        cost = sum(served) + following.cost
        if len(served) <= len(later) or at == now + AHEAD:
            means = (*served, *following.means)
            candidates.append(PricedSchedule(cost, following.trainings, means))
    return min(candidates, key=lambda schedule: schedule.cost)


def upf(history: History) -> bool:
    """Whether training now has the lower 95% quantile of costs; see the module for the sources."""
    lowest, highest = history.metric.limits
    is_bounded = bool(np.isfinite(highest - lowest))
    pairs = []
    losses = []
    for until in history.trained:
        for at in range(until + 1, history.now + 1):
            pairs.append((until, at))
            losses.append(history.loss(until, at))
    shares = np.array(losses)
    price = history.price
    if is_bounded:
        shares = (shares - lowest) / (highest - lowest)
        price /= highest - lowest
    fitted = forecast(np.array(pairs), shares)
    schedules = best_schedules(fitted, history.trained[-1], history.now, price)
    costs = [_high_cost(schedule, price, fitted, is_bounded) for schedule in schedules]
    return costs[0] < costs[1]


def _high_cost(schedule: PricedSchedule, price: float, fitted: Forecast, is_bounded: bool) -> float:
    """The 95% quantile of the cost of a schedule."""
    means = np.array(schedule.means)
    variances = np.full(len(means), fitted.deviation**2)
    if is_bounded:
        means = np.clip(means, 0, 1)
        variances = np.minimum(variances, means * (1 - means))
    deviation = float(np.sqrt(variances.sum()))
    return float(means.sum()) + norm.ppf(QUANTILE) * deviation + price * schedule.trainings
