"""Staleness and regret on made-up evaluation matrices with known laws."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alma.report import age
from alma.report.losses import age_effect, staleness, staleness_curve

from .synthetic import losses

B = 8
difficulty = st.lists(st.floats(1, 5), min_size=B, max_size=B)


@given(difficulty, st.floats(0.01, 0.5))
def test_staleness_is_the_loss_that_a_period_adds(hard, slope):
    """How difficult the periods are does not matter."""
    run_losses = losses(lambda t, j, _: hard[j - 1] + slope * abs(j - t))
    assert staleness(run_losses) == pytest.approx([slope])
    assert age_effect(run_losses) == pytest.approx([slope])
    curve = staleness_curve(run_losses)
    assert list(curve) == list(range(1 - B, B))
    assert curve[-3] == pytest.approx([3 * slope])
    assert curve[0] == [0]


@given(difficulty, difficulty, st.floats(0, 0.3))
def test_less_training_counts_as_staleness_but_not_as_effect_of_age(hard, trained, slope):
    """However the loss falls with training."""
    run_losses = losses(lambda t, j, _: hard[j - 1] + trained[t - 1] + slope * abs(j - t))
    assert age_effect(run_losses) == pytest.approx([slope], abs=1e-9)
    falls = losses(lambda t, j, _: hard[j - 1] - 0.3 * t + slope * abs(j - t))
    assert staleness(falls) == pytest.approx([0.3 + slope])


def test_a_model_that_keeps_the_past_has_half_the_effect():
    run_losses = losses(lambda t, j, _: 0.2 * max(0, j - t))
    assert staleness(run_losses) == pytest.approx([0.2])
    assert age_effect(run_losses) == pytest.approx([0.1])


def test_a_learner_that_waits_has_ages_with_a_model_of_that_period_only():
    run_losses = losses(lambda t, j, _: abs(j - t), models=(2, 4, 6, 8))
    assert list(staleness_curve(run_losses)) == [-6, -4, -2, 0, 2, 4, 6]


def test_a_missing_cell_does_not_count():
    run_losses = losses(lambda t, j, _: math.nan if (t, j) == (1, 4) else 0.1 * abs(j - t))
    assert staleness(run_losses) == pytest.approx([0.1])
    assert age.best_by_period([run_losses])[4] == 0


def test_regret_is_the_distance_from_the_best_model_of_any_configuration():
    old = losses(lambda t, j, _: j + 0.5 * abs(j - t))
    new = losses(lambda t, j, _: j + 0.25 + 0.1 * abs(j - t))
    best = age.best_by_period([old, new])
    assert best == pytest.approx({j: j for j in range(1, B + 1)})
    assert age.regret(old, best, lambda age: age == 1) == pytest.approx([0.5])
    assert age.regret(new, best, lambda age: age == 0) == pytest.approx([0.25])
    assert math.isnan(age.regret(new, best, lambda age: age > B)[0])


def test_the_best_model_is_chosen_by_its_mean_over_seeds():
    noisy = losses(lambda t, j, seed: 1 + (t == 1) * (-1 if seed else 2), seeds=2)
    assert age.best_by_period([noisy])[3] == 1


@pytest.mark.parametrize(("count", "quantile"), [(2, 6.313752), (3, 2.919986), (31, 1.697261)])
def test_intervals_are_those_of_student(count, quantile):
    """The quantiles at .95, of count - 1 degrees of freedom."""
    values = [float(i) for i in range(count)]
    half = quantile * statistics.stdev(values) / count**0.5
    mean, low, high = age.over_seeds(values)
    assert (high - mean, mean - low) == pytest.approx((half, half))
    assert all(map(math.isnan, age.over_seeds([1.0])[1:]))
