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
from collections.abc import Callable, Sequence
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

    def __enter__(self) -> "OnSlurm":
        return self

    def __exit__(self, *_: object) -> None:
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
                fault = rng.choice(list(FAULTS))
                if FAULTS[fault](self, rng, process):
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

    def signal_job(self, rng: Random, process: subprocess.Popen) -> bool:
        """To a job, as scancel sends it; SIGTERM and SIGINT are those of a user."""
        if job := self._running(rng):
            name = rng.choice(["USR1", "USR2", "TERM", "INT", "KILL"])
            self._try("scancel", f"--signal={name}", *rng.choice([[], ["--full"]]), job)
        return bool(job)

    def cancel(self, rng: Random, process: subprocess.Popen) -> bool:
        """A job, by its user."""
        if job := self._running(rng):
            self._try("scancel", job)
        return bool(job)

    def requeue(self, rng: Random, process: subprocess.Popen) -> bool:
        """A job, by its user."""
        if job := self._running(rng):
            self._try("scontrol", "requeue", job)
        return bool(job)

    def preempt(self, rng: Random, process: subprocess.Popen) -> bool:
        """All jobs, by one of a higher priority."""
        nodes = ("--nodes", str(len(self.cluster.nodes)), "--exclusive")
        above = self.cluster.submit("sleep 1", "--partition=high", *nodes)

        def over() -> bool:
            self._administer()
            return self.cluster.state(above) == "COMPLETED"

        self.cluster.until(over, timeout=60)
        return True

    def node_down(self, rng: Random, process: subprocess.Popen) -> bool:
        """A node, for some seconds."""
        node = rng.choice(self.cluster.nodes)
        self.cluster.down(node)
        time.sleep(rng.uniform(0, 3))
        self.cluster.up(node)
        return True

    def power_cut(self, rng: Random, process: subprocess.Popen) -> bool:
        """Of a node."""
        self.cluster.crash(rng.choice(self.cluster.nodes))
        return True

    def kill_step(self, rng: Random, process: subprocess.Popen) -> bool:
        """slurmstepd of a job's step."""
        job = self._running(rng)
        steps = self.cluster.steps(job, "0") if job else []
        _kill(steps)
        return bool(steps)

    def kill_all(self, rng: Random, process: subprocess.Popen) -> bool:
        """All processes of a job."""
        if not (job := self._running(rng)):
            return False
        _kill([*self.cluster.steps(job), *self.cluster.processes(job)])
        self.cluster.ask_nodes_until(lambda: self.cluster.state(job) != "RUNNING")
        return True

    def kill_one(self, rng: Random, process: subprocess.Popen) -> bool:
        """A process of a job: the launcher of its training, or the training."""
        job = self._running(rng)
        found = self.cluster.processes(job) if job else []
        if found:
            _kill([rng.choice(found)])
        return bool(found)

    def restart_controller(self, rng: Random, process: subprocess.Popen) -> bool:
        """slurmctld: killed, and for some seconds gone."""
        self.cluster.restart_controller(rng.uniform(0, 3))
        return True

    def stop_launch(self, rng: Random, process: subprocess.Popen) -> bool:
        """The launch that waits, by a signal; its jobs go on."""
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        _wait(process)
        return True

    def second_launch(self, rng: Random, process: subprocess.Popen) -> bool:
        """The same command beside the first one."""
        _wait(self._start(), 0, 1, 2)
        return True

    def _try(self, *words: str) -> None:
        with contextlib.suppress(RuntimeError):  # the job has ended meanwhile
            self.cluster.run(*words)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[_Disturbed, Random, subprocess.Popen], bool]] = {
    "job signalled": _Disturbed.signal_job,
    "job cancelled": _Disturbed.cancel,
    "job requeued": _Disturbed.requeue,
    "job preempted": _Disturbed.preempt,
    "node down": _Disturbed.node_down,
    "power cut": _Disturbed.power_cut,
    "slurmstepd killed": _Disturbed.kill_step,
    "job killed": _Disturbed.kill_all,
    "process killed": _Disturbed.kill_one,
    "slurmctld restarted": _Disturbed.restart_controller,
    "launch stopped": _Disturbed.stop_launch,
    "launched twice": _Disturbed.second_launch,
}
"""What happens to a run; each says whether it met one."""
