"""The laws of `alma advise`: their likelihood, noise and drift."""

import numpy as np
import pytest

from alma.report.advice.candidates import DRAWS
from alma.report.advice.forecast import (
    Fit,
    LearningCurve,
    estimate_scatter,
    interval,
    shared_priors,
)

from .synthetic import law


@pytest.mark.parametrize(("exponent", "offset"), [(0.4, 0.0), (0.4, 0.05), (0.9, 0.1)])
def test_a_known_law_is_forecast(exponent, offset):
    values = np.array(law(0.5, exponent, offset, count=100))
    curve = LearningCurve(np.arange(1.0, 51), values[None, :50])
    draws = Fit(curve, estimate_scatter([curve])).draw(
        range(51, 101), DRAWS, np.random.default_rng(0)
    )[0]
    low, high = interval(draws)
    assert np.all(abs(np.log(np.median(draws, 0) / values[50:])) < 0.05)
    assert np.mean((low <= values[50:]) & (values[50:] <= high)) > 0.95


def test_noise_and_drift_come_from_residuals():
    t = np.arange(1.0, 101)
    for noise in (0.2, 0.002):
        curves = [np.array(law(0.5, 0.4, 0.02, noise, seed, 100))[None] for seed in range(4)]
        scatter = estimate_scatter([LearningCurve(t, curve) for curve in curves])
        assert 0.5 * noise < scatter.noise < 2 * noise + 0.005
        assert scatter.drift <= 1  # the grid of laws is not infinitely fine
    steps = np.random.default_rng(0).normal(0, 0.2, (4, 100)) * np.sqrt(
        np.diff(np.log(t), prepend=0)
    )
    walks = [np.exp(np.log(law(0.5, 0.4, 0.02, 0.01, 9, 100)) + step.cumsum()) for step in steps]
    assert estimate_scatter([LearningCurve(t, walk[None]) for walk in walks]).drift > 0


def test_the_noise_of_a_run_shows_between_seeds_of_short_curves():
    """Three stages tell no law; steps of nine seeds tell the noise of one stage, not of a step."""
    t = np.array([1.0, 2.0, 4.0])
    random = np.random.default_rng(0)
    curves = []
    for _ in range(10):
        noise = random.normal(0, 0.05, (9, 3))
        curves.append(LearningCurve(t, 0.5 * t**-0.4 * np.exp(noise)))
    assert estimate_scatter(curves).noise == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("change", [0.0, 0.1])
def test_a_curve_that_stops_to_fall_soon_after_stays_in_its_interval(change):
    """No curve shows it before: half of the later stages and more must be in the interval."""
    t = np.arange(1.0, 101)
    values = 0.5 * np.minimum(t, 25) ** -0.5 * np.maximum(t / 25, 1) ** -change
    curve = LearningCurve(t[:20], values[None, :20])
    draws = Fit(curve, estimate_scatter([curve])).draw(t[20:], DRAWS, np.random.default_rng(0))[0]
    low, high = interval(draws)
    assert np.mean((low <= values[20:]) & (values[20:] <= high)) > 0.5


def test_a_learner_with_one_stage_takes_half_of_its_prior_from_the_others():
    """Three learners fall as t^-.8; what is expected of a fourth lies between that and no
    knowledge."""
    t = np.arange(1.0, 21)
    random = np.random.default_rng(0)
    curves = [
        LearningCurve(t, 0.5 * t**-0.8 * np.exp(0.01 * random.normal(size=(3, 20))))
        for _ in range(3)
    ]
    new = LearningCurve(np.array([20.0]), np.full((3, 1), 0.2))
    scatter = estimate_scatter([*curves, new])
    alone, shared = (
        Fit(new, scatter, 3, shared_priors(peers, scatter)[-1]) for peers in ([new], [*curves, new])
    )
    assert shared.expected([40])[0] < 0.5 * alone.expected([40])[0] + 0.5 * 0.2 * 2**-0.8 + 0.005
    assert np.array_equal(alone.probability, Fit(new, scatter).probability)
