"""Sweeps of image runs as array jobs: `alma images --cluster slurm`; see also test_slurm.py."""

import itertools
import re
import shutil
import sys
from pathlib import Path

import pytest
from launcher import call, refused

from alma.records import Run
from slurm import cancel
from slurm.engine import children, queue
from slurm.vision import part
from slurm.vision.__main__ import main as sweep
from vision.run import main as vision

TINY = ("--hidden", "2", "--megabatches", "2", "--waiting-time", "2", "--epochs", "1")
SLURM = ("--cluster", "slurm", "--timeout-min", "30")


def test_parts_cover_the_sweep_and_an_empty_part_does_nothing(tmp_path, monkeypatch, capsys):
    words = (*TINY, "--seeds", "0-1", "--out", tmp_path / "x")
    for number, names in (
        (2, {"sm_w2_h2_s1"}),
        (3, {"sm_w2_h2_s1"}),
        (1, {"sm_w2_h2_s0", "sm_w2_h2_s1"}),
    ):
        assert call(vision, monkeypatch, *words, "--part", f"{number}/3") == 0
        assert {path.name for path in (tmp_path / "x").iterdir()} == names  # and no figures
    assert capsys.readouterr().out == ""
    assert [len(Run.read(tmp_path / "x" / name).rows) for name in sorted(names)] == [3, 3]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/3/5"])
def test_malformed_parts_are_refused(monkeypatch, capsys, text):
    assert call(vision, monkeypatch, f"--part={text}") == 2
    assert f"'{text}': K/N with K from 1 to N" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--cluster", "slurm"], ["--cluster=slurm"]])
def test_images_leaves_a_sweep_on_slurm_to_the_launcher(monkeypatch, capsys, words):
    """In the same process, whose errors name the command."""
    assert call(vision, monkeypatch, *words, "--runs-per-job", "0") == 2
    assert "see `alma images --cluster slurm --help`" in capsys.readouterr().err
    started = []
    monkeypatch.setattr("slurm.vision.__main__.main", lambda: started.append(sys.argv[1:]))
    call(vision, monkeypatch, "--list", *words, "--partition", "learn")
    assert started == [["--list", *words, "--partition", "learn"]]


def test_a_dry_run_shows_one_array_of_tasks_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM here
    words = (
        "--seeds",
        "0-40",
        "--out",
        "x",
        "--dry-run",
        "--runs-per-job",
        "20",
        "--partition",
        "learn",
    )
    assert call(sweep, monkeypatch, *SLURM, *words) == 0
    output = capsys.readouterr().out
    for line in (
        "--array=0-2%3",
        "--cpus-per-task=1",
        "--nodes=1",
        "--partition=learn",
        "--requeue",
    ):
        assert f"#SBATCH {line}\n" in output
    assert "gpu" not in output.partition("\n1 submissions")[0]
    assert f"# <1> {tmp_path}/x part 1 of 3, {tmp_path}/x part 2 of 3, " in output
    assert (
        "1 submissions with 3 jobs, 0 GPU-hours requested, before requeues"
        in output.splitlines()[-1]
    )
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_is_split_and_a_change_of_runs_flags_or_files_undoes_its_parts(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("sizes.yaml").write_text("sizes: {small: {hidden: 2}}")
    Path("one.yaml").write_text("learner: [sm, ens]\nseeds: 0-2")
    flags = ("one.yaml", "--size", "small")
    first, second = part.parts(flags, 4, 1)
    assert (first.part, first.run) == ("1/2", tmp_path / "runs/one_small")
    assert [Path(run).name for run in second.runs] == [
        "sm_w1_h2_s1",
        "ens_w1_h2_s0",
        "ens_w1_h2_s2",
    ]
    assert {Path(run).parent for run in second.runs} == {Path("runs/one_small")}
    listed = "\n".join([*itertools.chain(*zip(first.runs, second.runs, strict=True))])
    monkeypatch.setattr(children, "ask", lambda words, *_: listed if "--list" in words else "")
    first.marker.parent.mkdir(parents=True)
    first.marker.touch()
    monkeypatch.setattr(part, "_is_complete", lambda run: True)
    first.work()  # nothing
    assert [job.done for job in part.parts(flags, 4, 1)] == [True, False]
    assert not part.parts((*flags, "--epochs", "3"), 4, 1)[0].done
    Path("sizes.yaml").write_text("sizes: {small: {hidden: 2, epochs: 3}}")
    assert not part.parts(flags, 4, 1)[0].done


def test_a_part_is_done_once_all_its_runs_are(tmp_path, monkeypatch):
    """Also if the folder of one was removed; then the part is submitted again."""
    monkeypatch.chdir(tmp_path)
    words = (*TINY, "--seeds", "0-1", "--out", "x")
    assert call(vision, monkeypatch, *words) == 0
    (job,) = part.parts(words, 2, 1)
    assert not job.done
    job.marker.parent.mkdir(parents=True)
    job.marker.touch()
    job.remove_stale_marker()
    assert job.done
    shutil.rmtree(job.runs[1])
    assert not job.done
    job.remove_stale_marker()
    assert not job.marker.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs-per-job", "0"], "--runs-per-job: '0' is not a positive whole number"),
        (["--nodes", "2"], "a part of a sweep is one task"),
        (["--part=1/2"], "--part=1/2: not with --cluster slurm"),
        (["--by=week", "--write=x"], "--write=x: on this machine only: leave out --cluster slurm"),
        (["--partitoin", "nobody"], "unrecognized arguments: --partitoin"),
        (["--seeds", "0-1"], "no SLURM here (no sbatch): run this on a machine of the cluster"),
    ],
)
def test_wrong_command_lines_are_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    program = None if "no sbatch" in message else "/bin/sbatch"
    monkeypatch.setattr("slurm.engine.resources.shutil.which", lambda name: program)
    assert message in refused(sweep, monkeypatch, capsys, *SLURM, *words)
    assert list(tmp_path.iterdir()) == []


def test_running_parts_are_not_resubmitted_and_can_be_cancelled(
    cluster, tmp_path, monkeypatch, capsys
):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        children, "ask", lambda *_: "my x/sm_w1_h32_s0\nmy x/sm_w1_h32_s1\n"
    )  # faster
    words = (*SLURM, "--epochs", "100000", "--seeds", "0-1", "--out", "my x", "--runs-per-job")
    assert call(sweep, monkeypatch, *words, "1") == 0
    ids = [job.job_id for job in queue.read_jobs(Path("my x"))]
    capsys.readouterr()
    assert call(sweep, monkeypatch, *words, "1") == 0
    out, err = capsys.readouterr()
    assert out == f"see their state with: alma status '{tmp_path}/my x'\n"
    assert "0 jobs submitted" in err
    assert [job.job_id for job in queue.read_jobs(Path("my x"))] == ids
    assert call(sweep, monkeypatch, *words, "2") == 2
    assert re.search(
        r"part 1 of 2 .* cancel it with: alma cancel '.*/my x'\n", capsys.readouterr().err
    )
    for job_id in ids:
        cluster.wait_for(job_id, "RUNNING")
    assert call(cancel.main, monkeypatch, "my x") == 0
    assert capsys.readouterr().out.endswith("cancelled 2 jobs\n")
    assert set(cluster.states(*ids).values()) <= {"CANCELLED", "COMPLETING"}
