"""Rules of when to retrain, from the literature and from ALMA.

A rule sees a `History` and says whether to train now. The rules of a paper are in a file of its
own, which says what they follow: `cara`, `upf`, `learning_debt`, `detectors`.
"""

import numpy as np

from alma.errors import UserError
from alma.report.advice.plan import NEVER
from alma.report.advice.retraining import Retraining
from benchmarks.retraining.cara import cara_cumulative, cara_periodic, cara_threshold
from benchmarks.retraining.detectors import adwin, kswin, page_hinkley
from benchmarks.retraining.history import History, Rule
from benchmarks.retraining.learning_debt import debt_threshold, debt_utility
from benchmarks.retraining.upf import upf

WORSE = 0.05
"""By which share a loss grows before "5% worse than last time" trains."""


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
    "CARA cumulative": cara_cumulative,
    "CARA periodic": cara_periodic,
    "UPF": upf,
    "learning debt, threshold": debt_threshold,
    "learning debt, utility": debt_utility,
    "ADWIN": adwin,
    "Page-Hinkley": page_hinkley,
    "KSWIN": kswin,
    "ALMA plan": alma_plan,
    "ALMA due": alma_due,
}
"""By name, in the order of the table. All are compared with the best cadence in hindsight."""
