"""Learning debt (Katz, arXiv 2604.06438), as far as losses alone allow it.

Read: the abstracts of both versions and the author's replication code. Debt is the divergence
(Kullback-Leibler) of the model in service from a shadow model that is always up to date. A
regression, calibrated on other paths, tells the regret of waiting one more period from the debt
and the age; a training is due when the regret times a scale is above the price (the policy "debt
utility"). The scale, of .25 to 8, is the one of least total cost. The regression is that of the
code: log(1 + regret) on debt, its square, log(1 + age) and its square, the regret cut at its 99.5%
quantile.

Ours, since there are no posteriors and, after the warm-up, no shadow model: the debt is the root of
the loss above that of a new model (the mean of first losses in service in the warm-up), in units
of the latter. Calibration and the choice of the scale use the warm-up, where each period has a
model. The code takes from the debt what it grows by in paths without drift; here no such path is
known, and age acts in the regression alone. So the author's finding that a proxy of the debt does
worse than the debt itself may apply. The author's best policy, a tuned threshold of the debt, would
be CARA's threshold with another level to compare with.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.history import History
from benchmarks.retraining.replay import least_cost

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
    usual = float(np.diagonal(losses, 1).mean())
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


def learning_debt(history: History) -> bool:
    """Train when the expected regret of one more period, times the tuned scale, exceeds the price.

    The decision rule of arXiv 2604.06438 (version 2, "debt utility"); see the module for what is
    ours.
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
