"""--optimizer adamw_schedulefree: equal to its library, saved at x, resumed, kept over stages and growth."""

import pytest
import schedulefree
import torch

from fairseq_alma.training.schedule_free import AdamWScheduleFree, ScheduleFreeConfig
from tests.fairseq_alma.shared import load


@pytest.fixture
def tiny(tiny) -> list[str]:
    """Without a schedule: that of the optimizer is the default."""
    schedule = tiny.index("--lr-scheduler")
    rest = tiny[:schedule] + tiny[schedule + 4 :]
    return [*rest, "--optimizer", "adamw_schedulefree", "--lr", "3e-2", "--dropout", "0"]


def group_of(state) -> dict:
    (group,) = state["last_optimizer_state"]["param_groups"]
    return group


def test_an_update_equals_the_librarys_and_the_parameters_are_x_after_it():
    """With a warm-up from outside, as fairseq's fixed scheduler sets it."""
    torch.manual_seed(0)
    start = torch.randn(7, 5)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    config = ScheduleFreeConfig(adam_betas="(0.8, 0.98)", adam_eps=1e-3, weight_decay=0.1, lr=[0.1])
    mine = AdamWScheduleFree(config, [ours])
    peer = schedulefree.AdamWScheduleFree(
        [theirs], lr=0.1, betas=(0.8, 0.98), eps=1e-3, weight_decay=0.1, warmup_steps=4
    )
    peer.train()
    for update in range(12):
        mine.set_lr(0.1 * min(1.0, (update + 1) / 4))
        gradient = torch.randn(7, 5)
        mine.zero_grad()
        torch.testing.assert_close(ours, theirs)  # y
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        peer.step()
        peer.eval()
        torch.testing.assert_close(ours, theirs)  # x
        peer.train()


def test_what_is_saved_is_x_the_mean_of_all_z(last_of, tmp_path):
    """A constant rate gives every z the same weight."""
    save = tmp_path / "run"
    flags = ("--warmup-updates", "0", "--save-interval-updates", "1", "--keep-interval-updates", "9")
    last = last_of(save, *flags, "--max-update", "4")
    saved = [*(load(path) for path in sorted(save.glob("checkpoint_1_[123].pt"))), last]
    assert [group_of(state)["k"] for state in saved] == [1, 2, 3, 4]
    states = [state["last_optimizer_state"]["state"] for state in saved]
    for number, name in enumerate(
        x for x in last["model"] if not x.endswith(("version", "copies", "parent"))
    ):
        if number in states[-1]:
            mean = torch.stack([each[number]["z"].double() for each in states]).mean(0)
            torch.testing.assert_close(last["model"][name].double(), mean, rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_validated_is_what_is_saved(last_of, user_dir, tmp_path):
    """x, by the test above; the weights at the start of the last validation."""
    validated = tmp_path / "validated.pt"
    code = f"""
import torch
from fairseq.trainer import Trainer
begin = Trainer.begin_valid_epoch

def save_and_begin(self, epoch):
    torch.save(self.get_model().state_dict(), {str(validated)!r})
    return begin(self, epoch)

Trainer.begin_valid_epoch = save_and_begin
"""
    last = last_of(tmp_path / "run", *user_dir(code), "--max-update", "4")
    for name, value in load(validated).items():
        assert torch.equal(value, last["model"][name]), name


@pytest.mark.parametrize("schedule", ["stage", "continuous"])
def test_a_killed_stage_equals_an_uninterrupted_one(start, stream, tiny, last_of, tmp_path, schedule):
    first = tmp_path / "first" / "checkpoint_last.pt"
    last_of(first.parent, "--schedule", schedule, "--max-update", "4")
    stage = ("--schedule", schedule, "--stage", "1", "--finetune-from-model", first, "--max-update", "10")
    whole = last_of(tmp_path / "whole", *stage, "--save-interval-updates", "3")
    assert group_of(whole)["k"] == 10  # with `stage` all are of this stage
    assert whole["optimizer_history"][-1]["num_updates"] == 10
    save = tmp_path / "killed"
    child = start("train", stream, *tiny, *stage, "--save-interval-updates", "2", "--save-dir", save)
    child.kill_when(lambda: any(save.glob("checkpoint_*_[68].pt")))
    resumed = last_of(save, *stage, "--save-interval-updates", "2")  # saved at other updates, too
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name]), name


@pytest.mark.parametrize("router", ["preserve", "tree"])
def test_growth_moves_z_of_a_router_as_its_weights(last_of, tmp_path, router):
    first = tmp_path / "first" / "checkpoint_last.pt"
    before = last_of(first.parent, "--schedule", "continuous", "--max-update", "4")
    growing = ("--moe-expert-count", "6", "--grow-experts", "2", "--grow-router", router)
    stage = ("--schedule", "continuous", "--stage", "1", "--max-update", "5", "--finetune-from-model", first)
    save = tmp_path / "second"
    assert group_of(last_of(save, *stage, *growing))["k"] == 5
    grown = load(save / "grown.pt")
    names = [name for name in before["model"] if not name.endswith(("version", "copies", "parent"))]
    rows = "decoder.layers.1.fc1.router.weight"
    split = grown["growth"]["decoder.layers.1.fc1"]
    far = [
        state["last_optimizer_state"]["state"][names.index(rows)]["z"] - state["model"][rows]
        for state in (before, grown)
    ]
    torch.testing.assert_close(far[1], torch.cat([far[0], far[0][split]]), rtol=0, atol=1e-6)
    assert far[0].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ("--schedule", "rsqrt"),
            "--optimizer adamw_schedulefree has a constant learning rate: give --schedule",
        ),
        (("--lr-scheduler", "polynomial_decay"), "and not --lr-scheduler polynomial_decay"),
        (("--fp16",), "--optimizer adamw_schedulefree trains in fp32: leave out --fp16"),
        (("--adam-betas", "(0.0,0.9)"), "--adam-betas (0.0,0.9): --optimizer adamw_schedulefree needs"),
    ],
)
def test_what_schedule_free_cannot_do_is_one_line(start, stream, tmp_path, flags, line):
    words = ("--task", "alma_lm", "--optimizer", "adamw_schedulefree", "--save-dir", tmp_path / "x", *flags)
    refused = start("train", stream, *words).wait()
    assert refused.code == 2
    assert line in refused.error
    assert not (tmp_path / "x").exists()
