"""Rules of the papers: by hand, and a claim of each paper on a made-up stream of its kind."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from alma.report.advice.law import Array
from benchmarks.retraining import rules, upf
from benchmarks.retraining.detectors import fires
from benchmarks.retraining.history import RetrainingStream, cost
from benchmarks.retraining.learning_debt import calibrate
from tests.benchmarks.retraining_made import (
    START,
    broken,
    bursts,
    circles,
    decisions,
    fading,
    history_at,
    least_possible_cost,
    linear,
    made,
    rule_named,
    turning_classes,
)

OF_CARA = ("CARA threshold", "CARA cumulative", "CARA periodic")

# By hand.


@pytest.mark.parametrize("name", OF_CARA)
def test_cara(name: str):
    """On 12 periods at .1 a period and a price of .25, training every 2nd costs least."""
    rule = rules.RULES[name]
    assert decisions(linear(0.1), rule, 0.25, 17) == [13, 15, 17]
    assert decisions(linear(0.1), rule, 0.05, 14) == [12, 13, 14]


def test_cara_never_trains_at_a_price_that_nothing_pays():
    for rule in (rules.cara_threshold, rules.cara_cumulative):
        assert decisions(linear(0.1), rule, 100.0, 20) == []


def test_cara_adds_up_staleness_or_looks_at_the_newest():
    """At a price of .55 every 4th costs least on the warm-up: .4, and .1 + .2 + .3 + .4 = 1.

    Then a staleness of .26 in each period never reaches .4, and its sum is 1.04 after 4 periods.
    """
    losses = linear(0.1).losses.copy()
    losses[START, START + 1 :] = 1.26
    stream = made(losses)
    assert decisions(stream, rules.cara_threshold, 0.55, 20) == []
    assert decisions(stream, rules.cara_cumulative, 0.55, 16) == [START + 4]
    assert decisions(stream, rules.cara_periodic, 0.55, 16) == [START + 4]


def _exact(slope: float, deviation: float = 1e-9) -> upf.Forecast:
    """Forecasts of .1 and a slope by age."""
    coefficients = np.array([0, 0, slope])
    return upf.Forecast(np.zeros(3), np.ones(3), 0.1, coefficients, deviation)


def test_upf_schedules_by_hand():
    """Each period a training: 12 losses of age 1. None: ages 4 to 15, 114 in all."""
    train, keep = upf.best_schedules(_exact(0.02), 5, 8, 0.0)
    assert (train.trainings, keep.trainings) == (12, 11)
    assert train.cost == pytest.approx(12 * 0.12)
    assert keep.cost == pytest.approx(11 * 0.12 + 0.18)
    train, keep = upf.best_schedules(_exact(0.02), 5, 8, 10.0)
    assert (train.trainings, keep.trainings) == (1, 0)
    assert keep.cost == pytest.approx(12 * 0.1 + 0.02 * 114)


@pytest.mark.parametrize("price", [0.05, 0.15, 0.4])
def test_upf_schedules_are_the_best_of_all(price: float, monkeypatch: pytest.MonkeyPatch):
    ahead = 7
    monkeypatch.setattr(upf, "AHEAD", ahead)
    costs: dict[bool, list[float]] = {True: [], False: []}
    for trains in product((False, True), repeat=ahead):
        until = 5
        total = 0.0
        for offset, is_training in enumerate(trains):
            if is_training:
                until = 8 + offset
                total += price
            total += 0.1 + 0.03 * (8 + offset + 1 - until)
        costs[trains[0]].append(total)
    train, keep = upf.best_schedules(_exact(0.03), 5, 8, price)
    assert train.cost == pytest.approx(min(costs[True]))
    assert keep.cost == pytest.approx(min(costs[False]))


def test_upf_fits_what_is_linear_and_knows_its_residuals():
    pytest.importorskip("sklearn")
    pairs = np.array([(until, at) for until in range(12) for at in range(until + 1, 12)])
    ages = pairs[:, 1] - pairs[:, 0]
    noise = np.random.default_rng(0).normal(size=len(pairs))
    fitted = upf.forecast(pairs, 0.2 + 0.02 * ages + 0.01 * noise)
    assert fitted.mean(11, 14) == pytest.approx(0.26, abs=0.01)
    assert fitted.deviation == pytest.approx(0.01, abs=0.003)


def test_upf_learns_from_all_known_pairs_in_service(monkeypatch: pytest.MonkeyPatch):
    """66 of the warm-up; of its 12 models on 2 periods since, 24; of the one trained since, 1."""
    pytest.importorskip("sklearn")
    seen = []

    def forecast(pairs: Array, losses: Array) -> upf.Forecast:
        seen.append((pairs, losses))
        return _exact(0.02)

    monkeypatch.setattr(upf, "forecast", forecast)
    upf.upf(history_at(linear(0.1), START + 2, trained=(START + 1,)))
    pairs, losses = seen[0]
    assert len(pairs) == 66 + 24 + 1
    ages = pairs[:, 1] - pairs[:, 0]
    assert ages.min() == 1
    assert pairs.max() == START + 2
    assert losses == pytest.approx((1 + 0.1 * ages) / 100)


def test_upf_high_costs_by_hand():
    """12 losses of mean .5 and deviation .1, two prices of 3: 12 + 1.645 x .1 x the root of 12.

    A share of 1.2 is one of 1, and cannot vary.
    """
    schedule = upf.PricedSchedule(0.0, 2, (0.5,) * 12)
    for is_bounded in (True, False):
        high = upf._high_cost(schedule, 3.0, _exact(0.0, 0.1), is_bounded)
        assert high == pytest.approx(12 + 0.5698, abs=1e-4)
    schedule = upf.PricedSchedule(0.0, 0, (1.2,) * 12)
    assert upf._high_cost(schedule, 3.0, _exact(0.0, 0.1), True) == pytest.approx(12)
    assert upf._high_cost(schedule, 3.0, _exact(0.0, 0.1), False) == pytest.approx(14.97, abs=0.01)


def test_upf():
    """Within a year a model gains 12 a or more at the slope a; a price above that never pays."""
    rule = rule_named("UPF")
    stream = linear(0.02, level=0.3)
    assert rule(history_at(stream, START + 3, 0.01))
    assert not rule(history_at(stream, START + 3, 5.0))
    assert not rule(history_at(linear(0.0, level=0.3), START + 3, 0.05))


def _two_breaks() -> RetrainingStream:
    """Models from before period 6, and later from before period 14, lose .5 more."""
    losses = broken(14, 0.5, noise=0).losses
    losses[:12, :12] = broken(6, 0.5, noise=0).losses[:12, :12]
    return made(losses)


def test_debt_threshold_by_hand():
    """27 of the 66 debts of the warm-up are of stale models, the others are 0.

    So the quantiles of .5 and .55 are 0, and a threshold of 0 trains at the break. With 36 stale
    ones, the least threshold is their debt itself, which nothing exceeds.
    """
    assert decisions(_two_breaks(), rules.debt_threshold, 0.1, 20) == []
    losses = broken(14, 0.5, noise=0).losses
    losses[:12, :12] = broken(9, 0.5, noise=0).losses[:12, :12]
    assert decisions(made(losses), rules.debt_threshold, 0.1, 20) == [14]


def test_debt_utility_by_hand():
    """Models from before a break lose J more: that is also the regret of waiting one period.

    At 3 J a training in period 6 costs 4 J in place of 6 J, with a scale of 4; at 7 J it never
    pays, and so the scale is one that does not train.
    """
    stream = _two_breaks()
    calibration = calibrate(stream.losses[:12, :12])
    assert calibration.usual == pytest.approx(1 + 0.5 / 11)
    assert calibration.regret(1.5, 3) == pytest.approx(0.5, rel=0.01)
    assert calibration.regret(1.0, 3) == pytest.approx(0, abs=0.01)
    assert decisions(stream, rules.debt_utility, 1.5, 20) == [14]
    assert decisions(stream, rules.debt_utility, 3.5, 20) == []


@pytest.mark.parametrize("name", ["ADWIN", "Page-Hinkley", "KSWIN"])
def test_detectors_fire_after_a_break_and_not_without(name: str):
    rule = rule_named(name)
    trained = decisions(broken(20, 0.5), rule, 0.1, 30)
    assert any(20 <= now <= 26 for now in trained)
    assert decisions(linear(0.0), rule, 0.1, 30) == []


def test_detectors_with_defaults_of_river_do_nothing_in_so_few_periods():
    """A jump by 4 deviations of the warm-up's losses, 24 periods before the end."""
    drift = pytest.importorskip("river.drift")
    losses = 1 + 0.1 * np.random.default_rng(3).normal(size=48) * np.ones((48, 48))
    losses[:, START + 1 :] += 0.4
    stream = made(losses)
    for detector in (drift.ADWIN, drift.PageHinkley, drift.KSWIN):
        for now in range(START + 1, START + 25):
            assert not fires(detector(), history_at(stream, now))
    assert decisions(stream, rules.page_hinkley, 0.1)


