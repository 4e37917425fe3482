"""`alma train --trainer COMMAND`: what COMMAND gets, what it may answer, faults, kills,
sharing, SLURM."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher import call

from alma.records import Run
from alma.stream import Stream
from alma.trainer import StageTask
from slurm.engine import children
from slurm.engine.forks import ForkServer
from slurm.launch import main
from tests.machine_fields import without_machine_fields

ROOT = Path(__file__).parents[2]
BESIDE = "LOSS = 5.0\n"
TRAINER = """
import os, sys, time
from pathlib import Path
import beside  # a module in the trainer's folder
from alma.trainer import StageTask, stop_requests

task = StageTask.read(sys.argv[-1])
fault = os.environ.get("FAULT", "")
if task.action == "evaluate":
    assert all(len(part.read_tokens()) == part.tokens for part in task.evaluate)
    trained = [Path(one).read_text().split() for one in task.members] or [[] for _ in task.seeds]
    loss = beside.LOSS - sum(map(len, trained)) / len(trained) / 10
    losses = {part.name: (loss, part.tokens) for part in task.evaluate}
    if fault == "no loss":
        del losses["test"]
    if fault == "nan":
        losses["test"] = float("nan"), 10
    task.finish(losses, parameters=10 * len(trained))
    sys.exit()
stopped, model = stop_requests(), Path(task.out, "model.txt")
if model.exists():
    done = model.read_text().split()
else:
    done = Path(task.checkpoint).read_text().split() if task.checkpoint else []
new = [f"{part.name}.{k}" for part in (*task.earlier, *task.train) for k in range(3)]
for word in new:
    if word not in done:
        done.append(word)
        time.sleep(float(os.environ.get("SLOW", 0)))
        Path(task.out, "part").write_text(" ".join(done))
        os.replace(Path(task.out, "part"), model)
        task.progress(len(done), 4.0)
        if stopped() or fault == "stop":
            sys.exit(75)
if fault == "dies":
    raise RuntimeError("no more luck")
if fault == "half":
    Path(task.out, "trained.json").write_text('{"parameters": 10, "upda')
    sys.exit()
if fault == "silent":
    sys.exit()
