"""How often to retrain when the drift has just changed, and whether the plan stays the plan."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from alma.report.advice import retraining_words as words
from alma.report.advice.axes import Axes
from alma.report.advice.certainty import of_cadence
from alma.report.advice.change import DriftTest
from alma.report.advice.forecast import turns_up
from alma.report.advice.law import Change, Grace
from alma.report.advice.period import Period
from alma.report.advice.plan import PricedPlans, cheapest, enumerate_plans
from alma.report.advice.retraining import Retraining
from alma.report.advice.staleness import cells_without, fit_laws
from alma.report.losses import Losses, MeanOverSeeds
from alma.report.metric import NATS_A_TOKEN
from benchmarks.cadence_streams import HORIZON, STREAMS, make_world
from benchmarks.cadence_table import best_fixed, plan, table
from benchmarks.cadence_table import measure as measure_cell

from .synthetic import losses

KINDS = {stream.name: stream for stream in STREAMS}
MONTH = Period("month")


def advice(name, seed=50, **options):
    """The advice on a made-up stream."""
    return Retraining(make_world(KINDS[name], seed).history, NATS_A_TOKEN, MONTH, **options)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("onset at month 8 of 12", 1.25),
        ("onset at month 18 of 24", 1.25),
        ("a step every 6 months", 1.4),
        ("2 months of grace", 1.1),
        ("linear .01", 1.08),
    ],
)
def test_the_plan_is_near_the_best_fixed_cadence(name, most):
    """Also where the drift has just begun: one law for all of history cost twice the best."""
    for price in 0.02, 0.1:
        worlds = [make_world(KINDS[name], seed) for seed in (50, 51, 52)]
        costs = [world.cost(plan(world, price), price) for world in worlds]
        assert np.mean(costs) <= most * best_fixed(worlds, price)


def test_a_change_is_found_and_said():
    """On losses since then alone; savings hold the truth."""
    retraining = advice("onset at month 18 of 24", seed=52, price=0.1)
    assert retraining.laws.event == Change(18)
    assert "The drift changed 6 months before the last period: only" in str(words.lines(retraining))
    assert retraining.drifts
    assert retraining.plan.evident
    year = np.arange(1, HORIZON + 1)
    plans = enumerate_plans(HORIZON)
    index = plans.rhythms.index((retraining.plan.first, retraining.plan.every))
    true_saving = 0.02 * (year.sum() - plans.ages[index].sum() - (plans.ages[index] == 0) @ year)
    true_saving -= 0.1 * retraining.plan.trainings
    saving = retraining.plan.savings["never"]
    assert saving.low < true_saving < saving.high
    ended = advice("drift ends at month 6", price=0.1)
    assert ended.laws.event == Change(6)
    assert not ended.drifts
    grace = advice("2 months of grace")
    assert grace.laws.event == Grace(2)
    assert "Age adds nothing before 2 months." in words.lines(grace)


def test_streams_that_keep_their_drift_have_no_change():
    """Nor do streams without drift, which seldom seem to drift."""
    steady = ("linear .01", "sqrt", "hard months (AR .8)", "40% missing", "season", "one break")
    for name in steady:
        for seed in range(60, 65):
            assert not isinstance(advice(name, seed).laws.event, Change | Grace)
    drifting = sum(advice("no drift", seed).drifts for seed in range(60, 90))
    assert drifting == 0


@pytest.mark.parametrize("count", [12, 24, 40])
def test_a_recent_change_is_found_however_models_forget(count):
    """As the law says, linearly, by a curve that is not in the law, or not at all.

    The losses of cells differ by .005 nats, of models by .02, of months by .1.
    """
    found = []
    false = []
    for size, exponent in (0.03, 0.5), (0.01, 1.0), (0.03, 0.7), (0.0, 1.0):
        for seed in range(3):
            for since in 3, 4:
                matrix = forgetting(count, size, exponent, count - since, seed)
                event = DriftTest(*matrix).event(12)
                near = isinstance(event, Change) and abs(event.first - count + since) <= 1
                found.append(near)
            false.append(DriftTest(*forgetting(count, size, exponent, 0, seed, 0.01)).event(12))
    assert np.mean(found) >= 0.9
    assert false == [None] * len(false)


def forgetting(count, size, exponent, onset, seed, rate=0.02, noise=1.0):
    """Axes, losses and cells of models that lose size * age^exponent on the past.

    The stream drifts by `rate` nats a month since `onset`; 0: all the time.
    """
    random = np.random.default_rng(seed)
    at = np.arange(1.0, count + 1)
    axes = Axes(at, at)
    drift = rate * np.maximum(axes.ages_since(onset), 0)
    values = drift + size * np.maximum(-axes.ages, 0) ** exponent + random.normal(0, 0.1, count)
    values += noise * random.normal(0, 0.005, (count, count))
    values += noise * random.normal(0, 0.02, (count, 1))
    return axes, values, np.isfinite(values)


def test_the_law_with_a_change_keeps_what_models_forget():
    """Forgotten by age^.5 all along, since an onset 4 models ago linear drift."""
    axes, values, used = forgetting(24, 0.05, 0.5, 20, 0, noise=0)
    law = fit_laws(axes, values, used, Change(20))[0].law
    assert (law.c, law.b) == (1, pytest.approx(0.02))


def test_savings_are_withheld_if_the_change_is_too_recent():
    """Two models since then."""

    def loss(u, p, _):
        return 3 + 0.1 * abs(max(p, 10) - max(u, 10)) + 1e-3 * math.sin(9 * u + 7 * p)

    retraining = Retraining(losses(loss, count=12), NATS_A_TOKEN, MONTH, price=0.02)
    assert retraining.laws.event == Change(10)
    assert retraining.laws.just_changed
    text = words.answer(retraining)
    assert text.startswith("No evidence either way: the drift has just changed.")
    assert "against never" not in text
    assert not words.has_evidence(retraining)
    without_price = Retraining(losses(loss, count=12), NATS_A_TOKEN, MONTH)
    assert not words.has_evidence(without_price)
    assert of_cadence(without_price) == of_cadence(retraining)


@pytest.mark.parametrize(("slope", "price"), [(0.01, 0.02), (0.01, 0.1), (0.04, 0.02)])
def test_asked_every_month_the_plan_stays_the_plan(slope, price):
    """Without noise its cost is that of the best cadence, within 2%."""
    trained = list(range(1, 13))
    for now in range(12, 30):
        rows = []
        for until in trained:
            rows.append(
                tuple(3 + slope * max(p - until, (until - p) / 2) for p in range(1, now + 1))
            )
        known = Losses("", tuple(trained), tuple(range(1, now + 1)), (tuple(rows),))
        retraining = Retraining(known, NATS_A_TOKEN, MONTH, price=price)
        if retraining.plan.first == 0:
            trained.append(now)
    gaps = np.diff(trained[11:])
    cost = sum(price + slope * gap * (gap + 1) / 2 for gap in gaps) / gaps.sum()
    best = min((price + slope * gap * (gap + 1) / 2) / gap for gap in range(1, 13))
    assert cost <= 1.02 * best


def test_a_plan_counts_from_the_newest_model_or_test():
    """And names that period."""

    def loss(u, p, _):
        return 3 + 0.01 * abs(p - u)

    tests = losses(loss, count=12)
    newer = Losses("", (*tests.until, 14), tests.periods, ((*tests.seeds[0], (math.nan,) * 12),))
    before = Retraining(tests, NATS_A_TOKEN, MONTH, price=0.02)
    after = Retraining(newer, NATS_A_TOKEN, MONTH, price=0.02, counted_from="2024-02")
    assert before.plan.first == after.plan.first == 2
    assert "in 12 months, counted from 2024-02)" in words.answer(after)


def test_intervals_and_surprise():
    """A gain whose interval holds 0 is no gain; a rise of one loss is not that of several."""
    weak = advice("models differ by .04", 3, every=(1, 3))
    gain = weak.gain(1, 3)
    assert gain.low < gain.mean < gain.high
    half = gain.high - gain.mean
    without = [float(weak._extra(3, law) - weak._extra(1, law)) for law in weak.laws.without]
    jackknife = math.sqrt((len(without) - 1) * np.var(without))
    assert half >= 1.79 * jackknife  # Student's t of 11 degrees of freedom, 95%
    assert half <= 3 * jackknife

    def loss(u, p, _, rise, since):
        usual = 3 + 0.02 * (-1) ** p + 0.001 * ((u * p) % 5)
        return usual + rise * (u == 8 and p > since)

    def outlook(rise, since):
        models = range(1, 9)
        made = losses(lambda *cell: loss(*cell, rise, since), count=12, models=tuple(models))
        return Retraining(made, NATS_A_TOKEN, MONTH).outlook

    assert outlook(0.06, 11).excess == 0
    assert outlook(0.06, 8).excess > 0


def test_a_gain_whose_interval_holds_zero_is_no_gain(monkeypatch):
    """However large its mean is: the rarest cadence stands, and whether more pays is open."""
    retraining = advice("linear .04", every=(1, 3))
    assert retraining.choice == (1, False)
    uncertain = advice("linear .04", every=(1, 3))
    monkeypatch.setattr(Retraining, "gain", lambda *_: MeanOverSeeds(0.1, -0.01, 0.21))
    assert uncertain.drifts
    assert uncertain.choice == (3, True)


def test_a_curve_that_turns_up_is_seen():
    """Not one that falls, levels off or scatters."""
    t = np.arange(1, 21)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, 20))
    assert turns_up((0.3 + 0.002 * (t - 10) ** 2) * noise)
    assert not turns_up(t**-0.5 * noise)
    assert not turns_up(0.3 * noise)
    assert not turns_up([0.3, 0.2, 0.5])


def test_the_table_has_a_row_for_each_stream():
    """And the mean over cells whose best cost is above 0."""
    cell = measure_cell(KINDS["linear .01"], 0.1, 1, 0)
    zero = measure_cell(KINDS["no drift"], 0.1, 1, 0)
    rows = table([cell, zero])
    assert len(rows) == len(STREAMS) + 2
    assert rows[-1][0] == "mean of 1 cells"
    assert zero.text("every 3rd") == "+0.30"


def test_only_ages_since_a_change_were_measured():
    """In sentences, cadences and the slope."""
    retraining = advice("onset at month 18 of 24", seed=52)
    assert retraining.laws.event == Change(18)
    assert "Ages from 1 month to 6 months were measured" in str(words.lines(retraining))
    assert retraining.cadences == [1, 3, 6]
    law = retraining.laws.whole
    assert retraining.slope.mean == pytest.approx(law.b * 6**law.c / 6)
    assert retraining.aged_most == retraining.aged(6)
    steady = advice("24 models")
    assert "Ages from 1 month to 23 months were measured" in str(words.lines(steady))


def test_of_plans_of_equal_cost_the_latest_first_training_is_taken():
    """Without drift each plan of as many trainings costs the same."""
    plans = enumerate_plans(HORIZON)
    free = PricedPlans(plans, 0.0, np.zeros(len(plans.rhythms)))
    assert cheapest(free) == 0  # never
    once = np.flatnonzero(plans.trainings == 1)
    losses_but_once = np.ones(len(plans.rhythms))
    losses_but_once[once] = 0.0
    best = cheapest(PricedPlans(plans, 0.1, losses_but_once))
    assert plans.rhythms[best][0] == max(plans.rhythms[i][0] for i in once)


def test_newest_losses_that_do_not_fit_leave_no_evidence():
    """Drift that began or ended two models ago; not on streams that the law fits."""
    hits = []
    false = []
    for count in 12, 24:
        for seed in range(4):
            hits.append(DriftTest(*forgetting(count, 0.03, 0.5, count - 2, seed)).newest_fit())
            false.append(DriftTest(*forgetting(count, 0.03, 0.5, 0, seed, 0.01)).newest_fit())
            axes, values, used = forgetting(count, 0.03, 0.5, count - 2, seed, -0.02)
            values += 0.02 * np.maximum(axes.ages, 0)
            hits.append(DriftTest(axes, values, used).newest_fit())
    assert not any(hits)
    assert all(false)
    axes, values, _ = forgetting(24, 0.03, 0.5, 22, 0)
    rows = tuple(map(tuple, values.tolist()))
    known = Losses("", tuple(axes.until), tuple(axes.periods), (rows,))
    for price in 0.02, math.nan:
        retraining = Retraining(known, NATS_A_TOKEN, MONTH, price=price)
        assert retraining.laws.event is None
        text = " ".join(words.lines(retraining))
        assert text.startswith("No evidence either way: ")
        assert "The newest losses do not fit those before" in text
        assert of_cadence(retraining).startswith("Not known: the drift has just changed")
    assert "do not fit" not in " ".join(words.lines(advice("linear .01")))


def correlated(count, seed):
    """Axes, losses and cells without a change; cells correlate by .8 along models and periods."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((count + 40, count + 40))
    for axis in 0, 1:
        noise = lfilter([0.6], [1, -0.8], noise, axis=axis)
    at = np.arange(1.0, count + 1)
    axes = Axes(at, at)
    values = 0.01 * np.maximum(axes.ages, 0) + 0.005 * np.maximum(-axes.ages, 0)
    return axes, values + 0.005 * noise[40:, 40:], np.isfinite(values)


def test_correlated_cells_count_as_fewer():
    """Counted as whole cells, 8 of the 24 would have an event, and 3 of the 30 would not fit."""
    events = [DriftTest(*correlated(40, seed)).event(12) for seed in range(24)]
    assert sum(event is not None for event in events) <= 4
    assert all(DriftTest(*correlated(24, seed)).newest_fit() for seed in range(30))


def test_a_long_history_has_no_false_change_and_few_fits():
    """Of 120 models: terms of periods are taken out whole; three models are left out at once."""
    axes, values, used = forgetting(120, 0.03, 0.5, 0, 0, 0.001)
    test = DriftTest(axes, values, used)
    assert test.event(math.inf) is None
    cells = test._cells
    assert np.abs(np.bincount(np.nonzero(used)[1], cells._target)).max() < 1e-9
    parts = cells_without(axes)
    assert len(parts) == 40
    assert [int((~cells.any(1)).sum()) for cells in parts] == [3] * 40
    assert np.all(sum(~cells.any(0) for cells in parts) == 1)
    assert len(cells_without(Axes(axes.until[:40], axes.periods))) == 40
