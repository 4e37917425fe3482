"""`alma advise`: the choice within a budget, decisions with intervals, the brief."""

import numpy as np
import pytest

from alma.report.advice.advice import advise, decision_table, front_table
from alma.report.advice.candidates import find_candidates, one_section
from alma.report.advice.comparison import Field, compare
from alma.report.page import tables
from alma.report.results import find_runs, find_sections
from benchmarks.advice_calibration import NOW, make_section

from .synthetic import (
    B,
    averaged,
    call_advise,
    edited,
    error_of,
    image_run,
    law,
    lm_run,
    rename_metric,
    with_info,
)


def advice_on(place, now=None, budget=None):
    """The advice from the runs in a folder."""
    return advise(one_section(find_runs([place])), now, budget)


def two_learners(place, seeds=2, gap=1.3, noise=0.02):
    """Runs of sm and, `gap` times as good for five times the compute, of ens."""
    for seed in range(seeds):
        image_run(place / f"sm{seed}", law(0.5 * gap, 0.4, 0.02, noise, seed), seed=seed)
        values = law(0.5, 0.4, 0.02, noise, 9 + seed)
        image_run(place / f"ens{seed}", values, seed=seed, learner="ens", members=5)


def test_the_better_learner_is_chosen_within_the_budget(tmp_path):
    two_learners(tmp_path)
    free = advice_on(tmp_path, 20)
    assert free.choice.label == "ens w=1"
    (comparison,) = free.comparisons
    assert (comparison.question, comparison.advice) == ("one model or several?", "several models")
    assert 0 < comparison.low < comparison.difference < comparison.high
    # each run trains with 1 TFLOP per mega-batch; what is spent does not count
    assert [round(candidate.compute, 6) for candidate in free.candidates] == [B - 20, B - 20]
    assert advice_on(tmp_path, 20, B - 21).choice is None
    text = call_advise(tmp_path, "--from", 20, "--budget", "19TFLOPs").stdout
    assert "No configuration stays within the budget: the least is 20 TFLOPs to come" in text


@pytest.mark.parametrize("words", [["--every", "1,3"], ["--price", "0.3"]])
def test_how_often_to_retrain_is_not_asked_of_a_stream_that_does_not_drift(tmp_path, words):
    two_learners(tmp_path)
    assert "--every and --price are for a stream that drifts" in error_of(
        call_advise(tmp_path, *words)
    )


def test_a_run_with_fewer_rows_says_so(tmp_path):
    """Of ens only t = 10 is known. There it is better, but not better than sm at t = 40."""
    two_learners(tmp_path, seeds=1, noise=0)
    image_run(tmp_path / "ens0", law(0.5, 0.4, 0.02), rows=11, learner="ens", members=5)
    advice = advice_on(tmp_path)
    assert {candidate.label: candidate.now for candidate in advice.candidates} == {
        "sm w=1": 40,
        "ens w=1": 10,
    }
    assert {row[0]: row[2] for row in front_table(advice)}["ens w=1"].endswith(" (t=10)")
    record = call_advise(tmp_path, "--out", tmp_path).record
    assert {entry["label"]: entry["from"] for entry in record["configurations"]} == {
        "sm w=1": 40,
        "ens w=1": 10,
    }


def test_rows_after_the_chosen_mega_batch_are_not_read(tmp_path):
    for place in "ab":
        two_learners(tmp_path / place)
    for run in find_runs([tmp_path / "b"]):
        edited(run, lambda row: row.update(value=row["t"] / 100 if row["t"] > 20 else row["value"]))
    first, second = (call_advise(tmp_path / name, "--from", 20).stdout for name in "ab")
    assert first == second  # draws, too, are the same for the same records
    assert "t=21..40" in first
    assert call_advise(tmp_path / "b").stdout != call_advise(tmp_path / "a").stdout


