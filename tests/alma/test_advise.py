"""`alma advise`: forecasts, the choice within limits, decisions with intervals, and the backtest."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from alma.report.advice.__main__ import main
from alma.report.advice.advice import advise, decision_table, forecast_table, front_table
from alma.report.advice.backtest import regrets_so_far
from alma.report.advice.candidates import find_candidates, forecasts, one_section
from alma.report.advice.choice import Limits
from alma.report.advice.decisions import difference_interval, run_error
from alma.report.advice.forecast import Fit
from alma.report.html.page import tables
from alma.report.results import find_runs, find_sections

from .synthetic import (
    B,
    averaged,
    drifting,
    error_of,
    image_run,
    law,
    lm_run,
    rename_metric,
    run_here,
    with_info,
)


def call(*arguments):
    """Run `alma advise` in this process."""
    return run_here(main, arguments)


def advice_on(place, by="coming", now=None, **limits):
    """The advice from the runs in a folder."""
    return advise(one_section(find_runs([place])), by, now, Limits(**limits))


def two_learners(place, seeds=2, gap=1.3, noise=0.02):
    """Runs of sm and, `gap` times as good for five times the compute, of ens."""
    for seed in range(seeds):
        image_run(place / f"sm{seed}", law(0.5 * gap, 0.4, 0.02, noise, seed), seed=seed)
        values = law(0.5, 0.4, 0.02, noise, 9 + seed)
        image_run(place / f"ens{seed}", values, seed=seed, learner="ens", members=5)


def test_the_better_learner_is_chosen_within_the_limits(tmp_path):
    two_learners(tmp_path)
    free = advice_on(tmp_path, now=20)
    assert free.choice.candidate.label == "ens w=1"
    (comparison,) = free.comparisons
    assert (comparison.question, comparison.advice) == ("one model or several?", "several")
    assert comparison.evidence
    assert 0 < comparison.low < comparison.difference < comparison.high
    # each run trains with 1 TFLOP per mega-batch
    assert [round(each.candidate.compute_until, 6) for each in free.found] == [B, B]
    assert advice_on(tmp_path, now=20, compute=B - 1).choice is None
    text = call(tmp_path, "--from", 20, "--budget", "39TFLOPs")
    assert (
        "No configuration stays within the limits: the least are 40 TFLOPs and 80 parameters" in text.stdout
    )


def test_a_run_with_fewer_rows_says_so_and_is_compared_at_the_same_t(tmp_path):
    """Of ens only t = 10 is known. There it is better, but not better than sm at t = 40."""
    two_learners(tmp_path, seeds=1, noise=0)
    image_run(tmp_path / "ens0", law(0.5, 0.4, 0.02), rows=11, learner="ens", members=5)
    found = advice_on(tmp_path)
    assert {each.candidate.label: each.candidate.now for each in found.found} == {"sm w=1": 40, "ens w=1": 10}
    shown = {row[0]: row[2] for row in forecast_table(found)}
    assert shown["ens w=1"].endswith(" (t=10)")
    assert "t=" not in shown["sm w=1"]
    assert front_table(found)[1][2].endswith(" (t=10)")
    (comparison,) = found.comparisons
    assert comparison.lower_now == "several"
    call(tmp_path, "--out", tmp_path)
    record = json.loads((tmp_path / "advice.json").read_text())
    assert {each["label"]: each["from"] for each in record["configurations"]} == {"sm w=1": 40, "ens w=1": 10}


def test_rows_after_the_chosen_mega_batch_are_not_read(tmp_path):
    two_learners(tmp_path / "a")
    for seed in (0, 1):
        for learner, gap, first in (("sm", 1.3, 0), ("ens", 1, 9)):
            values = law(0.5 * gap, 0.4, 0.02, 0.02, first + seed)
            other = values[:20] + [0.01 + t / 100 for t in range(B - 20)]
            members = {"members": 5} if learner == "ens" else {}
            image_run(tmp_path / "b" / f"{learner}{seed}", other, seed=seed, learner=learner, **members)
    one, two = (call(tmp_path / name, "--from", 20, "--by", "cer").stdout for name in "ab")
    assert one == two  # draws, too, are the same for the same records
    assert "t=1..40" in one
    assert call(tmp_path / "b").stdout != call(tmp_path / "a").stdout


def test_runs_of_one_seed_are_compared_in_pairs(tmp_path):
    """The seeds differ by 50%, the average is 2% better in each run; another order of seeds shows nothing."""
    for seed, level in enumerate((0.3, 0.5, 0.8)):
        values = law(level, 0.4, 0, 0.002, seed)
        averaged(image_run(tmp_path / f"{seed}", values, seed=seed, average=0.9), 0.98 - seed / 1000)
    (comparison,) = advice_on(tmp_path, now=20).comparisons
    assert (comparison.question, comparison.advice) == ("average the weights?", "average")
    candidate = comparison.other.candidate
    runs = tuple(
        replace(run, info={"config": run.config | {"seed": 3 + i}})
        for i, run in enumerate(candidate.result.runs)
    )
    others = replace(candidate, result=replace(candidate.result, runs=runs))
    apart = replace(comparison.other, candidate=others)
    low, high = difference_interval(comparison.question, comparison.choice, apart, [comparison.choice, apart])
    assert low < 0 < high


def test_the_error_of_a_difference_is_that_of_pairs_if_the_seeds_are_the_same(tmp_path):
    """Three answers to one question: two with seeds 0 to 2, and one with three other seeds."""
    for share, seeds in ((0, (0, 1, 2)), (0.5, (0, 1, 2)), (0.9, (3, 4, 5))):
        for seed in seeds:
            values = law(0.5 - share / 5, 0.4, 0.02, 0.05, seed + round(10 * share))
            image_run(tmp_path / f"{share}_{seed}", values, seed=seed, replay_share=share)
    found = forecasts(find_candidates(one_section(find_runs([tmp_path])), 20), "coming")
    by_share = {each.candidate.result.config["replay_share"]: each for each in found}
    logs = {share: np.log(each.run_totals) for share, each in by_share.items()}
    paired, freedom = run_error("replay?", by_share[0], by_share[0.5], found)
    difference = logs[0] - logs[0.5]
    assert (paired, freedom) == (pytest.approx(difference.std(ddof=1) / 3**0.5), 2)
    apart, freedom = run_error("replay?", by_share[0], by_share[0.9], found)
    variance = sum(each.var(ddof=1) for each in logs.values()) / 3
    assert (apart, freedom) == (pytest.approx((variance * (1 / 3 + 1 / 3)) ** 0.5), 6)
    assert abs(apart / paired - 1) > 0.1


def test_the_default_measure_is_of_the_mega_batches_to_come(tmp_path):
    """Waiting has cost much so far, but is better from now on."""
    for seed in range(3):
        level = 1 + seed / 100
        image_run(tmp_path / f"now{seed}", [0.2 * level] * B, seed=seed)
        image_run(tmp_path / f"wait{seed}", [0.9] * 9 + [0.15 * level] * (B - 9), 10, seed=seed)
    found = advice_on(tmp_path, now=20)
    assert found.choice.candidate.label == "sm w=10"
    assert found.choice.expected == pytest.approx(0.15, rel=0.1)
    (comparison,) = found.comparisons
    assert (comparison.question, comparison.advice) == ("train now or wait?", "wait (w=10)")
    assert advice_on(tmp_path, "cer", now=20).choice.candidate.label == "sm w=1"
    text = call(tmp_path, "--from", 20).stdout
    assert text.count("mean error (%) over t=21..40") >= 4
    assert found.record()["measure"] == "mean error (%) over t=21..40"
    assert "counts the past" in call(tmp_path, "--from", 20, "--by", "cer").stdout


def test_a_naive_rule_is_used_where_it_was_better(tmp_path):
    """The learner with the lowest error so far stays the best; the other falls fast before each origin."""
    image_run(tmp_path / "steady", [0.2] * B)
    falls = [0.3 * (1 - 0.004 * (t % 4)) if t < 30 else 0.3 for t in range(B)]
    noise = np.random.default_rng(0).normal(0, 0.2, B)
    image_run(tmp_path / "rough", (0.24 * np.exp(noise)).tolist(), size=16)
    image_run(tmp_path / "other", falls, size=32)
    found = advice_on(tmp_path, now=30)
    assert set(found.regrets) == {"forecast", "lowest so far", "lowest now"}
    assert found.regrets[found.rule] == min(found.regrets.values())
    if found.rule != "forecast":
        assert f'Chosen by "{found.rule}": regret' in found.summary[1]
    assert advice_on(tmp_path, now=4).regrets == {}


def test_the_rule_with_the_lowest_regret_chooses(tmp_path, monkeypatch):
    two_learners(tmp_path)
    regrets = {"forecast": 0.07, "lowest so far": 0.02, "lowest now": 0.1}
    monkeypatch.setattr("alma.report.advice.advice.regrets_so_far", lambda *_: regrets)
    found = advice_on(tmp_path, now=20)
    assert found.rule == found.record()["rule"] == "lowest so far"
    sentence = 'Chosen by "lowest so far": regret 2.0% against 7.0% of the forecasts'
    assert any(line.startswith(sentence) for line in found.summary)


def test_what_a_run_records_says_whether_it_is_several_or_grows(tmp_path):
    """Learners of one's own, as `recent` in docs/extend.md."""
    values = law(200, 0.2, 10, count=6)
    lm_run(tmp_path / "sm", values)
    lm_run(tmp_path / "recent", [each / 2 for each in values], "recent", members=[1, 2, 2, 2, 2, 2])
    lm_run(tmp_path / "mine", values, "mine", millions=[64, 70, 80, 90, 100, 110])
    answered = {each.question: each for each in advice_on(tmp_path, now=5).comparisons}
    assert list(answered) == ["one model or several?"]
    sides = {each.candidate.label: each.candidate.sides for each in advice_on(tmp_path, now=5).found}
    assert sides["recent w=1"]["one model or several?"] == "several"
    assert sides["mine w=1"]["grow the model?"] == "grow"
    assert sides["sm w=1"]["grow the model?"] == "keep the size"


