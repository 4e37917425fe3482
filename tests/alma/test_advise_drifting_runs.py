"""`alma advise` on runs whose stream drifts: three more questions, and what is not read."""

import math

import numpy as np
import pytest

from .synthetic import call_advise, drifting, image_run, lm_run

B = 8


def drifting_runs(place, kinds=("plain", "replay", "anew"), jump=0.0):
    """Three seeds of sm on a stream that drifts and may jump from t = 6 on, of some kinds."""
    settings = {
        "replay": {"replay_share": 0.5},
        "anew": {"replay_share": 0.5, "from_scratch": True},
    }
    for seed in range(3):
        for i, name in enumerate(kinds):
            random = np.random.default_rng([seed, i])
            level = random.normal({"plain": 0.3, "replay": 0.25, "anew": 0.35}[name], 0.004, B + 1)
            values = (level[1:] + 0.05).tolist()
            run = image_run(place / f"{name}{seed}", values, seed=seed, **settings.get(name, {}))
            cells = level[:, None] + random.normal(0, 0.002, (B + 1, B + 1))
            drifting(
                run, lambda t, j, m=cells: float(m[t, j] + 0.02 * abs(j - t) + jump * (j > 5 >= t))
            )


def test_three_questions_on_runs(tmp_path):
    drifting_runs(tmp_path / "runs")
    done = call_advise(tmp_path / "runs", "--from", 6, "--out", tmp_path)
    answers = {decision["question"]: decision["advice"] for decision in done.record["decisions"]}
    assert answers == {"replay?": "replay 0.5", "last weights or anew?": "last weights"}
    often = done.record["retraining"]
    assert (often["advice"], often["unit"]) == ("every 2nd mega-batch", "percentage points")
    assert often["slope"]["mean"] == pytest.approx(2, abs=0.3)
    every_two, every_four = (often["cadences"][i]["extra"]["mean"] for i in (1, 2))
    assert every_four - every_two == pytest.approx(2, abs=0.3)
    # 1 TFLOP for a training: in both mega-batches to come, or in one; what is spent does not count
    costs = [cadence["cost"].split(", ")[:2] for cadence in often["cadences"]]
    assert costs[0] == ["2 trainings in 2 mega-batches", "2 TFLOPs"]
    assert costs[1] == ["1 training in 2 mega-batches", "1 TFLOPs"]
    planned = call_advise(tmp_path / "runs", "--from", 6, "--price", "1/2").stdout
    assert "Retrain in 1 mega-batch, then not again (1 in 2 mega-batches): it costs " in planned
    assert ", in the unit of --price. So for prices from " in planned
    assert "from_scratch w=1 costs 40.3 more" in planned  # 20 points, 2 each


def test_parts_to_come_are_not_read(tmp_path):
    for name, jump in (("a", 0.0), ("b", 0.5)):
        drifting_runs(tmp_path / name, ("plain", "replay"), jump)
    first, second = (call_advise(tmp_path / name, "--from", 5).stdout for name in "ab")
    assert first == second
    assert "the stream drifts" in first
    assert call_advise(tmp_path / "a").stdout != call_advise(tmp_path / "b").stdout


def test_text_is_in_nats_and_a_stream_without_drift_is_no_evidence(tmp_path):
    for seed in range(3):
        run = lm_run(tmp_path / f"{seed}", [60.0] * 6, seed=seed)
        noise = np.random.default_rng(seed).normal(0, 0.01, (7, 7))
        drifting(
            run, lambda t, j, e=noise: float(50 * math.exp(0.0 if not t else e[t, j] - 0.02 * t))
        )
    done = call_advise(tmp_path)
    assert "How often to retrain? sm w=1\nNo evidence either way: until more models" in done.stdout
    assert "Percent: of perplexity." in done.stdout
    assert "amount of training taken out: no evidence that the stream drifts." in done.stdout


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("make", [image_run, lm_run])
def test_a_bad_value_in_the_matrix_does_not_count(tmp_path, make, value):
    run = make(tmp_path / "run", [0.3] * 6)
    drifting(
        run,
        lambda t, j: value if (t, j) == (2, 4) else 0.3 + 0.02 * abs(j - t) + 0.001 * (t * j % 3),
    )
    done = call_advise(tmp_path)
    assert (done.returncode, done.stderr, "ow often to retrain" in done.stdout) == (0, "", True)


def test_a_stream_of_two_mega_batches_has_no_answer(tmp_path):
    drifting(image_run(tmp_path / "run", [0.5, 0.4]), lambda t, j: 0.5)
    output = call_advise(tmp_path).stdout
    assert "assume an i.i.d. stream. If" in output
    assert "How often to retrain takes three models" in output
