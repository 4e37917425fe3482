"""The launcher on a real SLURM, over fake children: whatever happens to a job, the rows are the same."""

import os
import re
import signal
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import SMALL, Launcher, make

from slurm.engine import queue

FLAGS = (*SMALL, "--max-update", "4")
MEMBERS = ("--members", "3", "--stages", "3")


@dataclass
class OnSlurm:
    """A launcher whose jobs go to `cluster`, with slow updates."""

    cluster: object
    launcher: Launcher

    def words(self, *options: str) -> list[str]:
        stages = MEMBERS if self.launcher.learner == "ens" else ("--stages", "3")
        return ["--cluster", "slurm", "--wait", "--timeout-min", "30", *stages, *options]

    def launch(self, *options: str, code: int = 0) -> tuple[str, str]:
        """Launch and wait for the end."""
        process = self.start(*options)
        out, err = process.communicate(timeout=1200)
        assert process.returncode == code, err
        return out, err

    def start(self, *options: str) -> subprocess.Popen:
        self.launcher.environment |= self.cluster.environment
        return self.launcher.start(*self.words(*options), flags=FLAGS)

    @contextmanager
    def during(self, stage: int, *options: str):
        """Enter while the first training of `stage` runs; on exit wait for a successful end."""
        process = self.start(*options)
        try:
            self.cluster.until(lambda: self.updates(stage) >= 1, timeout=60)
            yield self.job(f"stage {stage}")
            _, err = process.communicate(timeout=600)
            assert process.returncode == 0, err
        finally:
            process.kill()

    def updates(self, stage: int) -> int:
        """Updates of all members so far."""
        logs = self.launcher.out.glob(f"stage_{stage:02d}/**/train.log")
        return sum(log.read_text().count("num_updates") for log in logs)

    def job(self, name: str) -> str:
        return next(str(job.job_id) for job in self.jobs if job.name.startswith(name))

    def log(self, name: str) -> str:
        """Log of a job, over all its starts."""
        return next(Path(str(job.log)).read_text() for job in self.jobs if job.name.startswith(name))

    @property
    def jobs(self) -> list[queue.SubmittedJob]:
        return queue.read_jobs(self.launcher.out)

    @property
    def trainings(self) -> int:
        """Number of training processes so far."""
        return len(self.launcher.pids.read_text().split())


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of uninterrupted runs on this machine."""
    rows = {}
    for learner, options in (("gmoe", ()), ("ens", MEMBERS)):
        local = make(tmp_path_factory.mktemp("local") / learner, learner=learner)
        local.run(*(options or ("--stages", "3")), flags=FLAGS)
        rows[learner] = local.rows
    return rows


def prepare(cluster, tmp_path, learner: str = "gmoe", seconds: float = 0.2) -> OnSlurm:
    return OnSlurm(cluster, make(tmp_path / "x", learner=learner, environment={"FAKE_SLEEP": str(seconds)}))


def test_three_stages_of_three_members_are_arrays_of_nodes(cluster, tmp_path, expected):
    run = prepare(cluster, tmp_path, "ens", 0.0)
    out, _ = run.launch()
    assert run.launcher.rows == expected["ens"]
    assert out.count("4@3") == 4
    array, _, element = run.job("stage 1, member 3").partition("_")
    assert element == "2"
    assert run.job("stage 1, member 1") == f"{array}_0"
    assert run.trainings == 9
    _, err = run.launch()  # nothing is left to do
    assert "0 jobs submitted" in err
    assert run.trainings == 9


@pytest.mark.parametrize("preempts_by_signal", [False, True])
def test_a_preempted_run_resumes(request, preempts_by_signal, tmp_path, expected):
    cluster = request.getfixturevalue("cluster_with_signal" if preempts_by_signal else "cluster")
    run = prepare(cluster, tmp_path, seconds=0.5)
    with run.during(1):
        nodes = ("--nodes", str(len(cluster.nodes)), "--exclusive")
        above = cluster.submit("sleep 2", "--partition=high", *nodes)
    assert run.launcher.rows == expected["gmoe"]
    assert cluster.state(above) == "COMPLETED"
    assert run.trainings > 3
    assert ("waiting for SLURM" in run.log("stage 1")) != preempts_by_signal


def test_a_requeued_run_resumes(cluster, tmp_path, expected):
    run = prepare(cluster, tmp_path)
    with run.during(1) as job:
        cluster.run("scontrol", "requeue", job)
    assert run.launcher.rows == expected["gmoe"]
    assert run.trainings == 4


def test_a_timeout_saves_and_resumes(cluster, tmp_path, expected):
    # A job has 60 s until the signal, for a busy machine may take 30 to start Python; SLURM looks every 30 s.
    run = prepare(cluster, tmp_path, seconds=25)
    run.launch("--timeout-min", "2", "--signal-delay-s", "60", "--stages", "1")
    assert run.launcher.rows == expected["gmoe"][:2]
    assert run.trainings >= 2
    assert "timed-out" in run.log("stage 0")


def test_a_run_survives_a_node_that_goes_down(cluster, tmp_path, expected):
    run = prepare(cluster, tmp_path)
    with run.during(1) as job:
        node = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
        cluster.down(node)
        cluster.until(lambda: cluster.state(job) != "RUNNING" or run.trainings > 2)
        cluster.up(node)
    assert run.launcher.rows == expected["gmoe"]


def test_a_run_survives_a_killed_slurmstepd(cluster, tmp_path, expected):
    """Of the step: srun would wait for it forever."""
    run = prepare(cluster, tmp_path)
    with run.during(1) as job:
        for pid in cluster.steps(job, "0"):
            os.kill(pid, signal.SIGKILL)
    assert run.launcher.rows == expected["gmoe"]
    assert cluster.jobs()[job]["Restarts"] == "1"
    assert "slurmstepd of this job is gone" in run.log("stage 1")
    assert run.updates(1) == 4  # saved before the requeue, so none is repeated


def test_a_run_survives_the_kill_of_all_processes_of_a_job(cluster, tmp_path, expected):
    """slurmctld learns of it only by polling the node."""
    run = prepare(cluster, tmp_path, seconds=0.5)
    with run.during(1) as job:
        for pid in (*cluster.steps(job), *cluster.processes(job)):
            with suppress(ProcessLookupError):  # already ended with another one
                os.kill(pid, signal.SIGKILL)
        cluster.ask_nodes_until(lambda: cluster.state(job) != "RUNNING")
        assert run.updates(1) < 4
    assert run.launcher.rows == expected["gmoe"]
    assert cluster.jobs()[job]["Restarts"] == "1"


@pytest.mark.parametrize("how", ["python", "step"])
def test_a_permanent_failure_cancels_its_dependents_and_a_relaunch_resumes(cluster, tmp_path, expected, how):
    run = prepare(cluster, tmp_path, seconds=0.2 if how == "step" else 0.0)
    if how == "python":
        run.launcher.environment["FAKE_CRASH"] = "1:2:python"
        _, err = run.launch(code=1)
        assert "CUDA error: out of luck" in err.splitlines()[-1]
    else:
        process = run.start()
        cluster.until(lambda: run.updates(1) >= 1, timeout=60)
        os.kill(int(run.launcher.pids.read_text().split()[-1]), signal.SIGKILL)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "signal 9 (Killed)" in err.splitlines()[-1]
    assert "stage_01/train.log" in err.splitlines()[-1]
    assert run.launcher.rows == expected["gmoe"][:2]
    assert cluster.run("squeue", "-h") == ""
    run.launcher.environment.pop("FAKE_CRASH", None)
    run.launch()
    assert run.launcher.rows == expected["gmoe"]


def test_a_second_launch_submits_nothing_twice(cluster, tmp_path, expected):
    run = prepare(cluster, tmp_path)
    with run.during(0):
        _, err = run.launch()
        assert "already in the queue" in err
    assert run.launcher.rows == expected["gmoe"]
    assert run.trainings == 3


@pytest.fixture(scope="module")
def expected_gens(tmp_path_factory) -> list[dict]:
    """Rows of an uninterrupted run of gens on this machine."""
    local = make(tmp_path_factory.mktemp("local") / "gens", learner="gens")
    local.run("--stages", "3", flags=FLAGS)
    return local.rows


def test_a_failing_member_stops_its_dependents_only(cluster, tmp_path, expected_gens):
    run = prepare(cluster, tmp_path, "gens", 0.0)
    run.launcher.environment["FAKE_CRASH"] = "1:2:python"
    run.launch(code=1)
    done = {job.name for job in queue.read_jobs(run.launcher.out) if job.done}
    assert done == {"untrained", "stage 0", "stage 2", "evaluation of stage 0"}
    states = cluster.states(*(run.job(f"{of}stage {k}") for of in ("", "evaluation of ") for k in range(3)))
    assert sorted(states.values()) == ["CANCELLED"] * 2 + ["COMPLETED"] * 3 + ["FAILED"]
    run.launcher.environment.pop("FAKE_CRASH")
    _, err = run.launch()
    assert "\n3 jobs submitted" in err
    assert run.launcher.rows == expected_gens
    assert run.trainings == 4


def test_failed_jobs_are_resubmitted_while_others_run(cluster, tmp_path):
    run = prepare(cluster, tmp_path, "gens", 600.0)
    run.launcher.environment |= cluster.environment | {"FAKE_CRASH": "1:0:python"}
    words = ("--cluster", "slurm", "--stages", "3")
    run.launcher.run(*words, flags=FLAGS)
    cluster.wait_for(run.job("stage 1"), "FAILED", timeout=60)
    before = {name: run.job(name) for name in ("stage 0", "stage 2", "evaluation of stage 0")}
    failed = run.job("stage 1")
    run.launcher.environment.pop("FAKE_CRASH")
    _, err = run.launcher.run(*words, flags=FLAGS)
    assert "3 jobs are already in the queue" in err
    assert "\n3 jobs submitted" in err
    assert {name: run.job(name) for name in before} == before
    new = [run.job(name) for name in ("stage 1", "evaluation of stage 1", "evaluation of stage 2")]
    assert failed not in new
    waits = cluster.jobs()[new[2]]["Dependency"]
    assert all(f"afterok:{job}(" in waits for job in (before["stage 0"], new[0], before["stage 2"]))
    cluster.run("scancel", *before.values(), *new)


def test_runs_of_several_seeds_are_arrays_and_so_are_their_evaluations(cluster, tmp_path, expected_gens):
    run = prepare(cluster, tmp_path, "gens", 0.0)
    run.launch("--seeds", "0-1")
    run.launcher.run_name = "run_s0"
    assert run.launcher.rows == expected_gens
    first = {job.name: job.job_id or "" for job in queue.read_jobs(run.launcher.out)}
    second = {job.name: job.job_id or "" for job in queue.read_jobs(run.launcher.folder / "run_s1")}
    assert {job_id.partition("_")[2] for job_id in first.values()} == {"0"}
    assert second == {name: job_id.replace("_0", "_1") for name, job_id in first.items()}


def test_resources_that_sbatch_refuses_are_refused_before_anything_is_written(cluster, tmp_path):
    run = make(tmp_path / "x", environment=cluster.environment)
    _, err = run.run("--cluster", "slurm", "--partition", "nowhere", code=2, flags=FLAGS)
    assert re.search("^error: sbatch would refuse the training: .*invalid partition", err.splitlines()[-1]), (
        err
    )
    assert sorted(path.name for path in run.folder.iterdir()) == ["stream"]
    cluster.run("scontrol", "update", f"nodename={','.join(cluster.nodes)}", "state=drain", "reason=test")
    try:  # a drained cluster accepts jobs for later
        run.run("--cluster", "slurm", flags=FLAGS)
    finally:
        cluster.run("scontrol", "update", f"nodename={','.join(cluster.nodes)}", "state=resume")
        jobs = queue.read_jobs(run.out) if queue.on_cluster(run.out) else []
        if ids := [job.job_id for job in jobs if job.job_id]:
            cluster.run("scancel", *ids)