def test_totals_count_the_present_model_until_the_next_stage(tmp_path):
    image_run(tmp_path / "sm", [0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3], w=4)
    candidates = find_candidates(one_section(find_runs([tmp_path])), 5)
    assert [candidates[0].ends, candidates[0].to_come] == [[4], [8, 10]]
    draws = np.array([[0.25, 0.2], [0.15, 0.1]])
    seen = 3 * 0.9 + 2 * 0.5  # t = 1..5
    came = [2 * 0.5 + 2 * first + last for first, last in draws]  # t = 6, 7; 8, 9; 10
    assert candidates[0].totals("cer", draws) == pytest.approx([seen + each for each in came])
    assert candidates[0].totals("average", draws) == pytest.approx([(seen + each) / 10 for each in came])
    assert candidates[0].totals("final", draws).tolist() == [0.2, 0.1]
    assert candidates[0].totals("coming", draws) == pytest.approx([each / 5 for each in came])
    assert candidates[0].measured("cer") == pytest.approx(seen)
    assert candidates[0].measured("coming", 3) == pytest.approx(0.5)


def test_what_comes_begins_after_the_run_that_is_furthest(tmp_path):
    """Of the run with fewer rows t = 5 to 8 have passed: they count in the sum, but do not come."""
    image_run(tmp_path / "behind", [0.5] * 12, rows=5, learner="ens")
    image_run(tmp_path / "ahead", [0.5] * 12, rows=9)
    candidates = find_candidates(one_section(find_runs([tmp_path])))
    (behind,) = (each for each in candidates if each.result.learner == "ens")
    assert (behind.now, behind.start, behind.to_come) == (4, 8, list(range(5, 13)))
    draws = np.array([[0.4] * 4 + [0.1] * 4])
    assert behind.totals("coming", draws) == pytest.approx([0.1])
    assert behind.totals("cer", draws) == pytest.approx([4 * 0.5 + 4 * 0.4 + 4 * 0.1])


