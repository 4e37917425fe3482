"""Sweeps of image runs as array jobs, in part on a real SLURM."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT, call, finish

from alma.records import MACHINE_FIELDS, Run
from slurm import cancel, status, sweep
from slurm.engine import children, queue
from slurm.vision import part
from vision.run import main as vision

TINY = ("--hidden", "2", "--megabatches", "2", "--waiting-time", "2", "--epochs", "1")


def launch(folder: Path, environment: dict[str, str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run `python -m slurm.sweep` outside the checkout; return stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slurm.sweep", *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finish(process, code, timeout=1200)


def rows(run: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if key not in MACHINE_FIELDS} for row in Run.read(run).rows
    ]


def test_list_names_the_runs_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(vision, monkeypatch, "--list", "--learner", "sm,ens", "--seeds", "0-1", "--out", "x") == 0
    names = [f"x/{learner}_w1_h32_s{seed}" for learner in ("sm", "ens") for seed in (0, 1)]
    assert capsys.readouterr().out.splitlines() == names
    assert call(vision, monkeypatch, "--list") == 0
    assert capsys.readouterr().out == "runs/digits_sm\n"
    assert call(vision, monkeypatch, "--list", "--seeds", "0-4", "--part", "2/3", "--out", "x") == 0
    assert capsys.readouterr().out.splitlines() == ["x/sm_w1_h32_s1", "x/sm_w1_h32_s4"]
    assert list(tmp_path.iterdir()) == []


def test_parts_cover_the_sweep_and_an_empty_part_does_nothing(tmp_path, monkeypatch, capsys):
    words = (*TINY, "--seeds", "0-1", "--out", tmp_path / "x")
    assert call(vision, monkeypatch, *words, "--part", "2/3") == 0
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["sm_w2_h2_s1"]  # and no figures
    assert call(vision, monkeypatch, *words, "--part", "3/3") == 0
    assert len(list((tmp_path / "x").iterdir())) == 1
    assert call(vision, monkeypatch, *words, "--part", "1/3") == 0
    assert capsys.readouterr().out == ""
    assert len(rows(tmp_path / "x/sm_w2_h2_s0")) == len(rows(tmp_path / "x/sm_w2_h2_s1")) == 3


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/3/5"])
def test_malformed_parts_are_refused(monkeypatch, capsys, text):
    assert call(vision, monkeypatch, f"--part={text}") == 2
    assert f"'{text}': K/N with K from 1 to N" in capsys.readouterr().err


def test_a_dry_run_shows_one_array_of_tasks_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM here
    words = ("--cluster", "slurm", "--dry-run", "--runs-per-job", "20", "--partition", "learn", "--")
    assert call(sweep.main, monkeypatch, *words, "--seeds", "0-40", "--out", "x") == 0
    said = capsys.readouterr().out
    for line in ("--array=0-2%3", "--cpus-per-task=1", "--nodes=1", "--partition=learn", "--requeue"):
        assert f"#SBATCH {line}\n" in said
    assert "gpu" not in said.partition("\n1 submissions")[0]
    assert f"# <1> {tmp_path}/x part 1 of 3, {tmp_path}/x part 2 of 3, " in said
    assert "1 submissions with 3 jobs, 0 GPU-hours requested, before requeues" in said.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_done_if_its_marker_has_the_same_runs_and_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "ask", lambda *_: f"{tmp_path}/x/s0\n{tmp_path}/x/s1\n")
    (first,) = part.parts(("--seeds", "0-1"), 2, 1)
    assert not first.done
    first.marker.parent.mkdir(parents=True)
    first.marker.write_text(json.dumps(first.content))
    assert first.done
    assert not dataclasses.replace(first, runs=("x/s0", "x/s2")).done
    assert not dataclasses.replace(first, flags=("--seeds", "0-1", "--epochs", "3")).done
    first.marker.write_text("{")
    assert not first.done


def test_an_experiment_is_split_and_a_change_of_it_undoes_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sizes").mkdir()
    Path("sizes/small.yaml").write_text("hidden: 2")
    Path("one.yaml").write_text("learner: [sm, ens]\nseeds: 0-2")
    made = part.parts(("one.yaml", "--size", "small"), 4, 1)
    assert [job.part for job in made] == ["1/2", "2/2"]
    assert made[0].run == tmp_path / "runs/one_small"
    assert made[1].runs == tuple(
        f"runs/one_small/{name}_w1_h2_s{s}" for name, s in (("sm", 1), ("ens", 0), ("ens", 2))
    )
    made[0].marker.parent.mkdir(parents=True)
    made[0].marker.write_text(json.dumps(made[0].content))
    assert made[0].done
    Path("sizes/small.yaml").write_text("hidden: 2\nepochs: 3")
    assert not part.parts(("one.yaml", "--size", "small"), 4, 1)[0].done


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs-per-job", "0"], "--runs-per-job 0: give 1 or more"),
        (["--nodes", "2"], "a part of a sweep is one task"),
        (["--", "--jobs", "2"], "--jobs: not with --cluster slurm"),
        (["--", "--part=1/2"], "--part=1/2: not with --cluster slurm"),
        (["--", "--learner", "nobody"], "'nobody': choose from sm"),
        (
            ["--cluster", "local", "--gpus-per-node", "0", "--runs-per-job", "20"],
            "--gpus-per-node, --runs-per-job: only with --cluster slurm",
        ),
        (["--", "--seeds", "0-1"], "no SLURM here (no sbatch): run this on a machine of the cluster"),
        (["--seeds", "0-3"], "unrecognized arguments: --seeds"),
    ],
)
def test_wrong_command_lines_are_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    found = None if "no sbatch" in message else "/bin/sbatch"
    monkeypatch.setattr("slurm.engine.resources.shutil.which", lambda name: found)
    assert call(sweep.main, monkeypatch, "--cluster", "slurm", *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_local_sweeps_call_vision_run(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda _, words: sys.exit(called.append(words)))
    assert call(sweep.main, monkeypatch, "--", *TINY) == 0
    assert called == [[sys.executable, str(ROOT / "vision/run.py"), *TINY]]


def test_ten_runs_are_one_array_of_four_jobs(cluster, tmp_path, monkeypatch, capsys):
    """A run that fails fails its part only, and a relaunch completes that one."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "x"
    foreign = place / "sm_w2_h2_s1"
    assert call(vision, monkeypatch, *TINY, "--lr", "0.5", "--out", foreign) == 0
    words = ("--cluster", "slurm", "--wait", "--runs-per-job", "3", "--timeout-min", "30", "--", *TINY)
    words += ("--seeds", "0-9", "--out", "x")
    _, err = launch(tmp_path, cluster.environment, *words, code=1)
    assert "4 jobs submitted" in err
    assert "part 2 of 4" in err.splitlines()[-1]
    assert "1 of 3 runs failed: x/sm_w2_h2_s1 holds a run with other settings" in err.splitlines()[-1]
    (array,) = {(job.job_id or "").partition("_")[0] for job in queue.read_jobs(place)}
    cluster.until(lambda: sorted(cluster.states(array).values()) == ["COMPLETED"] * 3 + ["FAILED"])
    shutil.rmtree(foreign)
    out, err = launch(tmp_path, cluster.environment, *words)
    assert "1 jobs submitted" in err
    assert "alma report" in out
    names = [f"sm_w2_h2_s{seed}" for seed in range(10)]
    assert sorted(path.name for path in place.iterdir()) == sorted(["jobs.json", "slurm_jobs", *names])
    assert {tuple(row["t"] for row in rows(place / name)) for name in names} == {(0, 1, 2)}
    markers = sorted(f"part_{number}_of_4.json" for number in range(1, 5))
    assert sorted(path.name for path in (place / "slurm_jobs").glob("*.json")) == markers
    marked = [json.loads((place / "slurm_jobs" / name).read_text())["runs"] for name in markers]
    assert sorted(run for each in marked for run in each) == sorted(f"x/{name}" for name in names)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert call(status.main, monkeypatch, place) == 0
    _, *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # one for each part, none for the runs
    assert total == "4 done"


