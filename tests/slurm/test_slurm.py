"""The launcher on a real SLURM, over fake children:
whatever happens to a job, the rows are the same.

Most of the life of a job is waiting, so the scenarios run at the same time.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import ROOT, SMALL, Launcher, finish, make

from alma.records import Run
from slurm.engine import queue
from tests.slurm.cluster import Cluster
from tests.slurm.test_trainer import BESIDE, TRAINER, rows

FLAGS = (*SMALL, "--max-update", "4")
MEMBERS = ("--members", "3", "--stages", "3")
AT_A_TIME = 5


@dataclass
class OnSlurm:
    """A launcher whose jobs go to `cluster`, with slow updates."""

    cluster: Cluster
    launcher: Launcher

    def start(self, *options: str) -> subprocess.Popen:
        self.launcher.environment |= self.cluster.environment
        stages = MEMBERS if self.launcher.learner == "ens" else ("--stages", "3")
        words = ("--cluster", "slurm", "--timeout-min", "30", *stages, *options)
        return self.launcher.start(*words, flags=FLAGS)

    def launch(self, *options: str, code: int = 0) -> tuple[str, str]:
        """Launch and wait for the end."""
        return finish(self.start("--wait", *options), code, timeout=1200)

    @contextmanager
    def during(self, stage: int, *options: str):
        """Enter while the first training of `stage` runs; on exit wait for a successful end."""
        process = self.start("--wait", *options)
        try:
            self.cluster.until(lambda: self.updates(stage) >= 1, timeout=60)
            yield self.job(f"stage {stage}")
            finish(process, timeout=600)
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
        return next(
            Path(str(job.log)).read_text() for job in self.jobs if job.name.startswith(name)
        )

    @property
    def jobs(self) -> list[queue.SubmittedJob]:
        return queue.read_jobs(self.launcher.out)

    @property
    def trainings(self) -> int:
        """Number of training processes so far."""
        return len(self.launcher.pids.read_text().split())


def prepare(cluster, folder, learner: str = "gmoe", seconds: float = 0.2) -> OnSlurm:
    return OnSlurm(
        cluster, make(folder / "x", learner=learner, environment={"FAKE_SLEEP": str(seconds)})
    )


def stages_of_members_are_arrays_of_nodes(cluster, folder, expected):
    run = prepare(cluster, folder, "ens", 0.0)
    run.launch()
    assert run.launcher.rows == expected["ens"]
    array, _, element = run.job("stage 1, member 3").partition("_")
    assert element == "2"
    assert run.job("stage 1, member 1") == f"{array}_0"
    assert run.trainings == 9
    _, err = run.launch()  # nothing is left to do
    assert "0 jobs submitted" in err
    assert run.trainings == 9


def preempted(folder, expected, by_signal: bool):
    with Cluster(nodes=1, preempt_signal=by_signal) as cluster:
        run = prepare(cluster, folder, seconds=0.5)
        with run.during(1):
            above = cluster.submit("sleep 2", "--partition=high", "--exclusive")
        assert run.launcher.rows == expected["gmoe"]
        assert cluster.state(above) == "COMPLETED"
        assert run.trainings > 3
        assert ("waiting for SLURM" in run.log("stage 1")) != by_signal


def preempted_by_sigterm(_, folder, expected):
    preempted(folder, expected, by_signal=False)


def preempted_by_the_signal_asked_for(_, folder, expected):
    preempted(folder, expected, by_signal=True)


def timed_out_saves_and_resumes(cluster, folder, expected):
    run = prepare(cluster, folder, seconds=14)  # SLURM looks every 30 s
    # 9 minutes would take 9 minutes: once it trains,
    # the job gets a limit that is nearer than the signal.
    with run.during(0, "--timeout-min", "9", "--sbatch", "signal=USR2@115", "--stages", "1") as job:
        cluster.run("scontrol", "update", f"jobid={job}", "timelimit=2")
    assert run.launcher.rows == expected["gmoe"][:2]
    assert run.trainings >= 2
    assert "timed-out" in run.log("stage 0")


def node_goes_down(_, folder, expected):
    with Cluster(nodes=2) as cluster:
        run = prepare(cluster, folder)
        with run.during(1) as job:
            node = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
            cluster.down(node)
            cluster.until(lambda: cluster.state(job) != "RUNNING" or run.trainings > 2)
            cluster.up(node)
        assert run.launcher.rows == expected["gmoe"]


def slurmstepd_is_killed(cluster, folder, expected):
    """Of the step: srun would wait for it forever."""
    run = prepare(cluster, folder)
    with run.during(1) as job:
        for pid in cluster.steps(job, "0"):
            os.kill(pid, signal.SIGKILL)
    assert run.launcher.rows == expected["gmoe"]
    assert cluster.jobs()[job]["Restarts"] == "1"
    assert "slurmstepd of this job is gone" in run.log("stage 1")
    assert run.updates(1) == 4  # saved before the requeue, so none is repeated


def killed_member_stops_its_dependents_only(cluster, folder, expected):
    """A relaunch completes the run."""
    run = prepare(cluster, folder, "gens", 0.0)
    run.launcher.environment["FAKE_CRASH"] = "1:2:kill"
    _, err = run.launch(code=1)
    assert "signal 9 (Killed)" in err.splitlines()[-1]
    assert "stage_01/train.log" in err.splitlines()[-1]
    done = {job.name for job in run.jobs if job.done}
    assert done == {"untrained", "stage 0", "stage 2", "evaluation of stage 0"}
    states = cluster.states(
        *(run.job(f"{of}stage {k}") for of in ("", "evaluation of ") for k in range(3))
    )
    assert sorted(states.values()) == ["CANCELLED"] * 2 + ["COMPLETED"] * 3 + ["FAILED"]
    run.launcher.environment.pop("FAKE_CRASH")
    _, err = run.launch()
    assert "\n3 jobs submitted" in err
    assert run.launcher.rows == expected["gens"]
    assert run.trainings == 4


def failed_jobs_are_resubmitted_while_others_run(cluster, folder, _):
    run = prepare(cluster, folder, "gens", 600.0)
    run.launcher.environment["FAKE_CRASH"] = "1:0:python"
    finish(run.start())
    cluster.wait_for(run.job("stage 1"), "FAILED", timeout=60)
    before = {name: run.job(name) for name in ("stage 0", "stage 2", "evaluation of stage 0")}
    failed = run.job("stage 1")
    run.launcher.environment.pop("FAKE_CRASH")
    _, err = finish(run.start())
    assert "3 jobs are already in the queue" in err
    assert "\n3 jobs submitted" in err
    assert {name: run.job(name) for name in before} == before
    new = [run.job(name) for name in ("stage 1", "evaluation of stage 1", "evaluation of stage 2")]
    assert failed not in new
    waits = cluster.jobs()[new[2]]["Dependency"]
    assert all(f"afterok:{job}(" in waits for job in (before["stage 0"], new[0], before["stage 2"]))
    cluster.run("scancel", *before.values(), *new)


def sweep_of_images_resumes_and_completes(cluster, folder, _):
    """A run that fails fails its part only, a requeued part resumes within a run,
    a relaunch completes."""

    def alma(*words: str, code: int = 0) -> tuple[str, str]:
        environment = cluster.environment | {"PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(
            [sys.executable, "-m", "alma", *words], cwd=folder, env=environment, **pipes
        )
        return finish(process, code, timeout=1200)

    flags = (
        "images",
        "--hidden",
        "2",
        "--megabatches",
        "3",
        "--epochs",
        "30",
        "--save-interval",
        "0",
    )
    place = folder / "x"
    foreign = folder / "x/sm_w1_h2_s1"
    alma(*flags, "--lr", "0.5", "--epochs", "1", "--seed", "1", "--out", "x/sm_w1_h2_s1")
    words = (*flags, "--seeds", "0-3", "--out", "x", "--cluster", "slurm", "--runs-per-job", "2")
    assert "2 jobs submitted" in alma(*words)[1]
    requeued, failing = queue.read_jobs(place)
    begun = place / "sm_w1_h2_s2/results.jsonl"
    complete = place / "sm_w1_h2_s0/results.jsonl"
    cluster.until(lambda: begun.exists() and begun.read_text().count("\n") >= 2, timeout=60)
    first = complete.read_text()
    cluster.run("scancel", "--signal=USR2", requeued.job_id)  # as SLURM does before a timeout
    cluster.until(lambda: cluster.jobs()[requeued.job_id]["Restarts"] == "1")
    before = begun.read_text()
    assert not requeued.done
    ended = cluster.wait([requeued.job_id, failing.job_id], timeout=90)
    assert ended == {requeued.job_id: "COMPLETED", failing.job_id: "FAILED"}
    assert begun.read_text().startswith(before)
    assert complete.read_text() == first
    _, *lines, total = alma("status", "x", code=1)[0].splitlines()
    assert len(lines) == 2  # one for each part, none for the runs
    assert "1 of 2 runs failed: x/sm_w1_h2_s1 holds a run with other settings" in lines[1]
    assert total == "1 done, 1 failed"
    shutil.rmtree(foreign)
    out, err = alma(*words, "--wait")
    assert "1 jobs submitted" in err
    assert f"alma report {place}" in out
    names = [f"sm_w1_h2_s{seed}" for seed in range(4)]
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["jobs.json", "slurm_jobs", *names]
    )
    marked = [json.loads(job.marker.read_text())["runs"] for job in queue.read_jobs(place)]
    assert sorted(run for runs in marked for run in runs) == [f"x/{name}" for name in names]
    assert {len(Run.read(place / name).rows) for name in names} == {4}


def own_trainer_is_requeued_and_goes_on(cluster, folder, expected):
    """One of two members gets the signal of a time limit, saves, exits with 75 and resumes."""
    (folder / "beside.py").write_text(BESIDE)
    (folder / "my_trainer.py").write_text(TRAINER)

    def train(out: str, *words: str, **settings: str) -> subprocess.Popen:
        arguments = [expected["stream"], "--learner", "ens", "--stages", "2", "--out", out, *words]
        arguments += ["--trainer", f"{sys.executable} my_trainer.py"]
        return subprocess.Popen(
            [sys.executable, "-m", "alma", "train", *map(str, arguments)],
            cwd=folder,
            env=cluster.environment | {"PYTHONPATH": str(ROOT)} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    finish(train("local"), timeout=600)
    process = train("run", "--cluster", "slurm", "--gpus-per-node", "0", "--wait", SLOW="2")
    model = folder / "run/stage_01/member_1/model/model.txt"
    cluster.until(lambda: model.exists() and "megabatch_01" in model.read_text(), timeout=300)
    (job,) = (
        job for job in queue.read_jobs(folder / "run") if job.name.startswith("stage 1, member 2")
    )
    cluster.run("scancel", "--signal=USR2", job.job_id)  # as SLURM does before a timeout
    finish(process, timeout=600)
    assert cluster.jobs()[job.job_id]["Restarts"] == "1"
    (log,) = model.parent.parent.glob("*.log")
    assert log.read_text().count("num_updates") == 3  # no update is repeated
    assert rows(str(folder / "run")) == rows(str(folder / "local"))


SCENARIOS = (  # the longest first
    timed_out_saves_and_resumes,
    sweep_of_images_resumes_and_completes,
    preempted_by_sigterm,
    preempted_by_the_signal_asked_for,
    node_goes_down,
    slurmstepd_is_killed,
    own_trainer_is_requeued_and_goes_on,
    killed_member_stops_its_dependents_only,
    stages_of_members_are_arrays_of_nodes,
    failed_jobs_are_resubmitted_while_others_run,
)


def uninterrupted(folder: Path) -> dict[str, list[dict]]:
    """Rows of runs on this machine."""
    outcomes = {}
    for learner in ("gmoe", "ens", "gens"):
        local = make(folder / learner, learner=learner)
        local.run(*(MEMBERS if learner == "ens" else ("--stages", "3")), flags=FLAGS)
        outcomes[learner] = local.rows
    return outcomes


@pytest.fixture(scope="module")
def outcomes(request, cluster, stream, tmp_path_factory):
    """The future of each scenario that is to be tested."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    scenarios = [
        spec.params["scenario"] for spec in parameters if spec and "scenario" in spec.params
    ]
    expected = uninterrupted(tmp_path_factory.mktemp("local")) | {"stream": stream}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {
            scenario: pool.submit(scenario, cluster, tmp_path_factory.mktemp("run"), expected)
            for scenario in SCENARIOS
            if scenario in scenarios
        }