def test_runs_of_one_seed_are_compared_in_pairs(tmp_path):
    """The seeds differ by 50%, the average is 2% better in each run; other seeds show nothing."""
    for seed, level in enumerate((0.3, 0.5, 0.8)):
        values = law(level, 0.4, 0, 0.002, seed)
        for place, size in ("a", 8), ("b/paired", 16):
            run = image_run(tmp_path / place / f"{seed}", values, seed=seed, average=0.9, size=size)
            averaged(run, 0.98 - seed / 1000)
        image_run(tmp_path / "b" / f"raw{seed}", values, seed=seed)
        image_run(
            tmp_path / "b" / f"{seed}",
            [0.97 * value for value in values],
            seed=seed + 3,
            average=0.9,
        )
    (paired,), (apart, _) = (advice_on(tmp_path / name, 20).comparisons for name in "ab")
    assert paired.question == apart.question == "average the weights?"
    assert paired.advice == "averaged weights"
    assert apart.low < 0 < apart.high
    assert apart.high - apart.low > 5 * (paired.high - paired.low)


def test_only_what_comes_counts(tmp_path):
    """Waiting has cost much so far, but is better from now on."""
    for seed in range(3):
        level = 1 + seed / 100
        image_run(tmp_path / f"now{seed}", [0.2 * level] * B, seed=seed)
        image_run(tmp_path / f"wait{seed}", [0.9] * 9 + [0.15 * level] * (B - 9), 10, seed=seed)
    advice = advice_on(tmp_path, 20)
    assert advice.choice.label == "sm w=10"
    assert advice.choice.expected == pytest.approx(0.15, rel=0.1)
    (comparison,) = advice.comparisons
    assert (comparison.question, comparison.advice) == (
        "train now or wait?",
        "wait for 10 mega-batches",
    )


@pytest.mark.parametrize(
    "spreads",
    [
        pytest.param([0.03] * 12, marks=pytest.mark.thorough),
        np.geomspace(0.01, 0.16, 12).tolist(),
    ],
)
def test_equal_configurations_are_no_evidence(spreads):
    """Of 20 reports on a dozen equal configurations 7 or fewer, at 99.9% if 13% have evidence."""
    random = np.random.default_rng(0)
    evident = 0
    for _ in range(20):
        candidates = find_candidates(
            make_section([0.0] * 12, random.permutation(spreads), 3, random), NOW
        )
        choice = min(candidates, key=lambda candidate: candidate.expected)
        comparisons = compare(Field(candidates), choice, candidates)
        evident += any(comparison.evidence for comparison in comparisons)
    assert evident <= 7


def test_a_large_difference_is_evidence_among_many():
    random = np.random.default_rng(0)
    for _ in range(5):
        candidates = find_candidates(make_section([0.0, *[0.4] * 11], [0.03] * 12, 3, random), NOW)
        comparisons = compare(Field(candidates), candidates[0], candidates)
        assert all(comparison.evidence for comparison in comparisons)


def test_four_times_the_seeds_halve_an_interval():
    """The error of a mean falls with the root of the number of its runs."""
    random = np.random.default_rng(0)
    field = Field(find_candidates(make_section([0.0, 0.0], [0.1, 0.1], 3, random), NOW))
    ((question, _),) = field.partners[0].items()
    few, many = (field.half_width(question, 0, 1, seeds) for seeds in (4, 16))
    assert few / many == pytest.approx(2, rel=0.1)


def test_one_seed_is_no_evidence_and_says_how_many_would_settle_it(tmp_path):
    two_learners(tmp_path, seeds=1)
    advice = advice_on(tmp_path, 20)
    assert not advice.comparisons[0].evidence
    assert any(
        "One seed says nothing" in line and "run 3 seeds of" in line for line in advice.remarks
    )
    two_learners(tmp_path / "more", seeds=3, gap=1.02, noise=0.05)
    (comparison,) = advice_on(tmp_path / "more", 20).comparisons
    assert not comparison.evidence
    assert comparison.seeds is None or comparison.seeds > 3


def test_a_naive_rule_that_was_better_is_named_and_not_used(tmp_path):
    """One learner is the better one from t = 9 and fails at t = 20: forecasts trust its fall."""
    image_run(tmp_path / "steady", [0.2] * B)
    image_run(tmp_path / "falls", law(0.6, 0.5, 0)[:19] + [0.9] * (B - 19), size=16)
    section = one_section(find_runs([tmp_path]))
    best = min(find_candidates(section, 30), key=lambda candidate: candidate.expected)
    advice = advise(section, 30)
    assert advice.choice.label == best.label
    assert any(" chose better: its choice was " in line for line in advice.remarks)


