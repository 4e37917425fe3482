"""Runs on a real SLURM of its own, under what happens to jobs, nodes and daemons.

`tests.slurm.cluster` starts the SLURM, and `tests/slurm/fake` stands in for fairseq: a model there is a
number that every update changes, so that a run takes seconds. All else is the product.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from slurm.engine import queue
from tests.chaos.workloads import Difference, Report, check_kept, finished
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import Launcher, write_stream

_FLAGS = ("--arch", "switch_gmoe_tiny", "--max-update", "4")
_LEARNERS = ("sm", "gmoe", "gens", "ens --members 2", "umix")
_SECONDS = 900  # until a run counts as hanging
_LAUNCHES = 30


class OnSlurm:
    """Runs of the launcher on one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster()
        self.cluster.start()

    def close(self) -> None:
        """Stop the cluster."""
        self.cluster.stop()

    def run(self, rng: Random) -> Report:
        """Settings and faults are those that `rng` draws."""
        report = Report()
        try:
            self._run(rng, report)
        except Difference as problem:
            report.problem = str(problem)
            with contextlib.suppress(RuntimeError):
                self.cluster.run("scancel", "--user", str(os.geteuid()))
        return report

    def _run(self, rng: Random, report: Report) -> None:
        learner, _, members = rng.choice(_LEARNERS).partition(" ")
        words = [*members.split(), "--stages", str(rng.randint(2, 3))]
        report.settings = " ".join([learner, *words])
        shutil.rmtree(self.folder, ignore_errors=True)
        expected = self._launcher("local", learner)
        expected.environment["FAKE_SLEEP"] = "0"
        _wait(expected.start(*words, flags=_FLAGS), 0)
        launcher = self._launcher("jobs", learner)
        disturbed = _Disturbed(self.cluster, launcher, [*words, "--cluster", "slurm", "--timeout-min", "30"])
        disturbed.go_on(rng, rng.randint(2, 6), report.faults)
        try:  # a job that ended as its node or slurmctld died may start once more, to find that all is done
            self.cluster.ask_nodes_until(lambda: not self.cluster.run("squeue", "-h"))
        except TimeoutError as error:
            raise Difference(f"left in the queue: {error}") from None
        if launcher.rows != expected.rows:
            raise Difference(f"other rows:\n{launcher.rows}\n{expected.rows}")
        if names := _names(launcher.out) ^ _names(expected.out):
            raise Difference(f"files of one run only: {sorted(names)}")

    def _launcher(self, name: str, learner: str) -> Launcher:
        (self.folder / name / "stream").mkdir(parents=True)
        write_stream(self.folder / name / "stream", 4)
        return Launcher(self.folder / name, learner=learner, environment={"FAKE_SLEEP": "0.3"})


def _names(run: Path) -> set[str]:
    """Names of a run's results and checkpoints."""
    files = [path for pattern in ("*.json*", "*.pt") for path in run.rglob(pattern)]
    return {str(path.relative_to(run)) for path in files} - {queue.JOBS}


def _wait(process: subprocess.Popen[str], *codes: int) -> int:
    """The exit code. Difference: it is none of `codes`, or there is a traceback."""
    try:
        _, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Difference("no end") from None
    if "Traceback (most" in err:
        raise Difference(f"traceback:\n{err[-3000:]}")
    if codes and process.returncode not in codes:
        raise Difference(f"exit code {process.returncode}:\n{err[-3000:]}")
    return process.returncode


FAULTS_OF_JOBS = ("signalled", "cancelled", "requeued", "killed", "step killed", "process killed")
FAULTS = tuple(f"job {each}" for each in FAULTS_OF_JOBS)
FAULTS += (
    "jobs preempted",
    "node down",
    "power cut",
    "slurmctld restarted",
    "launch stopped",
    "launched twice",
)