def test_compute_to_come_follows_growing_costs(tmp_path):
    """With replay stage k costs k mega-batches."""
    image_run(tmp_path / "plain", law(0.5, 0.4, 0), w=4)
    image_run(tmp_path / "replay", law(0.5, 0.4, 0), w=4, replay=True)
    section = one_section(find_runs([tmp_path]))
    found = {each.result.config["replay"]: each for each in find_candidates(section, 12)}
    assert found[False].compute_until == pytest.approx(40)
    assert found[True].compute_until == pytest.approx(sum(range(4, 41, 4)))


def test_the_front_is_in_error_compute_and_parameters(tmp_path):
    image_run(tmp_path / "small", law(0.5, 0.4, 0), size=4)
    image_run(tmp_path / "large", law(0.4, 0.4, 0), size=8)
    image_run(tmp_path / "bad", law(0.6, 0.4, 0), size=8, learner="gmoe")
    image_run(tmp_path / "replay", law(0.3, 0.4, 0), size=8, replay=True)
    record = advice_on(tmp_path, now=20).record()
    front = {each["label"] for each in record["configurations"] if each["front"]}
    assert front == {"sm hidden=4 w=1", "sm hidden=8 w=1", "sm hidden=8 w=1 replay"}


def test_perplexity_at_the_end_of_the_stream_is_forecast_beyond_it(tmp_path):
    for w in (1, 2):
        run = lm_run(tmp_path / f"w{w}", [220.0, 166.0, 150.0, 140.0], w=w)
        with_info(run, command=f"alma train stream --waiting-time {w}")
    done = call(tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Choice by mean perplexity over t=5..6" in done.stdout
    assert "Command: alma train stream --waiting-time 1" in done.stdout
    record = json.loads((tmp_path / "out/advice.json").read_text())
    (now,) = (each for each in record["configurations"] if each["label"] == "sm w=1")
    assert [each["t"] for each in now["forecast"]] == [5, 6]
    low, high = now["forecast"][0]["intervals"]["0.9"]
    assert 110 < low < now["forecast"][0]["mean"] < high < 155
    assert "One seed" in record["remarks"][0]
    assert "Fewer than 3 stages" in record["remarks"][1]
    assert (tmp_path / "out/advice.md").read_text().startswith("# Advice: ")


def test_a_backtest_counts_what_came(tmp_path):
    two_learners(tmp_path / "runs", seeds=3)
    done = call(tmp_path / "runs", "--backtest", "--by", "cer", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "backtest.json").read_text())
    assert [each["t"] for each in record["origins"]] == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert record["all"]["stages"] == sum(2 * (B - t) for t in range(4, 40, 4))
    assert record["all"]["coverage_0.9"] > 0.85
    assert 0.4 < record["all"]["coverage_0.5"] < record["all"]["coverage_0.9"]
    assert record["all"]["forecast_error"] < record["all"]["naive_error"]
    assert record["all"]["small_regret"] == {"forecast": 1, "lowest so far": 1, "lowest now": 1}
    assert record["all"]["limits"] == 9
    assert "regret: lowest so far" in done.stdout