def test_a_requeued_job_resumes_in_the_middle_of_a_run(cluster, tmp_path, monkeypatch):
    flags = "--hidden 2 --megabatches 4 --epochs 30 --save-interval 0 --seeds 0-2".split()
    words = ("--cluster", "slurm", "--runs-per-job", "4", "--timeout-min", "30", "--", *flags, "--out", "x")
    launch(tmp_path, cluster.environment, *words)
    (part,) = queue.read_jobs(tmp_path / "x")
    assert part.job_id
    job_id, begun = part.job_id, tmp_path / "x/sm_w1_h2_s1/results.jsonl"
    cluster.until(lambda: begun.exists() and begun.read_text().count("\n") >= 2, timeout=60)
    complete = (tmp_path / "x/sm_w1_h2_s0/results.jsonl").read_text()
    cluster.run("scancel", "--signal=USR2", job_id)  # as SLURM does before a timeout
    cluster.until(lambda: cluster.jobs()[job_id]["Restarts"] == "1")
    before = begun.read_text()
    assert not part.done
    cluster.until(lambda: part.done, timeout=90, job_ids=[job_id])
    assert begun.read_text().startswith(before)
    assert (tmp_path / "x/sm_w1_h2_s0/results.jsonl").read_text() == complete
    monkeypatch.chdir(tmp_path)
    assert call(vision, monkeypatch, *flags, "--part", "2/3", "--out", "y") == 0
    assert rows(tmp_path / "x/sm_w1_h2_s1") == rows(tmp_path / "y/sm_w1_h2_s1")
    assert len(rows(tmp_path / "x/sm_w1_h2_s2")) == 5


def test_running_parts_are_not_resubmitted_and_can_be_cancelled(cluster, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(children, "ask", lambda *_: "x/sm_w1_h32_s0\nx/sm_w1_h32_s1\n")  # faster
    flags = ("--epochs", "100000", "--seeds", "0-1", "--out", "x")
    options = ("--cluster", "slurm")
    assert call(sweep.main, monkeypatch, *options, "--runs-per-job", "1", "--", *flags) == 0
    ids = [job.job_id for job in queue.read_jobs(Path("x"))]
    assert call(sweep.main, monkeypatch, *options, "--runs-per-job", "1", "--", *flags) == 0
    assert "0 jobs submitted" in capsys.readouterr().err
    assert [job.job_id for job in queue.read_jobs(Path("x"))] == ids
    assert call(sweep.main, monkeypatch, *options, "--runs-per-job", "2", "--", *flags) == 2
    assert "part 1 of 2" in capsys.readouterr().err
    for job_id in ids:
        cluster.wait_for(job_id, "RUNNING")
    assert call(cancel.main, monkeypatch, "x") == 0
    assert capsys.readouterr().out.endswith("cancelled 2 jobs\n")
    assert set(cluster.states(*ids).values()) <= {"CANCELLED", "COMPLETING"}
