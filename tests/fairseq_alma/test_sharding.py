"""--zero-sharding os trains as without it, to the bit, and its checkpoints do not depend on it."""

import json
import signal

import pytest

from tests.fairseq_alma.shared import assert_same_model, assert_same_training, load, logged
from tests.fairseq_alma.test_restart import DIES

SHARDED = ("--zero-sharding", "os")
TRAINING = "--max-update 12 --total-num-update 12 --log-interval 1 --save-interval-updates 6"
TRAINING += " --keep-interval-updates 1 --store-ema --ema-poly 4"
GROWTH = "--stage 1 --moe-expert-count 6 --grow-experts 2 --grow-optimizer copy --replay-share .5"


def losses(output: str) -> dict[str, str]:
    """Loss of each update in a log of fairseq-train, as text."""
    return {record["num_updates"]: record["loss"] for record in logged(output, "train_inner")}


@pytest.fixture
def interrupted_on_two(start_two, train_on_two, stream, tiny, user_dir, tmp_path):
    """`interrupted_on_two(save, number, *flags)`:
    the signal `number` ends both processes in update 8.

    Trains to the end, and returns the losses that the second start logs.
    """

    def run(save, number: int, *flags) -> dict[str, str]:
        environment = {"DIES_AT": "8", "DIES_BY": str(int(number))}
        words = (stream, *tiny, "--save-dir", save, *flags, *user_dir(DIES))
        codes = [child.wait().code for child in start_two(*words, environment=environment)]
        assert set(codes) <= {-number, 128 + number}
        assert load(save / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 6
        return losses(train_on_two(save, *flags)[0])

    return run


@pytest.mark.parametrize(
    ("precision", "number"),
    [
        ("", signal.SIGKILL),
        pytest.param("--fp16 --fp16-init-scale 4", signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param("--bf16", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_two_stages_equal_those_without_sharding(
    train_on_two, interrupted_on_two, tmp_path, precision, number
):
    """Interrupted and resumed, with an average;
    the second stage with growth, replay and Adam's state."""
    previous = {}
    for stage, stage_flags in enumerate(("", GROWTH)):
        flags = [*TRAINING.split(), *precision.split(), *stage_flags.split()]
        last = {
            kind: tmp_path / f"{kind}_{stage}" / "checkpoint_last.pt"
            for kind in ("plain", "sharded")
        }
        start = {kind: ("--finetune-from-model", path) for kind, path in previous.items()}
        plain = losses(train_on_two(last["plain"].parent, *flags, *start.get("plain", ()))[0])
        folder = last["sharded"].parent
        resumed = interrupted_on_two(folder, number, *flags, *SHARDED, *start.get("sharded", ()))
        assert resumed == {update: loss for update, loss in plain.items() if int(update) > 6}
        assert_same_training(last["plain"], last["sharded"])
        previous = last


FP16 = ("--fp16", "--fp16-init-scale", "4")


@pytest.mark.thorough
@pytest.mark.parametrize("sharded_first", [True, False])
def test_a_checkpoint_goes_on_with_sharding_or_without(
    train, train_on_two, tmp_path, sharded_first
):
    """From two processes to one, or from one to two, at the same batch."""
    flags = (*TRAINING.split(), *FP16)
    starts = [(train_on_two, "2"), (train, "4")]
    if not sharded_first:
        starts.reverse()
    last = []
    for kind, sharding in (("plain", ()), ("sharded", SHARDED)):
        for updates, (run, batches) in zip(("6", "12"), starts, strict=True):
            options = sharding if run is train_on_two else ()
            run(
                tmp_path / kind, *flags, "--update-freq", batches, "--max-update", updates, *options
            )
        last.append(tmp_path / kind / "checkpoint_last.pt")
    assert_same_training(*last)


COUNTS = """
import json, os
import torch
from fairseq_alma.training.sharding import ShardedOptimizer

step = ShardedOptimizer.step

def counted(self, *args, **kwargs):
    step(self, *args, **kwargs)
    held = sum(value.numel() for state in self.optim.state.values() for value in state.values()
               if torch.is_tensor(value))
    copies = sum(len(state) for state in self.state.values()) + len(self._all_states)
    line = json.dumps({"held": held, "copies": copies, "of": type(self.optim).__name__})
    open(os.environ["COUNTS"] + str(torch.distributed.get_rank()), "w").write(line)

ShardedOptimizer.step = counted
"""


def test_each_process_holds_its_share_once(train_on_two, user_dir, tmp_path, monkeypatch):
    """After a checkpoint and a restart: Adam's moments of half of the parameters,
    by the fused kernel."""
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts_"))
    flags = (*TRAINING.split(), "--fp16", *SHARDED, *user_dir(COUNTS))
    for updates in ("7", "9"):
        train_on_two(
            tmp_path / "run", *flags, "--max-update", updates, "--save-interval-updates", "2"
        )
    counts = [json.loads((tmp_path / f"counts_{rank}").read_text()) for rank in (0, 1)]
    states = load(tmp_path / "run" / "checkpoint_last.pt")["last_optimizer_state"]["state"].values()
    parameters = sum(state["exp_avg"].numel() for state in states)
    assert sum(count["held"] for count in counts) == 2 * parameters
    assert max(count["held"] for count in counts) < 1.2 * parameters
    assert [(count["copies"], count["of"]) for count in counts] == [(0, "FusedAdam")] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags",
    [
        *("--use-old-adam", "--optimizer adamax", "--optimizer nag --momentum .5"),
        *("--optimizer sgd --momentum .5", "--optimizer adagrad", "--optimizer adadelta"),
        *("--optimizer adafactor --beta1 .5", "--memory-efficient-fp16", "--memory-efficient-bf16"),
        *("--ddp-backend legacy_ddp", "--arch transformer_lm --decoder-ffn-embed-dim 32"),
        *("--members 2", "--fp16 --optimizer adafactor"),
    ],
)
def test_with_other_optimizers_and_models(train_on_two, interrupted_on_two, tmp_path, flags):
    words = (*TRAINING.split(), *flags.split())
    train_on_two(tmp_path / "plain", *words)
    interrupted_on_two(tmp_path / "sharded", signal.SIGKILL, *words, *SHARDED)
    assert_same_training(*(tmp_path / kind / "checkpoint_last.pt" for kind in ("plain", "sharded")))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "this training has one: leave it out, or give --distributed-world-size 2 or more"),
        (
            "--moe-expert-parallel",
            "--zero-sharding os: each process already keeps the optimizer's state",
        ),
    ],
)
def test_what_it_cannot_be_with_is_refused(start, stream, tiny, tmp_path, flags, line):
    done = start(
        "train", stream, *tiny, *SHARDED, *flags.split(), "--save-dir", tmp_path / "run"
    ).wait()
    assert done.code == 2
    assert line in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


def test_offloaded_activations_change_no_number(train_on_two, tmp_path):
    """--checkpoint-activations --offload-activations, with Switch layers in two processes."""
    offload = ("--checkpoint-activations", "--offload-activations")
    plain = train_on_two(tmp_path / "plain", *TRAINING.split())
    offloaded = train_on_two(tmp_path / "offloaded", *TRAINING.split(), *offload)
    assert losses(plain[0]) == losses(offloaded[0])
    assert_same_model(
        *(tmp_path / folder / "checkpoint_last.pt" for folder in ("plain", "offloaded"))
    )
