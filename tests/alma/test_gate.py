"""`alma gate`: the newest model against the deployed one, on the same documents or images."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from alma.decisions.gate import main
from alma.decisions.pairs import Pair, document_gain, image_gain
from alma.decisions.replacement import gain_by_scatter
from alma.evaluations import item_losses_file, read_item_losses, write_item_losses
from alma.report.advice.staleness import Laws
from alma.report.losses import t_interval
from benchmarks import decisions

from .monthly import Monthly, drifting
from .synthetic import error_of, image_run, losses, run_here

RNG = np.random.default_rng


def gate(run, *options):
    """Exit code and line of `alma gate`."""
    done = run_here(main, [run.directory, *options])
    (line,) = done.stdout.splitlines()
    assert done.stderr == ""
    return done.returncode, line


def gated(run, *options):
    """Exit code and JSON of `alma gate`."""
    code, line = gate(run, *options, "--json")
    answer = json.loads(line)
    assert answer["exit_code"] == code
    return code, answer


def with_last(place, gain, **settings):
    """Six months in which models are equal, but for the last: it gains so much."""

    def loss(u, _):
        return 0.3 + 2.7 * (settings.get("metric") != "error") - (gain if u == 6 else 0)

    return Monthly(place, loss, **settings).months(6)


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    """A year that drifts, with 60 documents a month; no test writes there."""
    return Monthly(tmp_path_factory.mktemp("year"), items=60).months(12)


def test_a_better_model_passes_a_worse_one_is_stopped_and_equal_ones_are_no_evidence(tmp_path):
    code, line = gate(with_last(tmp_path / "better", 0.05, items=300))
    assert code == 0
    assert line.startswith("yes: the model of 2024-06 is 4.9% [")
    assert line.endswith("] better than that of 2024-05 on 2024-06 (300 documents, paired)")
    code, line = gate(with_last(tmp_path / "worse", -0.05, items=300))
    assert code == 1
    assert " worse than that of 2024-05 on 2024-06 (300 documents, paired)" in line
    code, line = gate(with_last(tmp_path / "equal", 0, items=300))
    assert code == 3
    assert line.endswith("(300 documents, paired): keep the deployed model, which costs nothing")


def test_images_are_paired_by_image(tmp_path):
    code, line = gate(with_last(tmp_path / "better", 0.1, items=500, metric="error"))
    assert code == 0
    assert "points [" in line
    assert line.endswith("] better than that of 2024-05 on 2024-06 (500 images, paired)")
    assert gate(with_last(tmp_path / "worse", -0.1, items=500, metric="error"))[0] == 1
    assert gate(with_last(tmp_path / "equal", 0, items=500, metric="error"))[0] == 3


def test_the_same_record_has_the_same_answer(year):
    assert gate(year, "--forget", "1%") == gate(year, "--forget", "1%")


def test_the_deployed_model_is_named_by_its_mega_batch_or_period(year):
    answers = [gated(year, "--deployed", name)[1] for name in ("3", "2024-03")]
    assert answers[0] == answers[1]
    assert answers[0]["deployed"] == {"stage": 2, "megabatch": 3, "period": "2024-03"}
    assert gated(year)[1]["deployed"]["megabatch"] == 11
    assert answers[0]["newest_part"]["gain"]["mean"] > 0.2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("12", "--deployed 12 is the newest model: give one of 1 (2024-01), 2 (2024-02)"),
        ("2024-12", "is the newest model"),
        ("13", "no model was trained until then: give one of"),
        ("0", "no model was trained until then"),
        ("May", "no model was trained until then"),
    ],
)
def test_a_deployed_model_that_is_not_there_is_one_line(year, name, told):
    assert told in error_of(run_here(main, [year.directory, "--deployed", name]))


def test_a_gain_must_be_above_its_worth(tmp_path):
    run = with_last(tmp_path, 0.03, items=1000)
    assert gate(run, "--worth", "1%")[0] == 0
    assert gate(run, "--worth", "0.01")[0] == 0
    code, answer = gated(run, "--worth", "10%")
    assert code == 1
    assert answer["worth"] == pytest.approx(np.log(1.1), rel=1e-5)
    assert answer["newest_part"]["gain"]["high"] < answer["worth"]
    gain = answer["newest_part"]["gain"]["mean"]
    code, line = gate(run, "--worth", f"{gain:.4f}")
    assert code == 3
    assert ", against --worth 2." in line


def test_points_of_error_are_percent_of_images(tmp_path):
    run = with_last(tmp_path, 0.1, items=1000, metric="error")
    answers = [gated(run, "--worth", worth)[1] for worth in ("3", "3%")]
    assert answers[0] == answers[1]
    assert (answers[0]["unit"], answers[0]["worth"]) == ("percentage points", 3)
    assert answers[0]["answer"] == "yes"


def test_the_past_may_lose_no_more_than_forget(year):
    """The newest model loses .015 nats a month of distance on the past, .085 on average."""
    code, answer = gated(year, "--forget", "20%")
    assert (code, answer["past"]["parts"], answer["past"]["items"]) == (0, 11, 660)
    code, line = gate(year, "--forget", "1%")
    assert code == 1
    assert "; on the past, until 2024-11, it is 2" in line
    assert " worse (660 documents, paired), against --forget 1%" in line
    lost = -answer["past"]["gain"]["mean"]
    assert gate(year, "--forget", f"{lost:.4f}")[0] == 3
    assert gated(year)[1]["past"] is None


def test_without_losses_of_items_the_scatter_of_the_record_decides(tmp_path):
    noise = RNG(0).normal(0, 0.005, (9, 9))

    def loss(u, p):
        return drifting(u, p) + noise[u, p] - (0.2 if u == 8 else 0)

    run = Monthly(tmp_path / "eight", loss).months(8)
    code, answer = gated(run, "--forget", "5%")
    assert code == 0
    assert {answer[name]["method"] for name in ("newest_part", "past")} == {"scatter"}
    assert answer["newest_part"]["items"] is None
    assert "(unpaired, by the scatter of the record)" in answer["reason"]


def test_without_losses_of_items_both_models_may_be_off_as_far_as_those_before():
    """Student's interval of the difference of two models. Two of seven are taken by the law."""
    off = RNG(0).normal(0, 0.02, (9, 9))
    run = losses(lambda u, p, _: drifting(u, p) + off[u, p], count=8)
    interval = gain_by_scatter(run, 0.1, math.inf)
    older = replace(run, until=run.until[:-1], seeds=(run.seeds[0][:-1],))
    squares = 7 * Laws(older).scatter ** 2
    expected = t_interval(0.1, math.sqrt(2 * squares / 5), 5)
    assert interval == pytest.approx(expected)


