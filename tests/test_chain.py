"""The whole way on real text: data_prep, the launcher, fairseq, evaluation, records, report."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alma.records import MACHINE_FIELDS, Run

ROOT = Path(__file__).parent.parent
FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --max-tokens 1024 --optimizer adam --lr 1e-2 --lr-scheduler polynomial_decay
    --total-num-update 24 --max-update 24 --warmup-updates 4 --save-interval-updates 6
    --keep-interval-updates 1 --no-epoch-checkpoints --num-workers 0
""".split()


def command(stream, out, *options) -> list[str]:
    launch = [sys.executable, "-m", "slurm.launch", stream, "--cluster", "local", "--out", out, *options]
    return [str(word) for word in (*launch, "--", *FLAGS)]


def comparable(out) -> list[dict]:
    """The rows of results.jsonl without what belongs to the machine."""
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in MACHINE_FIELDS} for row in rows]


@pytest.fixture(scope="module")
def grown(stream, tmp_path_factory) -> Path:
    """An uninterrupted gmoe run, 4 -> 6 -> 8 experts."""
    out = tmp_path_factory.mktemp("chain") / "gmoe"
    subprocess.run(command(stream, out, "--learner", "gmoe", "--grow-experts", "2"), check=True, cwd=ROOT)
    return out


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
    printed = subprocess.run(list(map(str, report)), check=True, capture_output=True, text=True, cwd=ROOT)
    assert f"{values[-1]:.2f}" in printed.stdout
    assert list((tmp_path / "report").glob("*.png"))


def kill_when(stream, out, happened) -> None:
    """Start the gmoe chain and SIGKILL the launcher once `happened(out)` is true."""
    options = ("--learner", "gmoe", "--grow-experts", "2")
    launcher = subprocess.Popen(
        command(stream, out, *options), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    while not happened(out):
        assert launcher.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()


def test_killing_the_chain_at_any_moment_changes_no_result(stream, grown, tmp_path):
    out = tmp_path / "killed"
    moments = [
        lambda o: any(o.glob("stage_00/checkpoint_*_6.pt")),
        lambda o: (
            any(o.glob("stage_00/checkpoint_*_18.pt.tmp")) or any(o.glob("stage_00/checkpoint_*_18.pt"))
        ),
        lambda o: (o / "stage_00/eval.log").exists(),
        lambda o: (o / "stage_01/grown.pt").exists(),
        lambda o: (o / "stage_01/result.json").exists(),
    ]
    for happened in moments:
        kill_when(stream, out, happened)
    options = ("--learner", "gmoe", "--grow-experts", "2")
    subprocess.run(command(stream, out, *options), check=True, cwd=ROOT)
    assert comparable(out) == comparable(grown)


def test_relaunching_a_finished_run_trains_nothing_and_other_settings_are_refused(stream, grown):
    before = (grown / "results.jsonl").read_bytes()
    started = time.time()
    subprocess.run(command(stream, grown, "--learner", "gmoe", "--grow-experts", "2"), check=True, cwd=ROOT)
    assert (grown / "results.jsonl").read_bytes() == before
    assert all(path.stat().st_mtime < started for path in grown.rglob("*.pt"))
    other = subprocess.run(
        command(stream, grown, "--learner", "gmoe", "--grow-experts", "4"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].startswith("error: ")
    assert "grow_experts" in other.stderr


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
        "1",
        "--save-dir",
        tmp_path / "s",
    ]
    finished = subprocess.run(list(map(str, arguments)), cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "s" / "checkpoint_last.pt").exists()
