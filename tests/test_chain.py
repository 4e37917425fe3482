"""The whole way on real text: data_prep, the launcher, fairseq, evaluation, records, report.

The killed chain runs as a user starts it; the run that it is compared with has forked children.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alma.errors import UserError
from alma.records import Run
from tests.fairseq_alma.shared import assert_same_training
from tests.machine_fields import without_machine_fields

ROOT = Path(__file__).parent.parent
FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --max-tokens 1024 --optimizer adam --lr 1e-2
    --lr-scheduler polynomial_decay --total-num-update 24 --max-update 24 --warmup-updates 4
    --save-interval-updates 6 --keep-interval-updates 1 --no-epoch-checkpoints --num-workers 0
""".split()


OPTIONS = ("--learner", "gmoe", "--grow-experts", "2")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in forked children


def command(stream, out) -> list[str]:
    """The launcher of the first two stages of the gmoe chain."""
    words = (stream, "--out", out, *OPTIONS, "--stages", "2", "--", *FLAGS)
    return [sys.executable, "-m", "slurm.launch", *map(str, words)]


def comparable(out) -> list[dict]:
    """The rows of results.jsonl without what belongs to the machine."""
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return without_machine_fields(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the uninterrupted run; to launch it again only reads it."""
    return tmp_path_factory.mktemp("chain") / "gmoe"


@pytest.fixture
def grown(forked, stream, folder) -> Path:
    """An uninterrupted gmoe run, 4 -> 6 -> 8 experts, of forked children."""
    forked.launch(stream, "--out", folder, *OPTIONS, "--", *FLAGS)
    return folder


def test_a_grown_chain_improves_with_every_megabatch_and_reports(grown, tmp_path):
    rows = Run.read(grown).rows
    assert [row["t"] for row in rows] == [0, 1, 2, 3]
    values = [row["value"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert [row["extra"]["experts"] for row in rows] == [4, 4, 6, 8]
    for before, after in itertools.pairwise(rows[1:]):
        assert after["parameters"] > before["parameters"]
    shares = rows[-1]["extra"]["expert_layers"]["1"]["share"]
    assert len(shares) == 8
    assert min(shares) > 0
    report = [sys.executable, "-m", "alma.report", grown, "--out", tmp_path / "report"]
    printed = subprocess.run(
        list(map(str, report)), check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert f"{values[-1]:.2f}" in printed.stdout
    assert list((tmp_path / "report").glob("*.png"))


def kill_when(stream, out, happened) -> None:
    """Start the chain and SIGKILL the launcher once `happened(out)` is true."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command(stream, out), cwd=ROOT, env=ONE_THREAD, **silent)
    deadline = time.monotonic() + 600
    while not happened(out):
        assert launcher.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.thorough
def test_killing_the_chain_changes_no_result(stream, grown, tmp_path):
    """While a checkpoint is written, and after growth; slurm/test_interrupted.py has more."""
    out = tmp_path / "killed"
    saves = ("checkpoint_*_18.pt.tmp", "checkpoint_*_18.pt")
    moments = [
        lambda o: any(path for name in saves for path in o.glob(f"stage_00/{name}")),
        lambda o: (o / "stage_01/grown.pt").exists(),
    ]
    for happened in moments:
        kill_when(stream, out, happened)
    subprocess.run(command(stream, out), check=True, cwd=ROOT, env=ONE_THREAD)
    assert comparable(out) == comparable(grown)[:3]
    assert_same_training(*(folder / "stage_01/checkpoint_last.pt" for folder in (out, grown)))


def test_relaunching_a_finished_run_trains_nothing_and_other_settings_are_refused(
    forked, stream, grown
):
    before = (grown / "results.jsonl").read_bytes()
    started = time.time()
    forked.launch(stream, "--out", grown, *OPTIONS, "--", *FLAGS)
    assert (grown / "results.jsonl").read_bytes() == before
    assert all(path.stat().st_mtime < started for path in grown.rglob("*.pt"))
    with pytest.raises(UserError, match="grow_experts"):
        forked.launch(stream, "--out", grown, *OPTIONS, "--grow-experts", "4", "--", *FLAGS)


def test_the_literal_fairseq_train_command_works_without_user_dir(stream, tmp_path):
    script = Path(sys.executable).with_name("fairseq-train")
    if not script.exists():
        pytest.fail("fairseq-train is not installed beside this Python")
    arguments = [
        script,
        stream,
        "--task",
        "alma_lm",
        *FLAGS,
        "--max-update",
        1,
        "--save-dir",
        tmp_path / "s",
    ]
    finished = subprocess.run(
        list(map(str, arguments)), cwd=tmp_path, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "s" / "checkpoint_last.pt").exists()