def test_few_models_without_losses_of_items_say_what_is_missing(tmp_path):
    code, line = gate(Monthly(tmp_path).months(4), "--forget", "1%")
    assert code == 3
    assert "it takes the losses of at least 20 documents of 2024-04 " in line
    assert f"(`alma test {tmp_path}` writes them, a trainer must return them)" in line
    assert "or 5 models that share tests; on the past, until 2024-03, the two cannot be" in line


def test_few_documents_tell_too_little(tmp_path):
    code, answer = gated(Monthly(tmp_path / "19", items=19).months(3))
    assert (code, answer["newest_part"]) == (3, None)
    assert gated(Monthly(tmp_path / "20", items=20).months(3))[1]["newest_part"]["items"] == 20


def test_few_images_are_paired_too(tmp_path):
    def loss(u, _):
        return 0.9 if u < 3 else 0.05

    run = Monthly(tmp_path, loss, items=12, metric="error").months(3)
    code, answer = gated(run)
    assert (code, answer["newest_part"]["method"], answer["newest_part"]["items"]) == (
        0,
        "images",
        12,
    )


def test_one_model_alone_is_no_evidence(tmp_path):
    run = Monthly(tmp_path).months(1)
    code, line = gate(run)
    assert (code, line) == (
        3,
        "no evidence: the model of 2024-01 is the only one: keep the deployed model, which costs "
        "nothing",
    )
    told = error_of(run_here(main, [tmp_path, "--deployed", "1"]))
    assert "--deployed 1 is the newest model, and there is no older one" in told


