"""`alma images --by week --cluster slurm`: runs that are missing, and streams that grow."""

import contextlib
import io
import random
import shutil
from pathlib import Path

import pytest
from launcher import call
from month import Queue

from alma.records import Run
from slurm import arrivals
from slurm.arrivals import main as alma_test
from slurm.engine import children, queue, submission
from slurm.vision import part
from slurm.vision.__main__ import main as sweep
from tests.vision.test_grown import as_in_one_go, forget
from tests.vision.test_weeks import arrive
from vision.run import main as vision

FLAGS = (
    "--data-root shop --by week --arch mlp --hidden 2 --epochs 1 --no-augment "
    "--batch-size 8 --optimizer adadelta --seeds 0-1 --out runs"
)


def play(words):
    """The work of all jobs that are missing; returns the names of the parts."""
    names = []
    for job in part.parts(tuple(words.split()), 1, 1):
        if not job.done:
            names.append(job.part)
            job.work()
    return names


@pytest.fixture
def in_this_process(tmp_path, monkeypatch):
    """`alma images` runs here, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(words, *_, **__):
        forget()
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert call(vision, monkeypatch, *words[words.index("images") + 1 :]) == 0
        return said.getvalue()

    monkeypatch.setattr(children, "ask", run)
    monkeypatch.setattr(children, "run", run)


def test_a_run_that_is_missing_is_trained_again_and_a_stream_that_has_grown_is_new_work(
    in_this_process, tmp_path, monkeypatch
):
    arrive(tmp_path / "shop", 1, 2)
    assert play(FLAGS) == ["1/2", "2/2"]
    assert play(FLAGS) == []
    shutil.rmtree("runs/sm_w1_h2_s1")
    assert play(FLAGS) == ["2/2"]
    arrive(tmp_path / "shop", 3)
    assert play(f"{FLAGS} --append") == ["1/2", "2/2"]
    assert play(f"{FLAGS} --append") == []
    assert play(FLAGS) == []  # nothing new
    forget()
    assert call(vision, monkeypatch, *FLAGS.replace("runs", "whole").split()) == 0
    for name in ("sm_w1_h2_s0", "sm_w1_h2_s1"):
        grown = as_in_one_go(Run.read(f"runs/{name}"))
        assert grown == as_in_one_go(Run.read(f"whole/{name}"))


def test_rows_and_not_markers_decide_what_a_launch_submits(in_this_process, monkeypatch):
    """A run that was removed, one without its last row, one that is whole."""
    slurm = Queue(monkeypatch, random.Random(0))
    monkeypatch.setattr(submission, "check_job", lambda name, resources: None)
    arrive("shop", 1, 2)
    words = f"{FLAGS.replace('0-1', '0-2')} --cluster slurm --runs-per-job 1".split()
    assert call(sweep, monkeypatch, *words) == 0
    slurm.run(3)
    runs = [Path(f"runs/sm_w1_h2_s{seed}") for seed in range(3)]
    before = [as_in_one_go(Run.read(run)) for run in runs]
    assert call(sweep, monkeypatch, *words) == 0
    assert not slurm.jobs
    shutil.rmtree(runs[1])
    lines = (runs[2] / "results.jsonl").read_text().splitlines(keepends=True)
    (runs[2] / "results.jsonl").write_text("".join(lines[:-1]))
    (runs[2] / "checkpoint.pt").unlink()  # as the command says that finds the row missing
    assert call(sweep, monkeypatch, *words) == 0
    states = {status.job.name: status.state for status in queue.look([Path("runs")])}
    assert states == {"part 1 of 3": "done", "part 2 of 3": "queued", "part 3 of 3": "queued"}
    assert len(slurm.jobs) == 2
    slurm.run(2)
    assert [as_in_one_go(Run.read(run)) for run in runs] == before


def test_the_runs_of_a_sweep_on_a_cluster_are_found_for_their_tests(tmp_path):
    """jobs.json is in the folder of the sweep, run.json in those of its runs."""
    sweep_folder = tmp_path / "runs"
    for seed in (1, 0):
        config = {"learner": "sm", "waiting_time": 1, "replay": False, "seed": seed}
        run = Run.open(sweep_folder / f"sm_s{seed}", config | {"megabatches": 1})
    (sweep_folder / "jobs.json").write_text('{"jobs": []}')
    recorded = arrivals._recorded([str(tmp_path), str(run.directory)])
    assert [run.directory.name for run in recorded] == ["sm_s0", "sm_s1"]


@pytest.mark.thorough
def test_an_append_on_a_real_cluster(cluster, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    slurm = "--cluster slurm --timeout-min 30 --runs-per-job 1 --wait".split()
    arrive(tmp_path / "shop", 1, 2)
    assert call(sweep, monkeypatch, *slurm, *FLAGS.split()) == 0
    shutil.rmtree("runs/sm_w1_h2_s1")
    assert call(sweep, monkeypatch, *slurm, *FLAGS.split()) == 0
    assert "1 jobs submitted" in capsys.readouterr().err
    assert Run.read("runs/sm_w1_h2_s1").rows[-1]["t"] == 2
    arrive(tmp_path / "shop", 3)
    assert call(sweep, monkeypatch, *slurm, *FLAGS.split(), "--append") == 0
    for run in sorted(Path("runs").glob("sm_*")):
        assert len(Run.read(run).late_evaluations) == 3
        assert Run.read(run).rows[-1]["t"] == 3


@pytest.mark.thorough
def test_an_append_with_unreadable_images_that_is_requeued(cluster, tmp_path, monkeypatch):
    """The rows and the list of images left out are those of one run here."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    slurm = "--cluster slurm --timeout-min 30 --runs-per-job 1".split()
    words = [*FLAGS.replace("--epochs 1", "--epochs 100").split(), "--skip-unreadable"]
    broken = [Path("shop/2026-W01/a/0.png"), Path("shop/2026-W03/c/0.png")]
    arrive("shop", 1, 2)
    broken[0].write_bytes(broken[0].read_bytes()[:60])
    assert call(sweep, monkeypatch, *slurm, *words, "--wait") == 0
    arrive("shop", 3)
    for file in broken:
        file.write_bytes(file.read_bytes()[:60])
    assert call(sweep, monkeypatch, *slurm, *words, "--append") == 0
    job = queue.read_jobs(Path("runs"))[1]
    cluster.until(job.marker.with_suffix(".log").exists)
    cluster.run("scontrol", "requeue", str(job.job_id))
    assert call(sweep, monkeypatch, *slurm, *words, "--append", "--wait") == 0
    assert cluster.jobs()[str(job.job_id)]["Restarts"] == "1"
    forget()
    assert call(vision, monkeypatch, *words, "--out", "whole") == 0
    for name in ("sm_w1_h2_s0", "sm_w1_h2_s1"):
        grown = as_in_one_go(Run.read(f"runs/{name}"))
        assert grown == as_in_one_go(Run.read(f"whole/{name}"))
    skipped = Path("runs/unreadable.csv").read_text()
    assert skipped == Path("whole/unreadable.csv").read_text()
    assert [line.partition(",")[0] for line in skipped.splitlines()] == ["path", *map(str, broken)]


@pytest.mark.thorough
def test_models_are_tested_on_a_real_cluster(cluster, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    arrive(tmp_path / "shop", 1, 2)
    forget()
    assert call(vision, monkeypatch, *FLAGS.split()) == 0
    arrive(tmp_path / "shop", 3)
    forget()
    words = "runs --cluster slurm --timeout-min 30 --wait".split()
    assert call(alma_test, monkeypatch, *words, "--dry-run") == 0
    assert "#SBATCH --array=0-1%2" in capsys.readouterr().out
    assert call(alma_test, monkeypatch, *words) == 0
    assert capsys.readouterr().out.count("of 2026-W02") == 2
    for run in sorted(Path("runs").glob("sm_*")):
        assert len(Run.read(run).late_evaluations) == 3
        assert Run.read(run).rows[-1]["t"] == 2
