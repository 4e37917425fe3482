"""How often to retrain on a stream that drifts: laws, cadences, plans and their sentences."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from alma.errors import UserError
from alma.report.advice import retraining_words as words
from alma.report.advice.law import Break, Season
from alma.report.advice.period import Period, ordinal
from alma.report.advice.questions import NO_EVIDENCE
from alma.report.advice.retraining import Retraining, TrainingCost
from alma.report.advice.retraining_table import record, titled
from alma.report.advice.staleness import Laws, known_at
from alma.report.losses import Losses
from alma.report.metric import NATS_A_TOKEN
from benchmarks import cadence_calibration as calibration

from .synthetic import losses


def noisy(law, deviation=0.003, *, seed=0, **settings):
    """`losses` with normal noise."""
    random = np.random.default_rng(seed)
    return losses(lambda *cell: law(*cell) + random.normal(0, deviation), **settings)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_a_known_law_is_found(exponent):
    """However hard the periods are, and what training gains; what came later does not matter."""
    hard = [3.0, 2.0, 4.0, 1.0, 2.5, 3.5, 2.0, 1.5, 9.0, 5.0]
    run_losses = noisy(
        lambda u, p, _: hard[p - 1] + 0.1 * abs(p - u) ** exponent - 0.2 * math.log(u), count=10
    )
    laws = Laws(known_at(run_losses, 8))
    assert (laws.whole.c, laws.whole.amount) == (exponent, 8)
    for age in (1, 2, 4):
        estimated = laws.estimate(lambda law, age=age: float(law.extra(age, 100 - 8)))
        true = 0.1 * age**exponent + 0.2 * math.log(100 / (100 - age))
        assert estimated.low < true < estimated.high
        assert estimated.high - estimated.low < 0.12


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_season_of_the_calendar_is_told_from_drift(drift):
    """Months apart count by the time of the year: half a year adds 0.2 nats, a year nothing."""

    def loss(u, p, _):
        return 2 + drift * abs(p - u) + 0.2 * math.sin(math.pi * (p - u) / 12) ** 2

    retraining = Retraining(
        noisy(loss, 0.005, count=14), NATS_A_TOKEN, Period("month"), every=(1, 6, 12)
    )
    assert "The stream has a season: a model half a year old is 22% [" in " ".join(
        words.lines(retraining)
    )
    extra = {}
    for k in retraining.cadences:
        extra[k] = sum(loss(0, a, 0) - 2 for a in range(1, k + 1)) / k
    for k, rarer in (1, 6), (6, 12):
        gain = retraining.gain(k, rarer)
        assert gain.low < extra[rarer] - extra[k] < gain.high
    unnamed = Retraining(
        noisy(loss, 0.005, count=14), NATS_A_TOKEN
    )  # mega-batches have no calendar
    young = Retraining(noisy(loss, 0.005, count=9), NATS_A_TOKEN, Period("month"))
    few = Retraining(noisy(loss, 0.005, count=24, models=(1, 6, 13)), NATS_A_TOKEN, Period("month"))
    assert retraining.laws.event == Season(12)
    for without in unnamed, young, few:
        assert not isinstance(without.laws.event, Season)


@pytest.mark.parametrize("start", [1, -5])
def test_a_break_is_told_whatever_the_number_of_its_period(start):
    """The first period after it is the sixth one: 6 or, of labels from -5 on, 0."""
    run_losses = noisy(lambda u, p, _: 2 + 0.3 * ((u < 6) != (p < 6)), 0.0005, count=10)
    axis = tuple(range(start, start + 10))
    retraining = Retraining(replace(run_losses, until=axis, periods=axis), NATS_A_TOKEN)
    assert retraining.laws.event == Break(start + 5)
    assert words.lines(retraining)[2].startswith(
        "The stream broke 4 periods before the last period;"
    )


def test_without_losses_on_the_past_there_is_no_answer():
    run_losses = noisy(lambda u, p, _: 3 - 0.1 * math.log(u) if p >= u else math.nan)
    retraining = Retraining(run_losses, NATS_A_TOKEN, price=0.1)
    assert words.answer(retraining).startswith("No answer: without losses on the periods before")
    assert (words.advice_of(retraining), words.lines(retraining)) == (
        NO_EVIDENCE,
        [f"{words.answer(retraining)}."],
    )
    assert titled(retraining).cells[0] == ["training", "as last time", "cost of trainings to come"]
    assert json.loads(json.dumps(record(retraining)))["plan"] is None


def test_without_models_on_their_own_periods_there_is_no_answer():
    """What training gains cannot be taken out. One loss on the past is no evidence."""

    def loss(u, p, _, past=0):
        return 3 - 0.05 * u if p > u or u - p == past else math.nan

    two_later = noisy(lambda *cell: loss(*cell, 2), count=12)
    assert "No answer" in words.answer(Retraining(two_later, NATS_A_TOKEN))
    run_losses = noisy(
        lambda u, p, _: 3 - 0.05 * u if p >= u or (u, p) == (3, 2) else math.nan, count=12
    )
    assert words.advice_of(Retraining(run_losses, NATS_A_TOKEN)) == NO_EVIDENCE


def test_what_training_gains_shrinks_and_is_not_drift():
    retraining = Retraining(noisy(lambda u, p, _: 3 - 0.5 * math.log(u), seed=1), NATS_A_TOKEN)
    assert words.advice_of(retraining) == NO_EVIDENCE
    assert retraining.last_time(1) == pytest.approx(0.5 * math.log(8 / 7), abs=0.01)
    assert retraining.extra(1).mean < 0.7 * retraining.last_time(1)
    even = noisy(lambda u, p, _: 3 - 0.1 * u, count=24)  # no law of training: that of age takes it
    assert words.advice_of(Retraining(even, NATS_A_TOKEN)) == NO_EVIDENCE


def test_without_drift_slopes_lie_on_both_sides_of_zero():
    """Models cannot tell that a gain is exactly 0."""
    slopes = [
        Laws(noisy(lambda u, p, _: 3.0, seed=seed)).estimate(lambda law: law.b)
        for seed in range(10)
    ]
    bends = [Laws(noisy(lambda u, p, _: 3.0, seed=seed)).whole.bend[1] for seed in range(10)]
    assert sum(max(map(abs, bend)) < 0.001 for bend in bends) >= 6  # of noise of 0.003, shrunk
    assert min(slope.mean for slope in slopes) < 0 < min(slope.high for slope in slopes)
    assert sum(slope.low < 0 for slope in slopes) >= 8


@pytest.mark.parametrize(
    "curve", [lambda a: 0.1 - 0.1 * math.exp(-a), lambda a: 0.05 * max(0, a - 4)]
)
def test_intervals_hold_for_curves_outside_of_the_law(curve):
    run_losses = noisy(lambda u, p, _: 3 + (curve(p - u) if p > u else 0.02 * (u - p)), count=24)
    extra = Retraining(run_losses, NATS_A_TOKEN).gain(1, 6)
    true = sum(map(curve, range(1, 7))) / 6 - curve(1)
    assert extra.low < true < extra.high < 3 * true


def test_a_model_that_is_newer_than_all_tests_has_no_age():
    """As one that was trained until the last test."""
    run_losses = noisy(lambda u, p, _: 2 + 0.1 * abs(p - u), 0.0005, count=12)
    seeds = []
    for matrix in run_losses.seeds:
        seeds.append(tuple(row[:8] for row in matrix))
    early = Losses("", run_losses.until, run_losses.periods[:8], tuple(seeds))
    assert Retraining(early, NATS_A_TOKEN, price=0.5).plan.first == 3


@pytest.mark.parametrize("every", [(1, 3), (1, 3, 12), (1, 2, 3, 6), (1, 3, 6, 12, 24)])
def test_the_cadence_is_the_same_beside_any_others(every):
    """0.004 nats a month: 3 months lose 0.4% to 1 month, 6 months 1%."""
    run_losses = noisy(lambda u, p, _: 0.0045 * abs(p - u), 0.0005, count=14)
    retraining = Retraining(run_losses, NATS_A_TOKEN, Period("month"), every=every)
    assert words.advice_of(retraining) == "every quarter"


def test_costs_are_of_trainings_to_come():
    run_losses = noisy(lambda u, p, _: 0.1 * abs(p - u), 0.0005)
    retraining = Retraining(
        run_losses, NATS_A_TOKEN, Period("month"), TrainingCost(2.0, 3.0), (1, 3)
    )
    assert titled(retraining).cells[2][-1] == "4 trainings a year, 8 TFLOPs, 12 GPU-hours"
    assert words.answer(retraining).startswith(
        "Every month, 12 trainings a year, 24 TFLOPs, 36 GPU-hours: 11% ["
    )
    pays = (
        3 / 2 * retraining.gain(1, 3).mean
    )  # the price at which 12 and 4 trainings in 12 months cost as much
    assert float(titled(retraining).cells[1][4].split()[0]) == pytest.approx(pays, rel=0.01)
    in_money = replace(retraining, money=10)
    assert float(titled(in_money).cells[1][4].split()[0]) == pytest.approx(10 * pays, rel=0.01)
    assert [Period("month").every(k) for k in (1, 3, 12)] == [
        "every month",
        "every quarter",
        "once a year",
    ]


def test_cadences_have_english_ordinals():
    suffixes = {
        "st": (1, 21, 101),
        "nd": (2, 22, 102),
        "rd": (3, 23, 103),
        "th": (4, 11, 12, 13, 20, 111),
    }
    for suffix, numbers in suffixes.items():
        assert [ordinal(k) for k in numbers] == [f"{k}{suffix}" for k in numbers]
    assert [Period("mega-batch").every(k) for k in (1, 3, 21)] == [
        "every mega-batch",
        "every 3rd mega-batch",
        "every 21st mega-batch",
    ]


@pytest.mark.parametrize(
    ("price", "first", "every", "trainings"),
    [(0.0, 1, 1, 11), (0.5, 3, 3, 3), (2, 6, 12, 1), (9, None, 1, 0)],
)
def test_a_price_gives_the_cheapest_plan(price, first, every, trainings):
    """Loss 0.1 a period: k periods cost 0.05 k (k + 1); the present model is new."""
    retraining = Retraining(
        noisy(lambda u, p, _: 2 + 0.1 * abs(p - u), 0.001), NATS_A_TOKEN, price=price
    )
    assert (retraining.plan.trainings, retraining.plan.first) == (trainings, first)
    assert trainings < 2 or retraining.plan.every == every
    assert retraining.plan.flips[0] <= price <= retraining.plan.flips[1]
    assert ("never" in retraining.plan.savings) == (trainings > 0)
    for mean, low, high in retraining.plan.savings.values():
        assert max(low, -1e-9) <= mean <= high
    assert ("retraining every period" in retraining.plan.savings) == (
        price > 0
    )  # none that gains nothing


def test_savings_are_told_by_the_law_that_chose_the_plan():
    """Where loss falls with age, a plan that trains does not say that it loses by it."""
    plans = [
        Retraining(noisy(lambda u, p, _: 3.0, seed=i), NATS_A_TOKEN, price=0.0002).plan
        for i in range(10)
    ]
    assert any(plan.trainings for plan in plans)
    assert min(saving.mean for plan in plans for saving in plan.savings.values()) > -1e-9


def test_periods_are_named_and_counted_by_their_labels():
    week = Period.of(["2025-W52", "2026-W01"])
    assert (week.noun, week.every(4), week.every(52)) == ("week", "every 4 weeks", "once a year")
    assert Period.of(["2025-Q4"]).noun == "quarter"
    uneven = (["2025-12", "2026-02"], ["2020..2021", "2022"], [])
    assert {Period.of(labels) for labels in uneven} == {Period("mega-batch")}
    retraining = Retraining(
        noisy(lambda u, p, _: 0.1 * abs(p - u), 0.0005), NATS_A_TOKEN, week, every=(1, 4)
    )
    assert [row[-1] for row in titled(retraining).cells[1:]] == [
        "52 trainings a year",
        "13 trainings a year",
    ]


def test_a_jump_of_the_served_loss_is_a_reason_to_retrain():
    hard = np.random.default_rng(0).normal(0, 0.02, 13)
    for jump, first in ((0, None), (0.5, 0)):
        run_losses = losses(
            lambda u, p, _, j=jump: 2 + hard[p] + j * (p > 10), count=12, models=range(1, 9)
        )
        assert Retraining(run_losses, NATS_A_TOKEN, price=0.3).plan.first == first


def test_streams_without_drift_are_no_evidence_and_drift_is_found():
    """Of 40 matrices a twentieth may show evidence: 5 or fewer with a probability of 98%."""
    for kind in calibration.STREAMS[:2]:
        assert calibration.outcome(kind, 8, 1, 40)[0] <= 5 / 40
    more_often, _, held = calibration.outcome(calibration.STREAMS[3], 12, 1, 40)
    assert more_often > 0.9
    assert held >= 32 / 40
    assert calibration.outcome(calibration.STREAMS[6], 12, 1, 20)[0] <= 0.1  # one break is no trend


def test_a_saving_that_may_be_zero_is_no_advice():
    """M2: a plan that saves 1.3M [-23M, 26M] said "Retrain in 1 week, then every week"."""
    hardly = noisy(lambda u, p, _: 2 + 0.004 * abs(p - u), 0.02, count=7)
    found = Retraining(hardly, NATS_A_TOKEN, Period("week"), price=0.05, money=1000.0)
    plan = found.plan
    assert plan.trainings
    assert plan.savings["never"].low < 0 < plan.savings["never"].high
    assert not plan.evident
    answer = words.answer(found)
    assert answer.startswith('No evidence either way: "Retrain in ')
    saving = plan.savings["never"].text(1000.0)
    assert f"may save {saving} against never, in the unit of --price: the interval" in answer
    assert answer.endswith("the cheaper course is not to retrain")
    assert words.advice_of(found) == NO_EVIDENCE
    assert words.would_change(found).startswith("Further weeks, with each model tested on them")


def test_a_plan_without_trainings_needs_evidence_too():
    flat = noisy(lambda u, p, _: 2.0, 0.03, count=7)
    found = Retraining(flat, NATS_A_TOKEN, Period("week"), price=1e-4)
    plan = found.plan
    if plan.first is None:
        assert plan.evident == (plan.savings["retraining every week"].low > 0)
    dear = Retraining(flat, NATS_A_TOKEN, Period("week"), price=100.0)
    assert (dear.plan.first, dear.plan.evident) == (None, True)
    assert words.answer(dear).startswith("Do not retrain (0 in 52 weeks): it costs ")
    assert " in all and saves " in words.answer(dear)


def test_a_rare_plan_says_that_a_frequent_one_may_cost_less():
    drifting = noisy(lambda u, p, _: 2 + 0.05 * abs(p - u), 0.02, count=7)
    prices = np.geomspace(0.005, 2, 12)
    plans = [Retraining(drifting, NATS_A_TOKEN, Period("week"), price=p) for p in prices]
    undecided = [
        found
        for found in plans
        if found.plan.evident and found.plan.undecided == ["retraining every week"]
    ]
    assert undecided
    for found in undecided:
        assert "No evidence against retraining every week, but" in words.answer(found)


def test_the_plan_in_json_has_the_unit_of_the_answer():
    made = noisy(lambda u, p, _: 2 + 0.05 * abs(p - u), 0.002, count=8)
    found = Retraining(made, NATS_A_TOKEN, Period("month"), price=0.4, money=1000.0)
    plan = record(found)["plan"]
    assert (plan["evidence"], plan["unit"], plan["price"]) == (True, "the unit of --price", 400)
    for name, saving in plan["savings"].items():
        exact = found.plan.savings[name]
        assert saving["mean"] == pytest.approx(1000 * exact.mean, rel=1e-5)
        assert f"{exact.text(1000.0)} against {name}" in words.answer(found)
    assert plan["total"] == pytest.approx(1000 * found.plan.total, rel=1e-5)
    plain = Retraining(made, NATS_A_TOKEN, Period("month"), price=0.4)
    assert record(plain)["plan"]["unit"] == "nats a token summed over periods"
    assert record(plain)["plan"]["savings"]["never"]["mean"] == pytest.approx(
        plain.plan.savings["never"].mean, rel=1e-5
    )


@pytest.mark.parametrize(
    ("models", "periods", "enough"),
    [
        ((1, 2, 3), (1, 2, 3), True),
        ((1, 2), (1, 2, 3, 4), False),  # two models
        ((1, 2, 3), (1, 2), False),  # one cell of age above 0
    ],
)
def test_how_many_cells_of_age_above_0_the_laws_take(models, periods, enough):
    rows = tuple(tuple(2 + 0.1 * abs(p - u) for p in periods) for u in models)
    made = Losses("made up", models, periods, (rows,))
    if enough:
        assert Laws(made).whole.b >= 0
        return
    with pytest.raises(UserError, match="fewer than 3"):
        Laws(made)


def test_two_cells_are_too_few_though_none_of_a_period_is_all():
    def loss(u, p):
        return 2 + 0.1 * abs(p - u) if p <= u or (u, p) in ((1, 2), (3, 4)) else math.nan

    rows = tuple(tuple(loss(u, p) for p in range(1, 5)) for u in range(1, 5))
    made = Losses("made up", tuple(range(1, 5)), tuple(range(1, 5)), (rows,))
    with pytest.raises(UserError, match="fewer than 3 cells of age above 0"):
        Laws(made)


def test_cells_that_all_belong_to_one_model_tell_nothing():
    """The jackknife without its period would have none, so that b were 0 by default."""

    def loss(u, p):
        return 2 + 0.1 * abs(p - u) if p <= u or u == 1 else math.nan

    rows = tuple(tuple(loss(u, p) for p in range(1, 8)) for u in range(1, 8))
    made = Losses("made up", tuple(range(1, 8)), tuple(range(1, 8)), (rows,))
    assert sum(map(len, (made.by_age[age] for age in made.by_age if age > 0))) == 6
    with pytest.raises(UserError, match="3 cells of age above 0 of several models and periods"):
        Laws(made)