def test_a_month_without_tests_is_no_evidence(tmp_path):
    run = Monthly(tmp_path, items=60).months(5)
    run.arrive(tested=False)
    run.train()
    code, line = gate(run)
    assert code == 3
    assert "the model of 2024-05 was not tested on 2024-06 (`alma test " in line


def test_a_later_month_on_which_both_were_tested_counts(year, tmp_path):
    run = Monthly(tmp_path, items=60).months(4)
    run.arrive()
    assert gated(run)[1]["held_out"] == {"megabatch": 5, "period": "2024-05"}


def test_runs_that_cannot_be_compared_are_one_line(tmp_path):
    image_run(tmp_path / "iid", [0.3, 0.2])
    told = error_of(run_here(main, [tmp_path / "iid"]))
    assert "has no losses on held-out parts by mega-batch" in told
    run = Monthly(tmp_path / "untrained")
    run.arrive()
    run.run.append(run.row(0, trained=False))
    assert "has no trained model yet" in error_of(run_here(main, [tmp_path / "untrained"]))


def other_documents(path):
    """Losses of other documents: with other tokens."""
    losses = read_item_losses(path)
    write_item_losses(path, losses * 2)


def fewer_documents(path):
    write_item_losses(path, read_item_losses(path)[:-1])


def another_model(path):
    losses = read_item_losses(path)
    losses[:, 0] *= 1.1
    write_item_losses(path, losses)


def damaged(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (other_documents, "are of different documents, by their tokens: delete both, and start"),
        (fewer_documents, "have 60 and 59 losses: they are of different held-out parts"),
        (another_model, "nats a token, and the record "),
        (damaged, "damaged (cannot"),
    ],
)
def test_files_of_item_losses_that_do_not_fit_are_one_line(tmp_path, edit, told):
    Monthly(tmp_path, items=60).months(3)
    edit(item_losses_file(tmp_path, 2, 3))
    line = error_of(run_here(main, [tmp_path]))
    assert told.replace("damaged (cannot", "damaged (") in line
    assert "start `alma test" in line


def test_images_that_do_not_count_for_one_model_are_left_out():
    deployed = np.array([[1.0, 1], [0, 0], [0, 1], [1, 1], [1, 1]])
    newest = np.array([[0.0, 1], [1, 1], [0, 1], [1, 1], [0, 0]])
    pair = Pair(deployed, newest).counted()
    assert (pair.deployed[:, 0] == [1, 0, 1]).all()
    assert (pair.newest[:, 0] == [0, 0, 1]).all()


def pair_of(gains, tokens):
    """Documents with gains in nats."""
    tokens = np.broadcast_to(tokens, np.shape(gains)).astype(float)
    newest = 3 * tokens
    return Pair(np.stack([newest + gains, tokens], 1), np.stack([newest, tokens], 1))


def test_documents_of_one_length_have_the_interval_of_student():
    gains = RNG(0).normal(2.0, 8.0, 200)
    interval = document_gain([pair_of(gains, 100)])
    expected = t_interval(gains.mean() / 100, gains.std(ddof=1) / 100 / np.sqrt(200), 199)
    assert interval.mean == pytest.approx(expected.mean)
    assert interval.high - interval.low == pytest.approx(expected.high - expected.low, rel=0.05)