amounts = {"updates": len(new), "tokens": 100 * len(new), "seconds": 1.0, "checkpoint": "model.txt"}
amounts |= {"lazy": {"updates": 0}, "less": {"tokens": -1}}.get(fault, {})
amounts |= {"nothing": {"checkpoint": "gone.pt"}, "typo": {"flop": 3}}.get(fault, {})
amounts |= {"outside": {"checkpoint": "../stage.json"}}.get(fault, {})
task.finish(parameters=10, **amounts)
"""


@pytest.fixture
def train(stream, tmp_path, monkeypatch, capsys) -> Callable:
    """`train(*words, code=0, fault="")`: `alma train` with the trainer above;
    returns what it prints."""
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "my_trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)

    def run(
        *words: object,
        code: int = 0,
        fault: str = "",
        trainer: str = "my_trainer.py",
        what: Path | str = stream,
    ) -> str:
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setattr(sys, "argv", ["alma train"])
        arguments = [what, *words, "--trainer", f"{sys.executable} {trainer}"]
        capsys.readouterr()
        assert call(main, monkeypatch, *arguments) == code, capsys.readouterr().err
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def rows(run: str = "run") -> list[dict]:
    """The rows of a run without what measures the machine."""
    return without_machine_fields(Run.read(run).rows)


def test_a_trainer_gets_its_stage_and_its_answers_become_rows(train, stream):
    train(
        "--learner",
        "sm",
        "--replay-share",
        ".5",
        "--seed",
        "3",
        "--budget",
        "updates=6",
        "--out",
        "run",
    )
    task = StageTask.read("run/stage_02/model/stage.json")
    assert [part.name for part in task.train] == ["megabatch_02"]
    assert [part.name for part in task.earlier] == ["megabatch_00", "megabatch_01"]
    assert (task.replay_share, task.seeds, task.budget, task.t) == (0.5, (3,), {"updates": 6}, 3)
    assert task.checkpoint == str(Path("run/stage_01/model/model.txt").resolve())
    assert StageTask.read("run/stage_00/model/stage.json").replay_share == 0
    words = Stream.load(stream).test.words
    first, *_, last = rows()
    assert first["value"] == math.exp(5.0)
    assert last["value"] == math.exp(4.1)
    assert last["extra"]["perplexity_per_word"] == math.exp(
        4.1 * Stream.load(stream).test.tokens / words
    )
    assert last["train_flops"] == 6 * 10 * 900
    before = rows()
    assert "stage 1: was complete" in train(
        "--learner",
        "sm",
        "--replay-share",
        ".5",
        "--seed",
        "3",
        "--budget",
        "updates=6",
        "--out",
        "run",
    )
    assert rows() == before


def test_an_ensemble_is_evaluated_by_the_trainer_and_shares_its_first_member(train, stream):
    Path("e.yaml").write_text("waiting-time: 2\nlearner: [ens, gens]\n")
    output = train("--stream", stream, "--out", "runs", what="e.yaml")
    assert "shared with" in output
    folders = {
        Run.read(path.parent).config["learner"]: path.parent
        for path in Path("runs").glob("*/run.json")
    }
    for learner in ("ens", "gens"):
        members = StageTask.read(str(folders[learner] / "stage_01/evaluation/stage.json")).members
        assert len(members) == 2
        assert all(map(os.path.exists, members))
    assert (folders["ens"] / "stage_00/member_0/model/model.txt").exists()
    assert rows(str(folders["ens"]))[-1]["parameters"] == 20


@pytest.mark.parametrize(
    ("fault", "says"),
    {
        "half": "trained.json",
        "silent": "the program ended without",
        "no loss": "no loss of test",
        "nan": "losses",
        "lazy": "a training without updates",
        "nothing": "checkpoint gone.pt: no such file",
        "outside": "checkpoint",
        "less": "tokens",
        "typo": "unknown fields flop",
    }.items(),
)
def test_a_wrong_answer_is_one_line_and_nothing_is_lost(train, fault, says):
    words = ("--learner", "sm", "--waiting-time", "3", "--out", "run")
    output = train(*words, code=2, fault=fault)
    assert output.splitlines()[-1].startswith("error: ")
    assert says in output.splitlines()[-1]
    train(*words)
    assert rows()[-1]["value"] == math.exp(4.1)


@pytest.mark.parametrize(
    ("fault", "says"), [("dies", "no more luck"), ("stop", "rerun the command to resume")]
)
def test_a_trainer_that_ends_early_goes_on(train, fault, says):
    words = ("--learner", "sm", "--waiting-time", "3", "--out", "run")
    assert says in train(*words, code=1, fault=fault).splitlines()[-1]
    before = len(Path("run/stage_00/model/model.txt").read_text().split())
    assert before == (9 if fault == "dies" else 1)
    train(*words)
    assert rows()[-1]["value"] == math.exp(4.1)


def test_killed_at_any_moment_the_end_is_the_same(train, stream, tmp_path):
    words = [
        stream,
        "--learner",
        "ens",
        "--replay",
        "--trainer",
        f"{sys.executable} my_trainer.py",
        "--out",
    ]
    train("--learner", "ens", "--replay", "--out", "whole")
    environment = os.environ | {"SLOW": ".02"}
    command = [sys.executable, "-m", "slurm.launch", *map(str, words), "killed"]
    chance = random.Random(1)
    code = 1
    kills = 0
    while code:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            process.wait(chance.uniform(1, 4) if kills < 5 else None)
        except subprocess.TimeoutExpired:
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            ready = int(caught[1], 16) >> (signal.SIGTERM - 1) & 1  # else it is still importing
            process.send_signal(
                chance.choice([signal.SIGKILL, signal.SIGTERM]) if ready else signal.SIGKILL
            )
            kills += 1
        errors = process.communicate()[1]
        code = process.returncode
        assert code in (0, -signal.SIGKILL, 128 + signal.SIGTERM) or "at work here" in errors, (
            errors
        )
        time.sleep(0.2)
    assert kills
    assert rows("killed") == rows("whole")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--learner", "gmoe"], "needs models of fairseq"),
        (
            ["--learner", "sm", "--schedule", "continuous"],
            "--schedule is for the training of fairseq",
        ),
        (["--learner", "sm", "--average", ".9"], "--average is for the training of fairseq"),
        (["--learner", "sm", "--budget", "updates=many"], "give updates=N"),
        (["--learner", "sm", "--arch", "transformer_lm"], "--arch"),
        (["--learner", "sm", "--grow-experts", "2"], "--grow-experts needs"),
    ],
)
def test_what_makes_no_sense_is_refused(train, words, says):
    assert says in train(*words, "--out", "run", code=2).splitlines()[-1]
    assert not Path("run").exists()


def test_another_trainer_does_not_go_on_from_the_files_of_the_first(train):
    train("--learner", "sm", "--waiting-time", "3", "--out", "run", code=1, fault="stop")
    Path("other.py").write_text(TRAINER)
    output = train(
        "--learner", "sm", "--waiting-time", "3", "--out", "run", code=2, trainer="other.py"
    )
    assert "trainer" in output.splitlines()[-1]


def test_on_slurm_its_jobs_are_arrays(train):
    words = (
        "--learner",
        "ens",
        "--cluster",
        "slurm",
        "--gpus-per-node",
        "0",
        "--dry-run",
        "--out",
        "run",
    )
    output = train(*words)
    assert "run stage 0, member 1 of 2, run stage 0, member 2 of 2" in output
    assert "one task of one node" in train(*words, "--nodes", "2", code=2)
    assert not Path("run").exists()


EXAMPLES = ROOT / "examples/trainers"
MODULES = ("fairseq_cli.train", "fairseq_alma.preloaded")
FLAGS = (
    "--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 "
    "--decoder-ffn-embed-dim 16 --tokens-per-sample 64 --batch-size 8 --optimizer adam --lr 5e-3 "
    "--max-update 10 --num-workers 0 --no-epoch-checkpoints --cpu"
)


@pytest.fixture(scope="module")
def server():
    """It has imported what the trainer needs: seconds for each of its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        fork_server = ForkServer(MODULES)
    yield fork_server
    fork_server.stop()