def test_page_hinkley_by_hand():
    """Losses of deviation 1 around 1, then one of 6 deviations: the sum is above 4 at once."""
    pytest.importorskip("river")
    losses = np.ones((20, 20)) + 0.1 * (-1.0) ** np.arange(20)
    losses[:, START + 1] = 1.8
    assert rules.page_hinkley(history_at(made(losses), START + 1))
    losses[:, START + 1] = 1.1
    assert not rules.page_hinkley(history_at(made(losses), START + 1))


# Claims.


def _mean_costs(
    make: Callable[[int], RetrainingStream], seeds: int, ratio: float, names: tuple[str, ...]
) -> dict[str, float]:
    """Costs over that of the oracle, the mean over streams; price: a share of a new loss."""
    costs: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        stream = make(seed)
        price = ratio * _typical(stream.losses)
        oracle = least_possible_cost(stream, START, 35, price)
        for name in names:
            costs[name].append(cost(stream, rules.RULES[name], START, 35, price) / oracle)
    return {name: float(np.mean(values)) for name, values in costs.items()}


def _typical(losses: Array) -> float:
    return float(np.diagonal(losses)[: START + 1].mean())


def test_cara_costs_less_than_always_and_never_and_nearly_as_little_as_the_oracle():
    """Abstract of arXiv 2310.04216, on drift of the inputs."""
    costs = _mean_costs(turning_classes, 3, 0.5, ("never", "always", *OF_CARA))
    for name in OF_CARA:
        assert costs[name] < min(costs["always"], costs["never"])
        assert costs[name] < 1.16


