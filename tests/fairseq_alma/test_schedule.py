"""--schedule continuous: optimizer, update count and learning rate go on over stages."""

import pytest
import torch

from alma.errors import UserError
from tests.fairseq_alma.shared import changed

KEEPS = ("--schedule", "continuous")


@pytest.fixture
def train(last_of):
    """`train(save, *flags)` trains and returns the last checkpoint."""
    return lambda save, *flags: last_of(save, *KEEPS, *flags)


@pytest.fixture
def first(train_once, tmp_path):
    """The last checkpoint of stage 0, of 4 updates."""
    return train_once(tmp_path / "first", *KEEPS, "--max-update", "4")


def updates(state) -> int:
    return state["optimizer_history"][-1]["num_updates"]


def same(one, other) -> None:
    """Assert equal weights and optimizer states."""
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    states = (checkpoint["last_optimizer_state"]["state"] for checkpoint in (one, other))
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert all(
            torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine
        )


def test_a_stage_goes_on_as_with_restore_file_and_resumes(
    start, evaluate, stream, tiny, train, first, tmp_path
):
    second = (
        "--stage",
        "1",
        "--max-update",
        "10",
        "--save-interval-updates",
        "2",
        "--replay-share",
        "0.5",
    )
    whole = train(tmp_path / "whole", *second, "--finetune-from-model", first)
    assert updates(whole) == 10
    assert whole["extra_state"]["AlmaLMTask"]["first_update"] == 4
    assert evaluate("--path", tmp_path / "whole/checkpoint_last.pt")["training"][0]["updates"] == 6
    restored = ("--restore-file", first, "--reset-dataloader", "--reset-meters")
    same(whole, train(tmp_path / "fairseqs", *second, *restored))
    save = tmp_path / "killed"
    again = (*tiny, *KEEPS, "--save-dir", save, *second, "--finetune-from-model", first)
    start("train", stream, *again).kill_when(lambda: any(save.glob("checkpoint_*_6.pt")))
    resumed = train(save, *second, "--finetune-from-model", first)
    same(whole, resumed)
    assert resumed["extra_state"]["AlmaLMTask"]["first_update"] == 4


def test_what_a_continuous_stage_lacks_is_one_line(start, stream, tiny, first, tmp_path):
    command = ("train", stream, *tiny, *KEEPS, "--save-dir", tmp_path / "x", "--stage", "1")
    short = start(*command, "--finetune-from-model", first, "--max-update", "4").wait()
    assert short.error == (
        f"--max-update 4: {first} has 4 updates, which --schedule continuous counts too: "
        "give --max-update 4 plus the updates of this stage"
    )
    other = start(
        *command, "--finetune-from-model", first, "--max-update", "8", "--optimizer", "sgd"
    ).wait()
    assert "FairseqAdam vs SGD" in other.error
    path = changed(first, tmp_path / "without.pt", lambda state: state.pop("last_optimizer_state"))
    without = start(*command, "--finetune-from-model", path, "--max-update", "8").wait()
    assert "has no optimizer state" in without.error
    assert not list((tmp_path / "x").glob("checkpoint*.pt"))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--replay-share", "0.5"), "--replay-share: stage 0 has no earlier mega-batches"),
        (("--stage", "1", "--replay-share", "1"), "--replay-share 1.0: a share of each stage"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(build, flags, line):
    with pytest.raises(UserError, match=line):
        build(*flags)