def test_a_wrong_advice_is_a_regret(tmp_path):
    """The learner that leads up to t = 20 stops learning there."""
    stops = law(0.4, 0.6, 0)
    image_run(tmp_path / "stops", stops[:20] + [stops[19]] * 20, size=16)
    image_run(tmp_path / "goes-on", law(0.45, 0.6, 0)[:20] + [0.01] * 20)
    done = call(tmp_path, "--backtest", "--by", "cer", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    early = json.loads((tmp_path / "backtest.json").read_text())["origins"][3]
    totals = [sum(stops[:20]) + 20 * stops[19], sum(law(0.45, 0.6, 0)[:20]) + 0.2]
    assert early["mean_regret"]["forecast"] == pytest.approx(totals[0] / totals[1] - 1, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--from", "0"], "--from 0: a mega-batch of the stream, from 1 to 4"),
        (["--from", "5"], "--from 5: a mega-batch of the stream, from 1 to 4"),
        (["--budget", "many"], "'many' is not a positive whole number"),
        (["--parameters", "0"], "'0' is not a positive whole number"),
        (["--backtest", "--from", "2"], "leave out --from"),
    ],
)
def test_bad_options_are_one_line(tmp_path, arguments, told):
    image_run(tmp_path / "run", law(0.5, 0.4, 0, count=4))
    assert told in error_of(call(tmp_path, *arguments))