def test_parts_count_alike_whatever_their_size():
    small = pair_of(RNG(0).normal(0, 5, 50), 100)
    large = pair_of(RNG(1).normal(30, 5, 900), 100)
    both = document_gain([small, large])
    apart = [document_gain([pair]) for pair in (small, large)]
    assert both.mean == pytest.approx(np.mean([interval.mean for interval in apart]))
    halves = [interval.high - interval.mean for interval in apart]
    assert both.high - both.mean == pytest.approx(np.hypot(*halves) / 2, rel=0.1)


def test_a_difference_in_one_document_alone_has_no_finite_interval(tmp_path):
    gains = np.zeros(60)
    assert document_gain([pair_of(gains, 100)]) == (0, 0, 0)
    gains[0] = 50.0
    low, high = document_gain([pair_of(gains, 100)])[1:]
    assert (low, high) == (-np.inf, np.inf)
    run = Monthly(tmp_path, lambda u, p: 3.0, items=60).months(2)
    files = [item_losses_file(tmp_path, stage, 2) for stage in (0, 1)]
    losses = read_item_losses(files[0])
    losses[0, 0] *= 0.99
    write_item_losses(files[1], losses)
    code, answer = gated(run)
    assert code == 3
    assert (answer["newest_part"]["gain"]["low"], answer["newest_part"]["gain"]["high"]) == (
        None,
        None,
    )


def test_images_have_the_interval_of_bonett_and_price():
    """With one image of a hundred more at both ends."""
    deployed = np.zeros(100)
    newest = np.zeros(100)
    deployed[:12] = 1
    newest[12:16] = 1
    counts = np.ones(100)
    interval = image_gain([Pair(np.stack([deployed, counts], 1), np.stack([newest, counts], 1))])
    assert interval == pytest.approx((8.0, 0.1217, 15.5645), abs=1e-3)


@pytest.mark.parametrize("count", [30, 100])
def test_equal_models_are_no_evidence_in_ninety_of_a_hundred(count):
    equal = decisions.GAINS.index(0)
    shares = decisions.gate_by_documents("documents", count, 100)
    assert shares[equal].yes + shares[equal].no <= 0.10
    assert [share.yes for share in shares[: equal - 1]] == [0, 0]  # 10 and 3% worse never pass
    assert shares[-1].yes >= 0.98  # 10% better does


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["documents", "heavy tails"])
@pytest.mark.parametrize("count", [30, 300])
def test_the_gate_is_honest_for_any_number_of_documents(kind, count):
    equal = decisions.GAINS.index(0)
    shares = decisions.gate_by_documents(kind, count, 400)
    assert shares[equal].yes + shares[equal].no <= 0.13
    assert max(share.yes for share in shares[:2]) == 0
    assert shares[-1].yes > 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("count", decisions.IMAGES)
def test_the_gate_is_honest_for_any_number_of_images(count):
    equal = decisions.GAINS.index(0)
    shares = decisions.gate_by_images(count, 400)
    assert shares[equal].yes + shares[equal].no <= 0.13
    assert max(share.yes for share in shares[:2]) <= 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("models", [5, 8])
def test_the_gate_is_honest_without_losses_of_items(models):
    equal = decisions.GAINS.index(0)
    shares = decisions.gate_by_scatter(models, 200)
    assert shares[equal].yes + shares[equal].no <= 0.12
    assert shares[0].yes == 0


@pytest.mark.thorough
def test_unusual_losses_raise_few_false_alarms_and_see_a_break():
    quiet = decisions.due_after_break(0.0, 0.0, float("nan"), 100)
    assert quiet.by_sixth <= 0.12
    assert decisions.due_after_break(1.0, 0.0, float("nan"), 50).first > 0.9


def test_a_hundred_thousand_documents_take_less_than_a_second():
    pair = decisions.documents("documents", 100_000, RNG(0))
    start = time.process_time()
    interval = document_gain([pair])
    assert time.process_time() - start < 1
    assert interval.high - interval.low < 0.003
