"""`--max-epoch` without `--max-update` trains as --max-update with the updates of the epochs."""

import re

import pytest
import torch

from tests.fairseq_alma.shared import assert_same_model, load

SHORT = (
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2 --tokens-per-sample 64"
)
WORDS = f"--task alma_lm --arch switch_gmoe_tiny {SHORT} --lr 5e-3 --seed 7 --log-format json"
COSINE = ("--lr-scheduler", "cosine")
THIRDS = ("--lr-scheduler", "tri_stage", "--phase-ratio", "(0.3,0.3,0.4)")


@pytest.fixture
def train(start, stream):
    """`train(save, *flags)` trains without a length in the flags; returns the output."""

    def run(save, *flags) -> str:
        done = start("train", stream, *WORDS.split(), "--save-dir", save, *flags).wait()
        assert done.code == 0, done.output
        return done.output

    return run


def planned(output: str) -> int:
    """The updates that a training logs."""
    return int(re.findall(r"--max-epoch \d+: (\d+) updates", output)[-1])


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(COSINE, marks=pytest.mark.thorough),
        pytest.param(THIRDS, marks=pytest.mark.thorough),
        pytest.param(("--schedule", "continuous"), marks=pytest.mark.thorough),
    ],
)
def test_two_epochs_train_as_their_updates(train, tmp_path, flags):
    flags = (*flags, "--batch-size", "8", "--update-freq", "3,2")
    updates = planned(train(tmp_path / "epochs", *flags, "--max-epoch", "2"))
    train(tmp_path / "updates", *flags, "--max-update", str(updates))
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("epochs", "updates")]
    assert_same_model(*paths)
    states = [load(path) for path in paths]
    assert states[0]["optimizer_history"][-1]["num_updates"] == updates
    assert states[0]["extra_state"]["best"] == states[1]["extra_state"]["best"]
    moments = [state["last_optimizer_state"] for state in states]
    torch.testing.assert_close(*moments, rtol=0, atol=0)


def test_the_rate_decays_over_the_epochs(train, tmp_path):
    """Warm-up: a tenth of the updates; the rate reaches 0 with the last one."""
    flags = "--batch-size 8 --update-freq 1 --max-epoch 1 --log-interval 1".split()
    output = train(tmp_path / "made", *flags)
    updates = planned(output)
    rates = [float(rate) for rate in re.findall(r'"lr": "([^"]+)"', output)]
    peak = updates // 10
    assert max(rates) == pytest.approx(5e-3)
    assert rates.index(max(rates)) + 1 in (peak, peak + 1)
    assert rates[updates - 1] <= 5e-3 / (updates - peak)


def test_a_limit_of_updates_and_a_limit_of_epochs_both_hold(train, tmp_path):
    """With both the schedule spans --max-update, as in fairseq."""
    flags = "--batch-size 8 --update-freq 3 --max-epoch 1 --max-update 99".split()
    output = train(tmp_path / "both", *flags)
    assert not re.search(r"--max-epoch \d+: \d+ updates", output)
    assert (
        0 < load(tmp_path / "both/checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] < 99
    )


def test_a_resumed_training_and_two_processes_plan_the_same(train, start_two, stream, tmp_path):
    flags = ("--batch-size", "8", "--max-epoch", "2")
    alone = planned(train(tmp_path / "one", *flags, "--update-freq", "2"))
    both = (*flags, "--update-freq", "1", "--cpu")
    pair = start_two(stream, *WORDS.split(), "--save-dir", tmp_path / "two", *both)
    ends = [process.wait() for process in pair]
    assert [end.code for end in ends] == [0, 0]
    assert planned(ends[0].output) == alone  # the other process has no log
    assert planned(train(tmp_path / "one", *flags, "--update-freq", "2")) == alone  # complete
    train(tmp_path / "begun", *flags, "--update-freq", "2", "--max-update", "11")
    resumed = (*flags, "--update-freq", "2", "--max-update", "0")
    assert planned(train(tmp_path / "begun", *resumed)) == alone


def test_epochs_without_a_full_update_are_refused(start, stream, tmp_path):
    flags = "--batch-size 8 --update-freq 999 --skip-remainder-batch --max-epoch 1".split()
    done = start("train", stream, *WORDS.split(), "--save-dir", tmp_path / "none", *flags).wait()
    assert done.error == "--max-epoch 1: an epoch has no full update; give a smaller --update-freq"