def test_a_drifting_stream_is_pointed_out(tmp_path):
    drifting(image_run(tmp_path / "run", law(0.5, 0.4, 0, count=4)), lambda t, j: 0.5)
    done = call(tmp_path, "--from", 3)
    assert (done.returncode, "assume an i.i.d. stream" in done.stdout) == (0, True)


def _two_metrics(place):
    image_run(place / "a", law(0.5, 0.4, 0, count=4))
    rename_metric(image_run(place / "b", law(0.5, 0.4, 0, count=4), learner="ens"), "perplexity")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda place: place.mkdir(exist_ok=True), "no runs in"),
        (lambda place: image_run(place / "run", [0.5], rows=0), "no rows yet"),
        (lambda place: image_run(place / "run", [0.9, 0.9, 0.5], w=3, rows=3), "no stage is complete by t=2"),
        (_two_metrics, "runs of different streams, metrics or B"),
        (
            lambda place: [image_run(place / d, [0.5, 0.4], data=d) for d in ("aa", "bb")],
            "runs of different streams, metrics or B",
        ),
    ],
)
def test_unusable_records_are_one_line(tmp_path, make, told):
    make(tmp_path)
    assert told in error_of(call(tmp_path))


def test_a_backtest_needs_two_stages(tmp_path):
    image_run(tmp_path / "run", [0.9, 0.5], w=2)
    assert "at least two stages" in error_of(call(tmp_path, "--backtest"))


def test_an_error_of_zero_is_forecast(tmp_path):
    image_run(tmp_path / "run", [0.5, 0.0, 0.2, 0.0])
    (found,) = forecasts(find_candidates(one_section(find_runs([tmp_path])), 3), "final")
    assert np.isfinite(found.draws).all()
    assert math.isfinite(found.expected)


def test_the_page_shows_the_advice(tmp_path):
    two_learners(tmp_path)
    image_run(tmp_path / "other", law(0.5, 0.4, 0.02), data="other")
    with_advice, without = (list(tables(section, None)) for section in find_sections(find_runs([tmp_path])))
    assert with_advice[-1].title == "Advice"
    advice = advise(find_sections(find_runs([tmp_path]))[0], "coming")
    assert with_advice[-1].cells == decision_table(advice)
    assert "Lowest expected mean error (%) over t=41..41: ens w=1" in with_advice[-1].note
    assert "Advice" not in {table.title for table in without}


def test_the_order_of_the_seeds_changes_nothing(tmp_path):
    for place, names in (("a", "012"), ("b", "201")):
        for w, level in ((1, 0.5), (2, 0.4)):
            for seed, name in enumerate(names if w == 1 else "012"):
                errors = law(level, 0.3, 0.1, noise=0.05, seed=seed, count=12)
                image_run(tmp_path / place / str(w) / name, errors, w, seed=seed)
    one, other = (decision_table(advice_on(tmp_path / place)) for place in "ab")
    assert one == other
    assert len(one) > 1


def test_a_choice_among_configurations_behind_one_beyond_the_limits(tmp_path):
    for learner in ("ens", "umix"):
        image_run(tmp_path / learner, law(0.5, 0.3, 0.1, count=12), learner=learner, size=800)
    for learner in ("sm", "gmoe"):
        image_run(tmp_path / learner, law(0.5, 0.3, 0.1, count=12), learner=learner, rows=8)
    found = advice_on(tmp_path, parameters=100)
    assert found.choice.candidate.result.learner in ("sm", "gmoe")
    assert found.regrets == {}


def test_runs_without_a_trained_model_say_so_and_name_no_option(tmp_path):
    image_run(tmp_path / "run", [0.5] * 12, rows=1)
    said = error_of(call(tmp_path))
    assert "no stage is complete by t=0" in said
    assert "--from" not in said


def test_the_rule_needs_the_expected_measure_only(tmp_path, monkeypatch):
    """Draws and runs cost most of a forecast: looking back for the rule must not make them."""
    two_learners(tmp_path)
    (section,) = find_sections(find_runs([tmp_path]))
    found = forecasts(find_candidates(section), "coming")
    monkeypatch.setattr(Fit, "draw", None)
    assert regrets_so_far(section, "coming", found).keys() == {"forecast", "lowest so far", "lowest now"}
