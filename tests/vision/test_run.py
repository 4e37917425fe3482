"""The command line: single runs, sweeps, resuming, and errors."""

import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from alma.records import Run
from tests.vision.conftest import ROOT, command, error_of, jobs, numbers, python
from vision import local
from vision.estimate import _Seconds
from vision.learners import LEARNERS
from vision.local import run_all
from vision.presets import PRESETS
from vision.sweep import SweepRun


def test_without_arguments_as_a_script_from_anywhere(tmp_path):
    """The first command of a new user."""
    done = python(ROOT / "vision/run.py", folder=tmp_path)
    assert "Test error (%) after mega-batch t, digits, B = 20" in done.stdout
    pictures = [tmp_path / line for line in done.stdout.splitlines() if line.endswith(".png")]
    assert len(pictures) == 1
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    rows = Run.read(tmp_path / "runs/digits_sm").rows
    assert len(rows) == 21
    assert rows[-1]["value"] < 0.15
    assert done.stderr == ""


def test_a_sweep_in_processes_equals_single_runs_and_skips_complete_ones(
    tmp_path, monkeypatch, capsys
):
    common = "--megabatches 4 --epochs 3 --members 2".split()
    sweep = [*common, *"--learner sm,ens --hidden 5 --seeds 0-1 --out".split(), tmp_path / "sweep"]
    command(monkeypatch, *sweep, "--jobs", 2)
    names = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert names == [f"{learner}_w1_h5_s{s}" for learner in ("ens", "sm") for s in (0, 1)]
    output = capsys.readouterr().out
    assert "4/4" in output
    lines = [line.split() for line in output.splitlines() if line.startswith(("sm ", "ens "))]
    assert len(lines) == 2  # seeds are repeats: one line per learner
    assert all("2" in line for line in lines)

    def run_here(jobs, processes):
        for job in jobs:
            job.run()
        return []

    before = {path: path.read_bytes() for path in (tmp_path / "sweep").rglob("results.jsonl")}
    monkeypatch.setattr(sys.modules["vision.run"], "run_all", run_here)
    monkeypatch.setattr(
        sys.modules["vision.run"], "summarise", lambda *_: None
    )  # figures: seconds each time
    command(monkeypatch, *sweep)
    assert {path: path.read_bytes() for path in before} == before
    single = "--learner ens --hidden 5 --seed 1 --out".split()
    command(monkeypatch, *common, *single, tmp_path / "one")
    assert numbers(tmp_path / "one") == numbers(tmp_path / "sweep/ens_w1_h5_s1")


def test_a_failed_run_does_not_end_its_sweep(tmp_path, monkeypatch, capsys):
    """After an unexpected exception, the exit code is not that of wrong input."""
    sweep = ["--megabatches", 3, "--epochs", 1, "--learner", "sm,umix", "--part", "1/1"]
    planned = jobs(*sweep, "--out", tmp_path)
    planned[0] = replace(planned[0], dataset={"name": "digits", "nonsense": 1})  # a TypeError
    monkeypatch.setattr(sys.modules["vision.run"], "jobs_of", lambda options: planned)
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, *sweep, "--out", tmp_path)
    assert stop.value.code.startswith(
        "error: 1 of 2 runs failed: sm_w1_h32_s0: TypeError: load() got"
    )
    printed = capsys.readouterr()
    assert "sm_w1_h32_s0: failed" in printed.out
    assert "Traceback" in printed.err
    assert len(Run.read(tmp_path / "umix_w1_h32_s0").rows) == 4


def test_vision_run_is_the_function_after_any_import():
    code = (
        "import vision.run, vision; from vision import run; "
        "assert callable(run) and callable(vision.run)"
    )
    python("-c", code)


def test_settings_go_to_the_learners_that_take_them():
    assert [job.stream_seed for job in jobs("--seeds", "0-2")] == [0, 1, 2]
    (single,) = jobs("--seed", 3, "--stream-seed", 432, "--out", "there")
    assert (single.out, single.stream_seed, single.options["seed"]) == (Path("there"), 432, 3)
    words = "--learner", "sm,moe,gens", "--gate", "hard", "--experts", 2, "--from-scratch"
    options = {job.options["learner"]: job.options for job in jobs(*words)}
    assert options["moe"]["gate"] == options["gens"]["gate"] == "hard"
    assert "experts" not in options["sm"]
    assert "from_scratch" not in options["gens"]


