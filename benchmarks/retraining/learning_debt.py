"""Learning debt (Katz, arXiv 2604.06438), as far as losses alone allow it.

Read: the abstracts of both versions and the author's replication code. Debt is the divergence
(Kullback-Leibler) of the model in service from a shadow model that is always up to date. Two of the
author's policies are here, by their names in the code. "Debt threshold", the best one: a training
is due when the root of the debt, without what it grows by with age in paths without drift, is above
a threshold. "Debt utility": a regression tells the regret of waiting one more period, and a
training is due when a scale times the regret is above the price. Threshold (quantiles of .5 to .99
of the debts seen) and scale (.25 to 8) are those of least total cost on past paths.

Ours, since there are no posteriors and, after the warm-up, no shadow model: the debt is the loss
above that of a new model (the mean of first losses in service in the warm-up), in units of the
latter. The author found that a proxy of the debt does worse than the debt itself. The past path is
the warm-up, where each period has a model. No path without drift is known; there, losses would not
grow with age, so nothing is taken off.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.history import History
from benchmarks.retraining.replay import least_cost

QUANTILES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)
"""Of the debts of the warm-up: the author's grid of thresholds."""
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Of the expected regret of one period, to be compared with the price: the author's grid."""
_CUT = 0.995


@dataclass(frozen=True)
class Calibration:
    """How the regret of waiting one period follows from the debt and the age."""

    usual: float
    """Loss of a new model."""
    coefficients: Array
    most: float
    """Largest regret, in units of `usual`."""

    def regret(self, loss: float, age: int) -> float:
        """Expected loss of the next period above that of a model trained now."""
        logarithm = float(_features(loss, age, self.usual) @ self.coefficients)
        share = min(max(float(np.expm1(logarithm)), 0.0), self.most)
        return self.usual * share


def calibrate(losses: Array) -> Calibration:
    """Fit the regrets of all models of the warm-up, (models, periods)."""
    usual = _usual(losses)
    features = []
    regrets = []
    for at in range(1, len(losses) - 1):
        for model in range(at):
            regret = losses[model, at + 1] - losses[at, at + 1]
            features.append(_features(losses[model, at], at - model, usual))
            regrets.append(max(float(regret), 0.0) / usual)
    coefficients = np.linalg.lstsq(np.array(features), np.log1p(regrets), rcond=None)[0]
    return Calibration(usual, coefficients, float(np.quantile(regrets, _CUT)))


def _features(loss: float, age: int, usual: float) -> Array:
    """1, debt, its square, log(1 + age), its square."""
    debt = max(float(loss) / usual - 1, 0.0) ** 0.5
    log_age = float(np.log1p(age))
    return np.array([1.0, debt, debt**2, log_age, log_age**2])


def debt_threshold(history: History) -> bool:
    """Train when the debt is above the tuned threshold ("debt threshold" of the author's code)."""
    losses = history.of_warm_up()
    usual = _usual(losses)
    debts = np.sqrt(np.maximum(losses / usual - 1, 0))
    later = np.triu_indices(len(losses), 1)
    thresholds = np.quantile(debts[later], QUANTILES).tolist()
    decisions = [partial(_exceeds, debts, threshold) for threshold in thresholds]
    threshold = thresholds[least_cost(losses, decisions, history.price)]
    share = history.loss(history.trained[-1], history.now) / usual
    return float(np.sqrt(max(share - 1, 0.0))) > threshold


def _usual(losses: Array) -> float:
    """Loss of a new model: the mean of the first losses in service."""
    return float(np.diagonal(losses, 1).mean())


def _exceeds(debts: Array, threshold: float, model: int, at: int) -> bool:
    return bool(debts[model, at] > threshold)


def debt_utility(history: History) -> bool:
    """Train when the regret of one more period, times the tuned scale, is above the price.

    "Debt utility" of the author's code: a regression of log(1 + regret) on the root of the debt,
    its square, log(1 + age) and its square; regrets are cut at their 99.5% quantile.
    """
    losses = history.of_warm_up()
    calibration = calibrate(losses)
    decisions = [partial(_pays, calibration, losses, history.price, scale) for scale in SCALES]
    scale = SCALES[least_cost(losses, decisions, history.price)]
    loss = history.loss(history.trained[-1], history.now)
    return scale * calibration.regret(loss, history.age) > history.price


def _pays(
    calibration: Calibration, losses: Array, price: float, scale: float, model: int, at: int
) -> bool:
    return scale * calibration.regret(float(losses[model, at]), at - model) > price