def test_what_a_run_records_says_whether_it_is_several_or_grows(tmp_path):
    """Learners of one's own, as `recent` in docs/extend.md."""
    values = law(200, 0.2, 10, count=6)
    lm_run(tmp_path / "sm", values)
    lm_run(
        tmp_path / "recent", [value / 2 for value in values], "recent", members=[1, 2, 2, 2, 2, 2]
    )
    lm_run(tmp_path / "mine", values, "mine", millions=[64, 70, 80, 90, 100, 110])
    advice = advice_on(tmp_path, 5)
    assert [comparison.question for comparison in advice.comparisons] == ["one model or several?"]
    sides = {candidate.label: candidate.sides for candidate in advice.candidates}
    assert sides["recent w=1"]["one model or several?"] == "several models"
    assert sides["mine w=1"]["grow the model?"] == "grow"
    assert sides["sm w=1"]["grow the model?"] == "keep the size"


def test_the_measure_counts_the_present_model_until_the_next_stage(tmp_path):
    """Of the run with fewer rows t = 5 to 8 have passed: they do not come."""
    image_run(tmp_path / "a/sm", [0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3], w=4)
    (candidate,) = find_candidates(one_section(find_runs([tmp_path / "a"])), 5)
    assert [candidate.ends, candidate.to_come] == [[4], [8, 10]]
    draws = np.array([[0.25, 0.2], [0.15, 0.1]])
    assert candidate.measure(draws) == pytest.approx([(2 * 0.5 + 2 * a + b) / 5 for a, b in draws])
    assert candidate.mean_since(3) == pytest.approx(0.5)
    image_run(tmp_path / "b/behind", [0.5] * 12, rows=5, learner="ens")
    image_run(tmp_path / "b/ahead", [0.5] * 12, rows=9)
    behind = next(
        e for e in find_candidates(one_section(find_runs([tmp_path / "b"]))) if "ens" in e.label
    )
    assert (behind.now, behind.start, behind.to_come) == (4, 8, list(range(5, 13)))
    assert behind.measure(np.array([[0.4] * 4 + [0.1] * 4])) == pytest.approx([0.1])


def test_costs_to_come_follow_growing_costs(tmp_path):
    """With replay stage k costs k mega-batches."""
    image_run(tmp_path / "plain", law(0.5, 0.4, 0), w=4)
    image_run(tmp_path / "replay", law(0.5, 0.4, 0), w=4, replay=True)
    section = one_section(find_runs([tmp_path]))
    by_replay = {
        candidate.result.config["replay"]: candidate for candidate in find_candidates(section, 12)
    }
    assert by_replay[False].compute == pytest.approx(28)
    assert by_replay[True].compute == pytest.approx(sum(range(16, 41, 4)))
    assert by_replay[False].hours == pytest.approx(7 * 1.5 / 3600)


def test_the_front_is_in_error_and_compute_to_come(tmp_path):
    image_run(tmp_path / "small", law(0.5, 0.4, 0), size=4)
    image_run(tmp_path / "bad", law(0.6, 0.4, 0), size=8, learner="gmoe")
    image_run(tmp_path / "replay", law(0.3, 0.4, 0), size=8, replay=True)
    table = front_table(advice_on(tmp_path, 20))
    assert [row[0] for row in table[1:]] == ["sm hidden=4 w=1", "sm hidden=8 w=1 replay"]


def test_perplexity_at_the_end_of_the_stream_is_forecast_beyond_it(tmp_path):
    for w in (1, 2):
        run = lm_run(tmp_path / f"w{w}", [220.0, 166.0, 150.0, 140.0], w=w)
        with_info(run, command=f"alma train stream --waiting-time {w}")
    done = call_advise(tmp_path, "--out", tmp_path / "out")
    assert "Choice by mean perplexity over t=5..6" in done.stdout
    assert "difference (% of perplexity), 90%" in done.stdout
    assert "Command: alma train stream --waiting-time 1" in done.stdout
    configurations = {entry["label"]: entry for entry in done.record["configurations"]}
    expected = configurations["sm w=1"]["expected"]
    assert 100 < expected["low"] < expected["mean"] < expected["high"] < 160
    assert (tmp_path / "out/advice.md").read_text().startswith("# Advice: ")


def _run(values, *names, **settings):
    """Makes a run, or one for each of several data sets."""
    return lambda place: [
        image_run(place / d, values, data=d, **settings) for d in names or ["digits"]
    ]


