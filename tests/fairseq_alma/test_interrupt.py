"""On a signal fairseq-train saves and exits with code 75; run again, it resumes bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fairseq_alma import interrupt
from tests.fairseq_alma.shared import assert_same_training, load

AGAIN = 75
HALF_PRECISIONS = ("fp16", "memory-efficient-fp16", "bf16", "memory-efficient-bf16")

# Loaded with --user-dir: rank SIGNAL_TO signals itself during update SIGNAL_AT.
AT_UPDATE = """
import os, signal
import torch
from fairseq_alma.task import AlmaLMTask

step = AlmaLMTask.train_step

def train_step(self, sample, model, criterion, optimizer, update_num, **kwargs):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    is_target = rank == int(os.environ.get("SIGNAL_TO", 0))
    if is_target and update_num + 1 == int(os.environ["SIGNAL_AT"]):
        os.kill(os.getpid(), signal.SIGUSR1)
    return step(self, sample, model, criterion, optimizer, update_num, **kwargs)

AlmaLMTask.train_step = train_step
"""


@pytest.fixture
def at_update(user_dir):
    """`at_update(n, rank)`: flags and environment with which this rank signals itself during update
    n."""
    flags = user_dir(AT_UPDATE)

    def make(update: int, rank: int = 0) -> tuple[tuple, dict[str, str]]:
        return flags, {"SIGNAL_AT": str(update), "SIGNAL_TO": str(rank)}

    return make


def position(path) -> tuple[int, dict]:
    state = load(path)
    return state["optimizer_history"][-1]["num_updates"], state["extra_state"]


def wait_for_log(child, text: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not (child.log.exists() and text in child.log.read_text()):
        assert time.monotonic() < deadline, child.log.read_text()
        time.sleep(0.002)


def stopped(finished) -> str:
    """The one line that an interrupted process logs about it."""
    assert finished.code == AGAIN, finished.output
    assert "Traceback" not in finished.output
    (line,) = (line for line in finished.output.splitlines() if "stopped by a signal" in line)
    return line


def finish(child) -> str:
    finished = child.wait()
    assert finished.code == 0, finished.output
    assert "stopped by a signal" not in finished.output
    return finished.output


@pytest.fixture
def stop_at(start, stream, tiny, at_update):
    """`stop_at(update, save, *flags)`: the end of a training that stops after the update."""

    def run(update: int, save, *flags):
        signal_flags, environment = at_update(update)
        words = (stream, *tiny, "--save-dir", save, *flags, *signal_flags)
        finished = start("train", *words, environment=environment).wait()
        assert f"after update {update}," in stopped(finished)
        return finished

    return run


@pytest.mark.parametrize(
    "precision",
    [
        "fp16",
        *(
            pytest.param(precision, marks=pytest.mark.thorough)
            for precision in HALF_PRECISIONS
            if precision != "fp16"
        ),
    ],
)
def test_half_precisions_resume_bit_for_bit_while_the_loss_scale_grows(
    train, stop_at, tmp_path, precision
):
    """The scale doubles every 3 updates; the interruption falls between two of them."""
    kind = "amp" if precision == "amp" else "fp16"
    flags = [f"--{precision}", "--max-update", "10"]
    if "bf16" not in precision:  # which scales no loss
        flags += [f"--{kind}-scale-window", "3"]
    train(tmp_path / "whole", *flags)
    save = tmp_path / "interrupted"
    for update in (4, 8):
        stop_at(update, save, *flags)
    train(save, *flags)
    last = "checkpoint_last.pt"
    assert_same_training(tmp_path / "whole" / last, save / last)
    state = load(save / last)["last_optimizer_state"]
    if "bf16" not in precision:
        assert (state["scaler"]["scale"] if kind == "amp" else state["loss_scale"]) == 128 * 2**3


def test_it_saves_once_and_validates_only_when_due(train, stop_at, tmp_path):
    """Even after a validation in the middle of an epoch; the best checkpoint stays the best."""
    flags = (
        "--max-update",
        "12",
        "--save-interval-updates",
        "4",
        "--validate-interval-updates",
        "6",
    )
    train(tmp_path / "whole", *flags)
    save = tmp_path / "interrupted"
    for update, validations in ((3, 0), (4, 1), (6, 1), (7, 0)):
        finished = stop_at(update, save, *flags)
        assert finished.output.count('begin validation on "valid"') == validations
        assert finished.output.count("Finished saving") == 1
        at, extra = position(save / "checkpoint_last.pt")
        assert at == update
        if update == 4:
            best = (save / "checkpoint_best.pt").read_bytes()
            lowest = extra["best"]
        elif update > 4:
            assert extra["best"] == lowest
            assert (save / "checkpoint_best.pt").read_bytes() == best
        else:
            assert "best" not in extra
    train(save, *flags)
    assert {path.name for path in save.iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    for name in (
        "checkpoint_1_4.pt",
        "checkpoint_1_8.pt",
        "checkpoint_last.pt",
        "checkpoint_best.pt",
    ):
        assert_same_training(tmp_path / "whole" / name, save / name)


def test_a_signal_in_the_last_update_changes_nothing(start, stream, tiny, tmp_path, at_update):
    for name, flags in (("updates", ()), ("epochs", ("--max-epoch", "1", "--max-update", "0"))):
        save = tmp_path / name
        output = finish(start("train", stream, *tiny, "--save-dir", save, *flags))
        last, _ = position(save / "checkpoint_last.pt")
        assert output.count("Finished saving") == 1
        words, environment = at_update(last)
        again = tmp_path / f"{name}_again"
        arguments = (stream, *tiny, "--save-dir", again, *flags, *words)
        assert (
            finish(start("train", *arguments, environment=environment)).count("Finished saving")
            == 1
        )
        assert_same_training(save / "checkpoint_last.pt", again / "checkpoint_last.pt")


def test_at_the_end_of_an_epoch_it_resumes_with_the_next(train, stop_at, tmp_path):
    train(tmp_path / "epoch", "--max-epoch", "1", "--max-update", "0")
    last, _ = position(tmp_path / "epoch" / "checkpoint_last.pt")
    flags = ("--max-update", str(2 * last + 5))
    train(tmp_path / "whole", *flags)
    save = tmp_path / "interrupted"
    finished = stop_at(2 * last, save, *flags)
    assert finished.output.count("Finished saving") == 2
    train(save, *flags)
    assert_same_training(tmp_path / "whole" / "checkpoint_last.pt", save / "checkpoint_last.pt")


@pytest.mark.parametrize(
    ("rank", "parallel"),
    [
        (1, ()),
        (0, ("--moe-expert-parallel",)),
        pytest.param(0, (), marks=pytest.mark.thorough),
        pytest.param(1, ("--moe-expert-parallel",), marks=pytest.mark.thorough),
    ],
)
def test_two_processes_stop_after_the_same_update_when_one_gets_the_signal(
    start_two, stream, tiny, tmp_path, at_update, rank, parallel
):
    flags = (stream, *tiny, *parallel, "--max-update", "12", "--ddp-backend", "legacy_ddp")
    for child in start_two(*flags, "--save-dir", tmp_path / "whole"):
        finish(child)
    save = tmp_path / "interrupted"
    words, environment = at_update(5, rank)
    first, second = start_two(*flags, "--save-dir", save, *words, environment=environment)
    assert "after update 5," in stopped(first.wait())
    finished = second.wait()
    assert finished.code == AGAIN, finished.output
    assert position(save / "checkpoint_last.pt")[0] == 5
    for child in start_two(*flags, "--save-dir", save):
        finish(child)
    assert_same_training(tmp_path / "whole" / "checkpoint_last.pt", save / "checkpoint_last.pt")


@pytest.mark.parametrize("to", ["starting parent", "worker"])
def test_spawned_processes_stop_together(start, stream, tiny, tmp_path, at_update, to):
    flags = (
        "--save-dir",
        tmp_path / "run",
        "--distributed-world-size",
        "2",
        "--max-update",
        "3000",
    )
    words, environment = at_update(4, rank=1) if to == "worker" else ((), {})
    child = start(
        "train", stream, *tiny, *flags, "--log-interval", "1", *words, environment=environment
    )
    if to != "worker":
        wait_for_log(child, "defaults of --task")
        os.kill(child.pid, signal.SIGUSR1)
    line = stopped(child.wait())
    updates, _ = position(tmp_path / "run" / "checkpoint_last.pt")
    assert f"after update {updates}," in line
    assert updates == (4 if to == "worker" else 1)


def test_complete_stages_and_evaluations_ignore_the_signal(start, stream, tiny, tmp_path):
    finish(start("train", stream, *tiny, "--save-dir", tmp_path / "run", "--max-update", "2"))
    last = tmp_path / "run" / "checkpoint_last.pt"
    before = last.read_bytes()
    evaluation = (stream, "--task", "alma_lm", "--path", last, "--gen-subset", "valid")
    for command, arguments in (
        ("train", (stream, *tiny, "--save-dir", tmp_path / "run", "--max-update", "2")),
        ("eval-lm", evaluation),
        ("evaluate", (*evaluation, "--out", tmp_path / "result.json")),
    ):
        child = start(command, *arguments)
        wait_for_log(child, "INFO")
        os.kill(child.pid, signal.SIGUSR1)
        assert "nothing to train" in finish(child) or command != "train"
    assert last.read_bytes() == before


def test_a_signal_at_exit_is_ignored_and_other_handlers_stay():
    code = """
import atexit, os, signal
handler = lambda *_: None
signal.signal(signal.SIGUSR2, handler)
atexit.register(lambda: None)
class Late:
    def __del__(self, os=os): os.kill(os.getpid(), 10)
from fairseq_alma import interrupt
interrupt.install()
assert signal.getsignal(signal.SIGUSR2) is handler
interrupt.late = Late()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_signal_to_one_process_ends_none_that_was_forked_beside_it(
    start, stream, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(interrupt.flag(), "value", True)
    finish(start("train", stream, *tiny, "--save-dir", tmp_path / "s", "--max-update", "2"))