@pytest.fixture
def example(train, server, monkeypatch) -> Callable:
    """`example(name, *words)` is `train` with a module of these tests;
    it and fairseq's commands are forks."""
    forks = SimpleNamespace(start=server.start, stop=lambda: None)
    monkeypatch.setattr(children, "ForkServer", lambda _: forks)
    monkeypatch.setattr(children, "_forks", forks)
    return lambda name, *words: train(*words, trainer=f"-m tests.slurm.{name}")


@pytest.mark.thorough
def test_plain_torch_learns(train):
    words = (
        "--learner",
        "sm",
        "--replay-share",
        ".5",
        "--waiting-time",
        "2",
        "--budget",
        "updates=20",
    )
    train(*words, "--out", "run", trainer=f"{EXAMPLES}/plain_torch.py")
    first, *_, second, third = (row["value"] for row in rows())
    assert third < second < 0.9 * first


@pytest.mark.thorough
def test_fairseq_as_a_trainer_has_the_rows_of_sm(example, stream, monkeypatch):
    example(f"fairseq_trainer {FLAGS}", "--learner", "sm", "--stages", "1", "--out", "own")
    words = (stream, "--learner", "sm", "--stages", "1", "--out", "built-in", "--", *FLAGS.split())
    assert call(main, monkeypatch, *words) == 0
    for example_row, row in zip(rows("own"), rows("built-in"), strict=True):
        del row["extra"]["eval_flops_per_example_with_attention"]
        assert example_row["extra"].pop("perplexity_per_word") == pytest.approx(
            row["extra"].pop("perplexity_per_word")
        )
        assert example_row["extra"].pop("bits_per_byte") == pytest.approx(
            row["extra"].pop("bits_per_byte")
        )
        assert example_row["extra"].pop("valid") == pytest.approx(row["extra"].pop("valid"))
        assert example_row == row


def test_the_schema_of_answers_is_checked_on_both_sides(train):
    train("--learner", "sm", "--waiting-time", "3", "--out", "run")
    path = Path("run/stage_00/model/stage.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(SystemExit):
        StageTask.read(str(path))
