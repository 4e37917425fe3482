"""Evidence for a cadence and a plan: intervals, surprises, prices at which the advice changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import titled
from alma.report.advice.staleness import Laws
from alma.report.losses import age_effect
from alma.report.metric import NATS_A_TOKEN

from .synthetic import losses
from .test_advise_drift import noisy


def test_a_gain_that_may_be_zero_is_no_reason_to_retrain_more_often():
    """Models get worse with their first month for certain, and hardly with the second."""
    stale_at_once = noisy(lambda u, p, _: 2 + 0.05 * (u != p), 0.015, seed=1, count=6)
    retraining = Retraining(
        stale_at_once, NATS_A_TOKEN, Period("month"), every=(1, 2), worth=(0.0, True)
    )
    gain = retraining.gain(1, 2)
    assert retraining.drifts
    assert gain.low < 0 < gain.mean
    assert (retraining.choice.every, retraining.choice.open) == (2, True)


@pytest.mark.parametrize(("months", "is_surprise"), [(1, False), (8, True)])
def test_many_slightly_high_losses_are_a_surprise_and_one_is_not(months, is_surprise):
    """Each is within the scatter of the losses before; together they are no accident."""
    hard = np.random.default_rng(0).normal(0, 0.02, 30)

    def loss(u, p, _):
        return 2 + hard[p] + 0.05 * (p > 8)

    served = losses(loss, count=8 + months, models=range(1, 9))
    outlook = Retraining(served, NATS_A_TOKEN, price=0.1).outlook
    assert outlook.has_usual_losses
    assert (outlook.excess > 0) == is_surprise


def test_the_interval_of_the_effect_of_age_is_students_over_periods():
    """Tukey's jackknife: of five periods it has four degrees of freedom."""
    matrix = noisy(lambda u, p, _: 2 + 0.03 * abs(p - u), 0.02, seed=3, count=5)
    effects = []
    for left_out in range(5):
        values = np.array(matrix.seeds[0])
        values[left_out] = math.nan
        values[:, left_out] = math.nan
        rows = tuple(map(tuple, values.tolist()))
        effects += age_effect(replace(matrix, seeds=(rows,)))
    half = stdtrit(4, 0.95) * math.sqrt(4 * np.var(effects))
    effect = Laws(matrix).effect_of_age()
    assert (effect.high - effect.mean, effect.mean - effect.low) == pytest.approx((half, half))


def test_a_plan_holds_between_the_two_prices_that_it_names():
    matrix = noisy(lambda u, p, _: 2 + 0.1 * abs(p - u), 0.001)

    def trainings(price):
        return Retraining(matrix, NATS_A_TOKEN, price=price).plan.trainings

    plan = Retraining(matrix, NATS_A_TOKEN, price=0.5).plan
    lowest, highest = plan.flips
    assert trainings(1.01 * lowest) == trainings(0.99 * highest) == plan.trainings
    assert trainings(0.99 * lowest) > plan.trainings > trainings(1.01 * highest)


def test_at_the_price_below_which_a_cadence_pays_it_pays_against_every_rarer_one():
    """Losses that level off: the third month adds little, so a year without training is cheap."""
    matrix = noisy(lambda u, p, _: 2 + 0.1 * min(abs(p - u), 2), 0.001, count=14)
    retraining = Retraining(matrix, NATS_A_TOKEN, Period("month"), every=(1, 3, 12))
    price = float(titled(retraining).cells[1][4].split()[0])

    def cost(every):
        return retraining.extra(every).mean + price / every

    rarer = min(cost(3), cost(12))
    assert cost(1) == pytest.approx(rarer, rel=0.01)
