"""Several processes train as one does: the end of an epoch, a resume with another number, the
plan."""

import math
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils

from alma.files import locked
from fairseq_alma import hooks
from tests.fairseq_alma.shared import load, logged

STEPS = (
    "--dropout",
    "0",
    "--log-interval",
    "1",
    "--clip-norm",
    "0.1",
    "--required-batch-size-multiple",
    "1",
)


def steps(output: str) -> list[list[float]]:
    """Update, loss, gradient norm of each update in a log of fairseq-train."""
    names = ("num_updates", "loss", "gnorm")
    numbers = []
    for record in logged(output, "train_inner"):
        numbers.append([float(record[name]) for name in names])
    return numbers


@pytest.fixture
def train(start, start_two, stream, tiny, tmp_path):
    """`train(processes, folder, *flags)` -> the steps."""

    def run(processes: int, folder: str, *flags) -> list[list[float]]:
        words = (stream, *tiny, *STEPS, "--save-dir", tmp_path / folder, *flags)
        done = [
            child.wait()
            for child in (start_two(*words) if processes == 2 else [start("train", *words)])
        ]
        assert [child.code for child in done] == [0] * processes, done[0].output
        return steps(done[0].output)

    return run


@pytest.fixture
def state(tmp_path):
    """`state(folder)`: its last checkpoint."""
    return lambda folder: load(tmp_path / folder / "checkpoint_last.pt")


@pytest.fixture
def refused(start, stream, tiny, tmp_path):
    """`refused(folder, *flags)`: the line, the same from each process,
    in which a training is refused."""

    def run(folder: str, *flags, **options) -> str:
        words = (stream, *tiny, *STEPS, "--save-dir", tmp_path / folder, *flags)
        done = start("train", *words, **options).wait()
        assert (done.code, "Traceback" in done.output) == (2, False), done.output
        (line,) = {line for line in done.output.splitlines() if line.startswith("error: ")}
        return line

    return run


def batch_size(build, remainder: int) -> int:
    """A batch size with which the batches of an epoch, divided by 4, leave `remainder`."""
    task, _ = build()
    task.load_dataset("train")
    blocks = len(task.datasets["train"])
    return next(size for size in range(20, 3, -1) if math.ceil(blocks / size) % 4 == remainder)


@pytest.mark.parametrize(
    "backend", ["legacy_ddp", pytest.param("pytorch_ddp", marks=pytest.mark.thorough)]
)
def test_the_last_update_of_an_epoch_is_that_of_one_process(train, state, build, backend):
    """The second process ends with the chunk [batch, nothing]."""
    size = batch_size(build, 3)
    flags = (
        "--max-tokens",
        "9999",
        "--batch-size",
        size,
        "--max-epoch",
        "1",
        "--ddp-backend",
        backend,
    )
    one = train(1, "one", *flags, "--update-freq", "4")
    two = train(2, "two", *flags, "--update-freq", "2")
    assert len(one) > 1
    assert two == [pytest.approx(step, rel=2e-2) for step in one]
    for name, weights in state("one")["model"].items():
        torch.testing.assert_close(state("two")["model"][name], weights, atol=1e-4, rtol=1e-3)
    tokens = [
        state(folder)["extra_state"]["AlmaLMTask"]["train_tokens"] for folder in ("one", "two")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on_with_the_same_data(train, before, after):
    """In the middle of an epoch, at the same batch."""
    whole = train(before, "whole", "--update-freq", 4 // before, "--max-update", "4")
    train(before, "run", "--update-freq", 4 // before, "--max-update", "2")
    rest = train(after, "run", "--update-freq", 4 // after, "--max-update", "4")
    assert rest == [pytest.approx(step, rel=2e-2) for step in whole[2:]]


def test_every_process_maps_the_checkpoint_itself(train, state, tmp_path, monkeypatch):
    """None sends it; its pages are those of the file.
    Other tasks may read torch's format before 1.6."""
    monkeypatch.setattr(distributed_utils, "broadcast_object", None)
    hooks.install()
    train(2, "run", "--max-update", "1")
    path = tmp_path / "run/checkpoint_last.pt"
    read = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert str(path) in Path("/proc/self/maps").read_text()
    train(2, "run", "--max-update", "2")
    torch.save(state("run"), path, _use_new_zipfile_serialization=False)
    older = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert read["model"].keys() == older["model"].keys()


def test_processes_that_cannot_go_on_at_the_same_batch_are_refused(train, refused):
    train(1, "run", "--update-freq", "3", "--max-update", "1", "--save-interval-updates", "1")
    two = ("--distributed-world-size", "2", "--max-update", "4")
    assert "3 batches in each of 1 processes, which 2 cannot share" in refused("run", *two)
    assert "within an epoch of" in refused("run", "--max-tokens", "256", "--max-update", "4")
    train(2, "run", "--reset-dataloader", "--max-update", "2")


def test_a_training_that_differs_from_its_plan_is_refused(train, refused, tmp_path, monkeypatch):
    """Fewer GPUs for torch than planned, another number of processes, another batch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: 8
    )  # by NVML, with a driver too old for torch
    error = refused("run", "--expect-gpus", "8", "--distributed-world-size", "8")
    assert "planned: 8 GPUs here, but torch" in error
    assert "can use 0" in error
    two = ("--update-freq", "3", "--distributed-world-size", "2")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    error = refused("run", *two, environment=alone)
    assert "--distributed-world-size 2, but WORLD_SIZE is 1 in the environment: unset RANK" in error
    error = refused("run", "--expect-tokens", 2 * 3 * 512, "--update-freq", "3", environment=alone)
    assert "3,072 tokens an update in 2 processes, but 1 joined, with 1,536 tokens" in error
    assert not (tmp_path / "run").exists()
    train(1, "run", *two, "--expect-tokens", 2 * 3 * 512, "--max-update", "1")


def test_two_trainings_do_not_share_a_folder(refused, tmp_path, monkeypatch):
    """As N tasks that each believe to be the only one."""
    monkeypatch.setattr("alma.files._WAIT_SECONDS", 1)
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run", ".training.lock"):
        assert "another process is at work here" in refused("run", "--max-update", "1")


def test_side_by_side_in_one_allocation(start, stream, tiny, tmp_path):
    """Each at a free port, with the planned processes; fairseq takes both from SLURM's
    variables."""
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "0",
    }
    slurm |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    flags = ("--max-update", "2", "--distributed-world-size", "2", "--expect-tokens", 2 * 512)
    both = []
    for name in "ab":
        meet = (
            "--distributed-init-method",
            f"alma://{tmp_path}/{name}.json?attempt=7.0&host=localhost",
        )
        words = (
            stream,
            *tiny,
            "--save-dir",
            tmp_path / name,
            *flags,
            *meet,
            "--distributed-rank",
            "0",
        )
        both.append(start("train", *words, environment=slurm))
    for child in both:
        done = child.wait()
        assert done.code == 0, done.output
        assert "training on 2 devices" in done.output