_FOUR, _ENS = (_run([0.5, 0.4, 0.3, 0.2], learner=learner) for learner in ("sm", "ens"))
_OTHER = "runs of different streams, metrics or B"


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (_FOUR, "--from 0", "--from 0: a mega-batch of the stream, from 1 to 4"),
        (_FOUR, "--from 5", "--from 5: a mega-batch of the stream, from 1 to 4"),
        (_FOUR, "--budget many", "'many' is not a positive whole number"),
        (_FOUR, "--brief page.pdf", "give a .md or .html file, or --brief after the runs"),
        (lambda place: place.mkdir(exist_ok=True), "", "no runs in"),
        (_run([0.5], rows=0), "", "no rows yet"),
        (_run([0.9, 0.9, 0.5], w=3, rows=3), "", "no stage is complete by t=2"),
        (_run([0.5] * 12, rows=1), "", "no stage is complete by t=0"),
        (_run([0.5, 0.4], "aa", "bb"), "", _OTHER),
        (
            lambda place: rename_metric(_ENS(place / "b")[0], "perplexity") and _FOUR(place),
            "",
            _OTHER,
        ),
    ],
)
def test_bad_options_and_records_are_one_line(tmp_path, make, arguments, message):
    make(tmp_path)
    error = error_of(call_advise(tmp_path, *arguments.split()))
    assert message in error
    assert ("--from" in error) == ("--from" in arguments)  # no option that was not given


def test_an_error_of_zero_is_forecast(tmp_path):
    image_run(tmp_path / "run", [0.5, 0.0, 0.2, 0.0])
    (candidate,) = find_candidates(one_section(find_runs([tmp_path])), 3)
    assert np.isfinite([*candidate.draws[0].flat, candidate.expected]).all()


def test_the_page_shows_the_advice(tmp_path):
    two_learners(tmp_path)
    image_run(tmp_path / "other", law(0.5, 0.4, 0.02), data="other")
    with_advice, without = (
        list(tables(section, None, advise(section)))
        for section in find_sections(find_runs([tmp_path]))
    )
    assert with_advice[-1].title == "Advice"
    assert with_advice[-1].cells == decision_table(advise(find_sections(find_runs([tmp_path]))[0]))
    assert "Use ens w=1: lowest expected mean error (%) at t=41, " in with_advice[-1].note
    assert "Advice" not in {table.title for table in without}


def test_the_brief_is_one_screen_with_a_picture(tmp_path):
    two_learners(tmp_path / "runs", seeds=3)
    done = call_advise(tmp_path / "runs", "--from", 20, "--brief", tmp_path / "advice.html")
    page = (tmp_path / "advice.html").read_text()
    for sentence in (
        "<h1>Which model to use?</h1>\n<p>For digits, by error.</p>",
        "Use several models that vote: several models. Expected after mega-batches 21 to 40: ",
        " points of error less than one model",
        " on such a machine.",
        "Very likely (",
        "data:image/svg+xml",
    ):
        assert sentence in page
    for word in ("TFLOP", "regret", "nats", "w=1", "B = "):
        assert word not in done.stdout
    assert len(done.stdout.splitlines()) < 25
    call_advise(tmp_path / "runs", "--brief", tmp_path / "advice.md")
    assert "](advice.svg)" in (tmp_path / "advice.md").read_text()
    assert (tmp_path / "advice.svg").stat().st_size > 1000


def test_the_order_of_the_seeds_changes_nothing(tmp_path):
    for place, names in (("a", "012"), ("b", "201")):
        for w, level in ((1, 0.5), (2, 0.4)):
            for seed, name in enumerate(names if w == 1 else "012"):
                errors = law(level, 0.3, 0.1, noise=0.05, seed=seed, count=12)
                image_run(tmp_path / place / str(w) / name, errors, w, seed=seed)
    first, second = (decision_table(advice_on(tmp_path / place)) for place in "ab")
    assert first == second
    assert len(first) > 1


def test_a_choice_among_configurations_behind_one_beyond_the_budget(tmp_path):
    image_run(tmp_path / "ens", law(0.3, 0.3, 0.1, count=12), learner="ens", size=800)
    for learner in ("sm", "gmoe"):
        image_run(tmp_path / learner, law(0.5, 0.3, 0.1, count=12), 4, learner=learner, rows=9)
    assert advice_on(tmp_path).choice.result.learner == "ens"