@pytest.mark.parametrize(("learner", "preset"), zip(LEARNERS, cycle(PRESETS), strict=False))
def test_every_learner_and_every_preset_is_on_the_command_line(
    tmp_path, monkeypatch, learner, preset
):
    monkeypatch.setattr(
        sys.modules["vision.run"], "summarise", lambda *_: None
    )  # figures: seconds each time
    words = f"--learner {learner} --preset {preset} --megabatches 3 --epochs 2 --hidden 3 --out"
    command(monkeypatch, *words.split(), tmp_path)
    run = Run.read(tmp_path)
    assert len(run.rows) == 4
    assert run.config.get("replay_share", 0) == (0.9 if preset == "anytime" else 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--waiting-time", "x"], "'x': a whole number"),
        (["--waiting-time", "30"], "waiting time 30 is longer"),
        (["--seeds", "2-0"], "2-0: a range goes up: give 0-2"),
        (["--dataset", "folder", "--data-root", "nowhere"], "--data-root needs train/CLASS"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--optimizer", "sgd", "--lr", "1e30"], "training diverged"),
        (["--nonsense"], "--nonsense"),
        (["--out", "taken"], "choose another --out"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    assert message in error_of(monkeypatch, capsys, *words)


@pytest.mark.parametrize(
    ("device", "gpus", "taken"),
    [
        ("auto", 3, [0, 1, 2, 0, 1]),
        ("cuda", 1, [0] * 5),
        ("auto", 0, []),
        ("cuda:1", 3, []),
        ("cpu", 3, []),
    ],
)
def test_processes_take_the_gpus_in_turn(monkeypatch, device, gpus, taken):
    device_numbers = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", device_numbers.append)
    for number in range(5):
        local._prepare(device, number)
    assert device_numbers == taken


@pytest.mark.parametrize(
    ("dataset", "chosen", "threads"),
    [("digits", None, 1), ("digits", "2", 2), ("cifar10", None, 2)],
)
def test_a_single_mlp_runs_in_one_thread(monkeypatch, dataset, chosen, threads):
    seen = []
    monkeypatch.setattr(SweepRun, "run", lambda job: seen.append(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_all(jobs("--dataset", dataset), 1)
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]


def test_a_dry_run_prints_the_cost_of_each_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """FLOPs are exact, at most those with --patience,
    more than those of the first size for what grows."""
    monkeypatch.chdir(tmp_path)
    words = (
        "--learner sm,ens,gens --hidden 4 --megabatches 7 --waiting-time 3 --replay off,on "
        "--epochs 2"
    )
    command(monkeypatch, *words.split(), "--dry-run")
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == "run learner parameters epochs TFLOPs minutes GB/process".split()
    assert not list(tmp_path.iterdir())
    for job, line in zip(jobs(*words.split()), lines[:-1], strict=True):
        place, learner, parameters, epochs, flops, minutes, memory = line
        assert place == str(job.out)
        job.run()
        rows = Run.read(place).rows
        assert parameters == f"{rows[3]['parameters']:,}", learner
        assert flops == f"{sum(row['train_flops'] for row in rows) / 1e12:.3g}"
        assert epochs == "6"
        assert 0 < float(minutes) < 1
        assert 0.3 <= float(memory) < 1
    assert lines[-1][:3] == ["6", "runs", "36"]
    capsys.readouterr()
    command(monkeypatch, "--learner", "ff,sm", "--patience", "3", "--dry-run")
    marks = [
        line.split()[4][0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("runs")
    ]
    assert marks == [">", "<"]
    monkeypatch.setattr("vision.estimate._seconds", lambda learner: _Seconds(0.0, 0.6))
    command(
        monkeypatch, "--megabatches", "2", "--epochs", "1", "--dry-run"
    )  # validates 142, tests 3 * 360
    assert capsys.readouterr().out.split()[-1] == "12.2"


def test_a_dry_run_of_a_folder_decodes_one_image(tree, monkeypatch, capsys):
    monkeypatch.setattr("vision.folder._decoded", None)
    words = (
        f"--dataset folder --data-root {tree} --hidden 2 --megabatches 2 --batch-size 4 --dry-run"
    )
    command(monkeypatch, *words.split())
    counts, _, line, _ = capsys.readouterr().out.splitlines()
    assert counts.startswith("images: 70 for training and 4 for tests")
    assert float(line.split()[4]) > 0
