"""Rules of when to retrain, from the literature and from ALMA.

A rule sees a `History` and says whether to train now. The parameters of CARA and of "best on the
history" are chosen on the warm-up, where each period has a model. The papers' full texts were not
at hand: docstrings say which parts follow their public descriptions and which are choices of ours.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.special import expit, logit

from alma.errors import UserError
from alma.report.advice.law import Array
from alma.report.advice.plan import NEVER
from alma.report.advice.retraining import Retraining
from benchmarks.retraining.history import History, Rule

WORSE = 0.05
"""By which share a loss grows before "5% worse than last time" trains."""
_QUANTILE = 0.5  # of the cost of keeping minus that of training; .5 is neutral to risk
_DRAWS = 200
_AHEAD = 12  # periods that UPF looks ahead
_EDGE = 1e-3  # losses are kept this far from the bounds 0 and 1 before the logit


def never(history: History) -> bool:
    """No training."""
    return False


def always(history: History) -> bool:
    """A training each period."""
    return True


def every(periods: int, history: History) -> bool:
    """A fixed cadence."""
    return history.age >= periods


def best_on_history(history: History) -> bool:
    """The cadence of least mean cost by age on the warm-up, as a calendar."""
    return history.age >= _best_cadence(history)


def _best_cadence(history: History) -> int:
    """The cadence of least mean cost a period.

    Losses of each age are compared with those of age 1 on the same periods, so that a hard period
    does not count against the age that was tested on it.
    """
    losses = history.of_warm_up()
    total = 0.0
    costs = []
    for age in range(1, len(losses)):
        differences = np.diagonal(losses, age) - np.diagonal(losses, 1)[age - 1 :]
        total += float(differences.mean())
        costs.append((history.price + total) / age)
    return 1 + int(np.argmin(costs))


def worse_than_last_time(history: History) -> bool:
    """The present loss is 5% above the one on the first period that the model served."""
    newest = history.trained[-1]
    if history.age < 1:
        return False
    first = history.loss(newest, newest + 1)
    return history.loss(newest, history.now) > (1 + WORSE) * first


def cara_threshold(history: History) -> bool:
    """CARA with a threshold (Mahadevan and Mathioudakis, arXiv 2310.04216).

    Train when the staleness cost of the model in service on the newest data is above a threshold,
    the one of least strategy cost (staleness and trainings) on past data. Ours: the staleness cost
    is the loss on the newest period minus that on the model's own period (the paper weighs losses
    on the data by their similarity to the queries; here they are one set); thresholds tried are the
    staleness costs of the warm-up, and infinity.
    """
    losses = history.of_warm_up()
    staleness = losses - np.diag(losses)[:, None]
    candidates = [*np.unique(staleness[np.triu_indices(len(losses), 1)]).tolist(), math.inf]
    costs = []
    for threshold in candidates:
        decide = partial(_is_above, staleness, threshold)
        costs.append(_cost_on(losses, decide, history.price))
    threshold = candidates[int(np.argmin(costs))]
    newest = history.trained[-1]
    if newest == history.now:
        return False
    now = history.loss(newest, history.now) - history.loss(newest, newest)
    return now >= threshold


def _is_above(staleness: Array, threshold: float, model: int, at: int) -> bool:
    return bool(staleness[model, at] >= threshold)


def cara_periodic(history: History) -> bool:
    """CARA with a period (arXiv 2310.04216): the period of least strategy cost on past data.

    Unlike "best on the history", the past is replayed once from its first model.
    """
    losses = history.of_warm_up()
    costs = []
    for periods in range(1, len(losses)):
        decide = partial(_is_old, periods)
        costs.append(_cost_on(losses, decide, history.price))
    return history.age >= 1 + int(np.argmin(costs))


def _is_old(periods: int, model: int, at: int) -> bool:
    return at - model >= periods


def _cost_on(losses: Array, decide: Callable[[int, int], bool], price: float) -> float:
    """The cost of a strategy on a whole matrix, from its first model on."""
    model = 0
    total = 0.0
    for at in range(1, len(losses)):
        total += float(losses[model, at])
        if at + 1 < len(losses) and decide(model, at):
            model = at
            total += price
    return total


def upf(history: History) -> bool:
    """Uncertainty-performance forecaster (Regol et al., ICML 2025, arXiv 2505.14903).

    As there: a regression on the matrix of known losses of models by period forecasts a bounded
    metric with its uncertainty, and a training must beat keeping the model at a quantile of the
    total cost, its price included. Not verified against the paper's text: features (until, age),
    the Gaussian on the logit in place of the paper's moments of a Beta, the quantile, and the
    plans: a first training now or later within 12 periods, and then a fixed cadence. Losses that
    are not within 0 and 1 are scaled by twice the largest known one.
    """
    untils, ages, values = _known_cells(history)
    scale = 1.0 if max(values) <= 1 else 2 * max(values)
    shares = np.clip(np.array(values) / scale, _EDGE, 1 - _EDGE)
    centre = float(history.now)
    design = _features(np.array(untils) - centre, np.array(ages))
    target = logit(shares)
    precision = design.T @ design + 1e-3 * np.eye(design.shape[1])
    mean = np.linalg.solve(precision, design.T @ target)
    residuals = target - design @ mean
    variance = float(residuals @ residuals) / max(1, len(target) - design.shape[1])
    random = np.random.default_rng(history.now)
    covariance = max(variance, 1e-12) * np.linalg.inv(precision)
    laws = random.multivariate_normal(mean, covariance, _DRAWS)
    ahead = np.arange(1, _AHEAD + 1)
    age = history.age
    kept = scale * expit(laws @ _features(np.full(_AHEAD, -age), age + ahead).T)
    fresh = []
    for later in range(_AHEAD):
        ages_to_come = np.arange(1, _AHEAD - later + 1)
        features = _features(np.full(len(ages_to_come), later), ages_to_come)
        fresh.append(scale * expit(laws @ features.T))
    train = _least([_total(kept, fresh, 0, k, history.price) for k in range(1, _AHEAD + 1)])
    waiting = [kept.sum(1)]
    for first in range(1, _AHEAD):
        for k in range(1, _AHEAD + 1):
            waiting.append(_total(kept, fresh, first, k, history.price))
    return float(np.quantile(_least(waiting) - train, _QUANTILE)) > 0


def _total(kept: Array, fresh: list[Array], first: int, every: int, price: float) -> Array:
    """Total cost, (draws,), of trainings `first` periods from now and then every so many.

    kept   losses of the model in service (draws, periods to come)
    fresh  losses of the model trained in each period to come, from then on (draws, periods)
    """
    total = kept[:, :first].sum(1)
    for start in range(first, _AHEAD, every):
        total = total + fresh[start][:, :every].sum(1) + price
    return np.asarray(total)


def _least(costs: list[Array]) -> Array:
    """The costs (draws,) of least mean."""
    means = [float(draws.mean()) for draws in costs]
    return costs[int(np.argmin(means))]


def _known_cells(history: History) -> tuple[list[int], list[int], list[float]]:
    """Until, age and loss of all known cells from age 0 on."""
    untils = []
    ages = []
    values = []
    for until in history.trained:
        for at in range(until, history.now + 1):
            untils.append(until)
            ages.append(at - until)
            values.append(history.loss(until, at))
    return untils, ages, values


def _features(until: Any, ages: Any) -> Array:
    """(cells, 3): 1, time of training and age, in units of 10 periods."""
    return np.column_stack([np.ones(len(ages)), until / 10, ages / 10])


def _standard(history: History) -> list[float]:
    """The served losses in deviations from the mean of the warm-up's."""
    losses = np.array(history.served())
    usual = losses[: history.start - history.first]
    deviation = max(float(usual.std(ddof=1)), 1e-12)
    return list(map(float, (losses - usual.mean()) / deviation))


