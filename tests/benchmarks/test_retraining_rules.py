"""`python -m benchmarks retraining`: rules by hand, nothing of the future, streams, the table."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from alma.errors import UserError
from alma.report.advice.law import Array
from alma.report.advice.matrix import read_groups
from alma.report.advice.period import Period
from benchmarks.retraining import rules
from benchmarks.retraining.costs import RuleCost, costs_of, read_costs, start_points, write_costs
from benchmarks.retraining.forecast_stream import matrix_of_mape
from benchmarks.retraining.history import WARM, RetrainingStream, Rule, UnknownLossError, cost
from benchmarks.retraining.language_stream import matrix_of_bits
from benchmarks.retraining.main import main
from benchmarks.retraining.streams import read_stream, write_matrix
from benchmarks.retraining.table import as_markdown, cells_of, score
from tests.benchmarks.retraining_made import (
    ERROR,
    START,
    broken,
    decisions,
    history_at,
    linear,
    rule_named,
)


def with_future(stream: RetrainingStream, now: int, future: Array) -> RetrainingStream:
    """The stream with other losses on periods after `now`, and of models trained after it."""
    losses = future.copy()
    losses[: now + 1, : now + 1] = stream.losses[: now + 1, : now + 1]
    return RetrainingStream(stream.name, losses, stream.metric, stream.period)


@pytest.mark.parametrize("name", rules.RULES)
@pytest.mark.parametrize(("now", "trained"), [(13, ()), (20, (15,)), (30, (14, 22))])
def test_no_rule_sees_the_future(name: str, now: int, trained: tuple[int, ...]):
    """The decision is the same when what is to come is permuted, or NaN."""
    rule = rule_named(name)
    stream = linear(0.03, noise=0.02)
    expected = rule(history_at(stream, now, trained=trained))
    permuted = np.random.default_rng(2).permutation(stream.losses.ravel())
    for future in (permuted.reshape(stream.losses.shape), np.full(stream.losses.shape, np.nan)):
        changed = with_future(stream, now, future)
        assert rule(history_at(changed, now, trained=trained)) == expected


def test_a_history_refuses_the_future_and_models_that_nobody_trained():
    history = history_at(linear(0.1), 14)
    assert history.loss(11, 14) == pytest.approx(1.3)
    for until, at in ((11, 15), (13, 14), (15, 14)):
        with pytest.raises(UnknownLossError):
            history.loss(until, at)
    assert np.isfinite(history.matrix().seeds).all()
    assert len(history.matrix().until) == WARM


def test_costs_are_losses_in_service_and_prices():
    """From period 12 on, ages 1, 2, 1, 2: losses of 1.1 and 1.2, and one training."""
    stream = linear(0.1)
    total = cost(stream, partial(rules.every, 2), START, START + 4, 0.5)
    assert total == pytest.approx(1.1 + 1.2 + 1.1 + 1.2 + 0.5)
    total = cost(stream, rules.never, START, START + 3, 0.5)
    assert total == pytest.approx(1.1 + 1.2 + 1.3)
    total = cost(stream, rules.always, START, START + 3, 0.5)
    assert total == pytest.approx(3 * 1.1 + 2 * 0.5)


def test_fixed_rules():
    stream = linear(0.1)
    assert decisions(stream, rules.never, 0.1) == []
    assert decisions(stream, rules.always, 0.1, 14) == [12, 13, 14]
    assert decisions(stream, partial(rules.every, 3), 0.1, 20) == [14, 17, 20]


@pytest.mark.parametrize(("price", "cadence"), [(0.05, 1), (0.25, 2), (0.55, 3), (0.95, 4)])
def test_best_on_the_history(price: float, cadence: int):
    """Mean cost of a cadence k at .1 a period: price / k + .05 (k - 1)."""
    history = history_at(linear(0.1), START + cadence, price)
    assert rules.best_on_history(history)
    if cadence > 1:
        assert not rules.best_on_history(history_at(linear(0.1), START + cadence - 1, price))


def test_every_k_best_in_hindsight(monkeypatch: pytest.MonkeyPatch):
    """Over 24 periods at .1 a period and a price of .25, by hand.

    Every 2nd: 12 x (1.1 + 1.2) and 11 trainings, 30.35. Every period: 24 x 1.1 and 23 trainings,
    32.15; every 3rd: 8 x (1.1 + 1.2 + 1.3) and 7 trainings, 30.55.
    """
    monkeypatch.setattr("benchmarks.retraining.costs.RULES", {"never": rules.never})
    monkeypatch.setattr("benchmarks.retraining.costs.RATIOS", (0.25,))
    row = costs_of(linear(0.1, 60), 1)[0]
    assert row.best == pytest.approx(30.35)
    assert row.cadence == 2
    assert row.cost == pytest.approx(24 + 0.1 * 300)


def test_five_percent_worse():
    """1.01, 1.02, ... 1.06 (ratio 1.0495), 1.07 (1.059)."""
    stream = linear(0.01)
    assert decisions(stream, rules.worse_than_last_time, 1, 20) == [START + 7]


@pytest.mark.parametrize("rule", [rules.alma_plan, rules.alma_due])
def test_rules_of_alma(rule: Rule):
    """A cheap training pays on clear drift, a dear one does not."""
    stream = linear(0.5, level=10.0, noise=0.02)
    assert rule(history_at(stream, START + 2, 0.2))
    assert not rule(history_at(stream, START + 1, 500.0))


def test_due_sees_a_break_that_the_price_does_not_pay():
    stream = broken(13, 5.0)
    assert not rules.alma_due(history_at(stream, 12, 1000.0))
    assert rules.alma_due(history_at(stream, 14, 1000.0))


# Streams and the table.


def test_the_sealed_end_is_in_no_open_cost():
    base = linear(0.1, 100)
    stream = RetrainingStream("made", base.losses, ERROR, Period("month"), sealed=20)
    assert start_points(stream, 9, sealed=False) == [11, 35]
    assert start_points(stream, 9, sealed=True) == [79]
    poisoned = base.losses.copy()
    poisoned[:, 80:] = np.nan
    other = RetrainingStream("made", poisoned, ERROR, Period("month"), sealed=20)
    cheap = {"never": rules.never, "debt": rules.debt_threshold, "ALMA plan": rules.always}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.retraining.costs.RULES", cheap)
        assert costs_of(stream, 9) == costs_of(other, 9)


def test_a_matrix_is_read_as_advise_reads_it(tmp_path: Path):
    values = 20 + np.abs(np.subtract.outer(np.arange(24), np.arange(24)))
    path = tmp_path / "made.csv"
    months = [f"{2020 + month // 12}-{month % 12 + 1:02}" for month in range(24)]
    write_matrix(path, "error (%)", months, values)
    assert read_groups([path])[0].period.noun == "month"
    assert read_stream("made", path).losses == pytest.approx(values)
    write_matrix(path, "error (%)", months[:9], values)
    with pytest.raises(UserError, match="9 periods, 24 are the least"):
        read_stream("made", path)


def test_the_table_counts_wins_ties_and_losses(tmp_path: Path):
    rows = []
    for name in rules.RULES:
        for start in (11, 35, 59):
            over = {"ALMA plan": 1.1, "UPF": 1.0, "never": 2.0}.get(name, 1.1)
            rows.append(RuleCost("made", name, 0.2, start, over * 10 + start / 1e4, 10.0, 3))
    cells = cells_of(rows)
    assert score(cells, "never") == (1, 0, 0)
    assert score(cells, "UPF") == (0, 0, 1)
    assert score(cells, "always") == (0, 1, 0)
    assert "| made | 0.2 | 1.100 | UPF | 1.000 |" in as_markdown(rows)
    write_costs(tmp_path / "costs.csv", rows)
    assert read_costs(tmp_path / "costs.csv") == rows


def test_models_of_bytes_know_their_own_period_best():
    random = np.random.default_rng(0)
    trained = []
    tested = []
    for letters in (b"abcd", b"efgh"):
        text = random.choice(np.frombuffer(letters, np.uint8), 3500)
        trained.append(text[:3000])
        tested.append(text[3000:])
    bits = matrix_of_bits(trained, tested)
    assert bits[0, 0] < bits[0, 1]
    assert 2.0 < bits[0, 0] < 2.6
    assert bits[1, 1] < bits[0, 1]


def test_an_autoregression_forecasts_what_it_was_fitted_to():
    steps = np.arange(400)
    series = 10 + np.sin(steps / 3)
    series[200:] = 10 + np.sin(steps[200:])
    errors = matrix_of_mape(series, 20, 60, 4)
    assert errors[2, 2] < 0.1
    assert errors[-1, -1] < 0.1
    assert errors[2, -1] > 1


def test_without_data_each_stream_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("river")
    arguments = ["--data", str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="give --data"):
        main([*arguments, "--streams", "git-areas,mnist-labels"])
    assert "left out: git-areas" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no stream rain: --streams takes git-areas"):
        main([*arguments, "--streams", "rain"])
