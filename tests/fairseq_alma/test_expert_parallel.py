"""Expert parallelism: options it refuses, half precision, collectives per update;
fp32 is in test_train."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.distributed import utils as distributed_utils

from alma.errors import UserError
from fairseq_alma.moe.expert_parallel import check
from fairseq_alma.training import gradients
from tests.fairseq_alma.shared import load


def test_experts_have_to_be_a_multiple_of_the_processes(build, monkeypatch):
    monkeypatch.setattr(distributed_utils, "get_data_parallel_world_size", lambda: 3)
    with pytest.raises(UserError, match="4 experts cannot be divided among 3 processes"):
        build("--moe-expert-parallel")
    build()


def test_without_a_last_checkpoint_it_is_refused():
    with pytest.raises(UserError, match="--no-last-checkpoints"):
        check(SimpleNamespace(checkpoint=SimpleNamespace(no_last_checkpoints=True)))


def test_the_norm_is_that_of_all_gradients_together(monkeypatch):
    """Shared ones of norm 3 and experts' of norm 4 have norm 5, and are clipped alike to 1."""
    monkeypatch.setattr(gradients.dist, "all_reduce", lambda squares: None)  # a single process
    shared = torch.nn.Parameter(torch.zeros(2))
    shared.grad = torch.tensor([3.0, 0.0])
    expert = torch.nn.Parameter(torch.zeros(2))
    expert.expert = True
    expert.grad = torch.tensor([0.0, 4.0])
    norm = gradients.clip_grad_norm_(None, [shared, expert], 1.0)
    assert norm.item() == pytest.approx(5)
    assert shared.grad.tolist() == pytest.approx([0.6, 0], rel=1e-5)
    assert expert.grad.tolist() == pytest.approx([0, 0.8], rel=1e-5)


# In update 2, once, process 1 gets an infinite gradient in a local expert.
OVERFLOW = """
import torch
from fairseq_alma.task import AlmaLMTask

step = AlmaLMTask.train_step

def train_step(self, sample, model, criterion, optimizer, update_num, **kwargs):
    scaler = optimizer.scaler
    scale = scaler.get_scale() if hasattr(scaler, "get_scale") else scaler.loss_scale
    shared = [p for p in model.parameters() if not hasattr(p, "expert")]
    total = sum(p.double().sum().item() for p in shared)
    print("update", update_num, "scale", scale, "weights", total)
    result = step(self, sample, model, criterion, optimizer, update_num, **kwargs)
    if torch.distributed.get_rank() == 1 and update_num == 2 and not hasattr(self, "overflown"):
        self.overflown = True
        next(p for p in model.parameters() if hasattr(p, "expert")).grad.view(-1)[0] = float("inf")
    return result

AlmaLMTask.train_step = train_step
# fairseq creates a GPU tensor when --fp16 overflows
torch.Tensor.cuda = lambda self, *_: self
"""


def test_an_overflow_in_a_local_expert_skips_the_update_on_all_processes(
    train_on_two, tmp_path, user_dir
):
    flags = (
        "--max-update",
        "4",
        "--moe-expert-parallel",
        "--ddp-backend",
        "legacy_ddp",
        "--dropout",
        "0",
    )
    flags += ("--fp16", "--fp16-init-scale", "1024", *user_dir(OVERFLOW))
    outputs = []
    for output in train_on_two(tmp_path / "run", *flags):
        lines = [line for line in output.splitlines() if line.startswith("update ")]
        outputs.append([line.split() for line in lines])
    assert outputs[0] == outputs[1]
    tries = [(int(words[1]), float(words[3])) for words in outputs[0]]
    assert tries == [(0, 1024), (1, 1024), (2, 1024), (2, 512), (3, 512)]


AGREEMENTS = """
from fairseq_alma.moe.expert_parallel import ExpertParallelGroup
from fairseq_alma.task import AlmaLMTask

largest, step = ExpertParallelGroup.largest, AlmaLMTask.train_step
waits = []

def count(self, number):
    waits.append(number)
    return largest(self, number)

def train_step(self, *args, **kwargs):
    waits.clear()
    result = step(self, *args, **kwargs)
    print("waits", len(waits))
    return result

ExpertParallelGroup.largest, AlmaLMTask.train_step = count, train_step
"""


@pytest.mark.parametrize(
    "checkpointing", [(), ("--checkpoint-activations",)], ids=["", "recomputed"]
)
def test_an_update_agrees_on_the_largest_batch_once(
    train_on_two, tmp_path, user_dir, checkpointing
):
    """Not in each of the three Switch layers, nor in their recomputation."""
    flags = (
        "--max-update",
        "2",
        "--moe-expert-parallel",
        "--ddp-backend",
        "legacy_ddp",
        "--moe-freq",
        "1",
    )
    flags += ("--decoder-layers", "3", *checkpointing, *user_dir(AGREEMENTS))
    for output in train_on_two(tmp_path / "run", *flags):
        assert [line for line in output.splitlines() if line.startswith("waits")] == ["waits 1"] * 2


@pytest.mark.thorough
def test_fp16_resumes_with_and_without_expert_parallelism(train, train_on_two, tmp_path):
    flags = ("--dropout", "0", "--fp16", "--ddp-backend", "legacy_ddp")
    train_on_two(tmp_path / "whole", *flags, "--max-update", 6)
    for updates, options in ((3, ("--moe-expert-parallel",)), (6, ())):
        output, _ = train_on_two(tmp_path / "parts", *flags, "--max-update", updates, *options)
    assert "@ 3 updates" in output
    saved = [load(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts")]
    whole, parts = (state["last_optimizer_state"]["state"] for state in saved)
    assert whole.keys() == parts.keys()
    for index, state in whole.items():
        assert state["step"] == parts[index]["step"] == 6
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(parts[index][name], state[name], atol=1e-3, rtol=1e-2)
    for name, weights in saved[0]["model"].items():
        if not name.endswith(
            "k_proj.bias"
        ):  # its gradient is rounding error only, which Adam scales up
            # The mean: Adam scales differences of small gradients up.
            difference = (saved[1]["model"][name].float() - weights.float()).abs().mean()
            assert difference < 1e-4, name  # an update is 1e-2
    output = train(tmp_path / "parts", *flags, "--max-update", 7, "--moe-expert-parallel")
    assert "@ 6 updates" in output  # also in one process