def _fires(detector: Any, values: list[float]) -> bool:
    """Whether a detector of river sees a change at the last value."""
    for value in values:
        detector.update(value)
    return bool(detector.drift_detected)


def adwin(history: History) -> bool:
    """ADWIN (Bifet and Gavalda, 2007) of river on the losses in service.

    Tested at each loss, with short windows: by default it waits for 32 values.
    """
    from river.drift import ADWIN  # optional

    return _fires(ADWIN(clock=1, grace_period=5, min_window_length=3), _standard(history))


def page_hinkley(history: History) -> bool:
    """The test of Page (1954) and Hinkley (1971) of river, upwards, on the losses in service.

    The threshold is 4 deviations of the warm-up, by default 50 of a larger number of values.
    """
    from river.drift import PageHinkley  # optional

    return _fires(PageHinkley(min_instances=5, threshold=4, mode="up"), _standard(history))


def kswin(history: History) -> bool:
    """KSWIN (Raab, Heusinger and Schleif, 2020) of river on the losses in service.

    Windows of 4 beside 8 values, where no p-value reaches river's .005; so the level is .05.
    """
    from river.drift import KSWIN  # optional

    return _fires(KSWIN(alpha=0.05, window_size=12, stat_size=4, seed=0), _standard(history))


def _retraining(history: History) -> Retraining | None:
    """ALMA's advice; None where there are too few models."""
    try:
        return Retraining(history.matrix(), history.metric, history.period, price=history.price)
    except UserError:
        return None


def alma_plan(history: History) -> bool:
    """The plan of `alma advise --price`, asked anew each period: whether it trains now."""
    retraining = _retraining(history)
    return retraining is not None and retraining.plan.first == 0


def alma_due(history: History) -> bool:
    """`alma due --price`: unusual losses, or a plan that trains now and saves for certain."""
    retraining = _retraining(history)
    if retraining is None:
        return False
    if retraining.outlook.has_usual_losses and retraining.outlook.excess > 0:
        return True
    plan = retraining.plan
    return not retraining.unknown and plan.first == 0 and plan.savings[NEVER].low > 0


RULES: dict[str, Rule] = {
    "never": never,
    "always": always,
    "every k, best on the history": best_on_history,
    "5% worse than last time": worse_than_last_time,
    "CARA threshold": cara_threshold,
    "CARA periodic": cara_periodic,
    "UPF": upf,
    "ADWIN": adwin,
    "Page-Hinkley": page_hinkley,
    "KSWIN": kswin,
    "ALMA plan": alma_plan,
    "ALMA due": alma_due,
}
"""By name, in the order of the table. All are compared with the best cadence in hindsight."""