class _Disturbed:
    """A launch that waits for its jobs, and its disturbances."""

    def __init__(self, cluster: Cluster, launcher: Launcher, words: Sequence[str]) -> None:
        self.cluster, self.launcher, self.words = cluster, launcher, words

    def go_on(self, rng: Random, count: int, faults: list[str]) -> None:
        """Launch until the run is complete; `count` faults on the way."""
        for _ in range(_LAUNCHES):
            done = finished(self.launcher.out)
            process = self._start("--wait")
            while count and process.poll() is None:
                time.sleep(rng.uniform(0, 3))
                if process.poll() is not None:
                    break
                fault = rng.choice(FAULTS)
                if self._meet(fault, rng, process):
                    faults.append(fault)
                    count -= 1
            deadline = time.monotonic() + _SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                self._administer()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            code = _wait(process)
            check_kept(done)
            if not code:
                return
        raise Difference(f"not complete after {_LAUNCHES} launches")

    def _start(self, *more: str) -> subprocess.Popen[str]:
        self.launcher.environment |= self.cluster.environment
        return self.launcher.start(*self.words, *more, flags=_FLAGS)

    def _administer(self) -> None:
        """What an administrator does after such faults, or time."""
        self._try("scontrol", "reconfigure")  # asks the nodes which jobs they know
        for node in self.cluster.nodes:  # SLURM drains a node, and holds a job, after a failed launch
            self._try("scontrol", "update", f"nodename={node}", "state=resume")
        with contextlib.suppress(RuntimeError):
            for job, fields in self.cluster.jobs().items():
                if "held" in fields["Reason"]:
                    self._try("scontrol", "release", job)

    def _running(self, rng: Random) -> str | None:
        """A running job of the run."""
        with contextlib.suppress(RuntimeError):
            jobs = self.cluster.jobs()
            if running := sorted(key for key, job in jobs.items() if job["JobState"] == "RUNNING"):
                return rng.choice(running)
        return None

    def _meet(self, fault: str, rng: Random, process: subprocess.Popen) -> bool:
        """Disturb the run; whether there was something to disturb. `process`: the launch that waits."""
        cluster, node = self.cluster, rng.choice(self.cluster.nodes)
        job = self._running(rng) if fault.startswith("job ") else ""
        match fault:
            case _ if job is None:
                return False
            case "job signalled":  # as scancel sends it; SIGTERM and SIGINT are those of a user
                name = rng.choice(["USR1", "USR2", "TERM", "INT", "KILL"])
                self._try("scancel", f"--signal={name}", *rng.choice([[], ["--full"]]), job)
            case "job cancelled":
                self._try("scancel", job)
            case "job requeued":
                self._try("scontrol", "requeue", job)
            case "job step killed":  # its slurmstepd
                return _kill(cluster.steps(job, "0"))
            case "job process killed":  # the launcher of its training, or the training
                found = cluster.processes(job)
                return _kill([rng.choice(found)] if found else [])
            case "job killed":
                _kill([*cluster.steps(job), *cluster.processes(job)])
                cluster.ask_nodes_until(lambda: cluster.state(job) != "RUNNING")
            case "jobs preempted":  # all, by one of a higher priority
                nodes = ("--nodes", str(len(cluster.nodes)), "--exclusive")
                self._finish(cluster.submit("sleep 1", "--partition=high", *nodes))
            case "node down":
                cluster.down(node)
                time.sleep(rng.uniform(0, 3))
                cluster.up(node)
            case "power cut":
                cluster.crash(node)
            case "slurmctld restarted":
                cluster.restart_controller(rng.uniform(0, 3))
            case "launch stopped":  # its jobs go on
                process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
                _wait(process)
            case "launched twice":
                _wait(self._start(), 0, 1, 2)
        return True

    def _finish(self, job: str) -> None:
        """Wait for the end of a job that is not of the run."""

        def over() -> bool:
            self._administer()
            return self.cluster.state(job) == "COMPLETED"

        self.cluster.until(over, timeout=60)

    def _try(self, *words: str) -> None:
        with contextlib.suppress(RuntimeError):  # the job has ended meanwhile
            self.cluster.run(*words)


def _kill(pids: Sequence[int]) -> bool:
    """Kill processes; whether there were any."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)