def test_thresholds_of_cara_cost_less_than_always_and_never_where_the_concept_jumps():
    """As above, on drift of the concept; the period, which cannot follow jumps, does not."""
    costs = _mean_costs(circles, 8, 0.3, ("never", "always", *OF_CARA))
    for name in ("CARA threshold", "CARA cumulative"):
        assert costs[name] < min(costs["always"], costs["never"])
    assert costs["CARA periodic"] > costs["CARA threshold"]


@pytest.mark.parametrize("name", OF_CARA)
def test_cara_trains_less_often_at_a_higher_price_and_as_the_drift_asks(name: str):
    """CARA adapts to different drifts and costs of training (abstract of arXiv 2310.04216)."""
    rule = rules.RULES[name]
    counts = [len(decisions(linear(0.05, noise=0.01), rule, price)) for price in (0.02, 0.5)]
    assert counts[0] > counts[1]
    counts = [len(decisions(linear(slope, noise=0.001), rule, 0.1)) for slope in (0.005, 0.1)]
    assert counts[0] < counts[1]


def test_upf_costs_less_than_others_with_few_points(monkeypatch: pytest.MonkeyPatch):
    """UPF beats CARA, detectors, always and never with few examples (arXiv 2505.14903).

    On gradual drift, with 5 periods before the first decision. CARA's period, which suits a steady
    drift, costs about the same.
    """
    warm = 5
    monkeypatch.setattr("benchmarks.retraining.history.WARM", warm)
    dearer = ("never", "always", "CARA threshold", "CARA cumulative", "ADWIN", "KSWIN")
    names = ("UPF", *dearer, "CARA periodic")
    totals = dict.fromkeys(names, 0.0)
    for name in names:
        rule = rule_named(name)
        for seed in range(4):
            totals[name] += cost(fading(seed), rule, warm - 1, warm + 15, 0.3 * 30)
    assert totals["UPF"] < min(totals[name] for name in dearer)
    assert totals["UPF"] < 1.02 * totals["CARA periodic"]


@pytest.mark.parametrize("price", [0.1, 0.3, 1.0])
def test_learning_debt_costs_less_than_tuned_calendars_where_drift_comes_in_bursts(price: float):
    """A threshold of debt improves on tuned calendars (abstract of arXiv 2604.06438).

    Costs are prices and losses above those of a new model, which are 24.
    """
    calendars = ("every k, best on the history", "CARA periodic")
    totals = dict.fromkeys(("learning debt, threshold", *calendars), 0.0)
    for seed in range(20):
        stream = bursts(seed)
        for name in totals:
            totals[name] += cost(stream, rules.RULES[name], START, 35, price) - 24
    for name in calendars:
        assert totals["learning debt, threshold"] < 0.9 * totals[name]