def marked() -> list:
    """All scenarios; `make test` has one, and stand-ins of SLURM for the others."""
    fast = (preempted_by_sigterm,)
    return [
        pytest.param(scenario, marks=() if scenario in fast else pytest.mark.thorough)
        for scenario in SCENARIOS[::-1]
    ]


@pytest.mark.parametrize("scenario", marked(), ids=lambda scenario: scenario.__name__)
def test_the_rows_are_the_same(outcomes, scenario):
    outcomes[scenario].result()


def test_resources_that_sbatch_refuses_are_refused_before_anything_is_written(cluster, tmp_path):
    run = make(tmp_path / "x", environment=cluster.environment)
    _, err = run.run("--cluster", "slurm", "--partition", "nowhere", code=2, flags=FLAGS)
    assert re.search(
        "^error: sbatch would refuse the training: .*invalid partition", err.splitlines()[-1]
    ), err
    assert sorted(path.name for path in run.folder.iterdir()) == ["stream"]
    cluster.run(
        "scontrol", "update", f"nodename={','.join(cluster.nodes)}", "state=drain", "reason=test"
    )
    try:  # a drained cluster accepts jobs for later
        run.run("--cluster", "slurm", flags=FLAGS)
    finally:
        cluster.run("scontrol", "update", f"nodename={','.join(cluster.nodes)}", "state=resume")
        jobs = queue.read_jobs(run.out) if queue.on_cluster(run.out) else []
        if ids := [job.job_id for job in jobs if job.job_id]:
            cluster.run("scancel", *ids)
