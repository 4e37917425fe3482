"""Preemptions on a real SLURM, at random moments of jobs, also in their first and last second.

Runs of an ensemble over stand-ins of fairseq (tests/slurm/fake) go on while jobs of a partition of
higher priority preempt them. Right is: the rows of an undisturbed run, no job that SLURM calls
failed, no update of a training twice, no finished file changed.
"""

import re
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random

from tests.chaos.workloads import Difference, check_kept, finished
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import SMALL, Launcher, finish, make

_FLAGS = (*SMALL, "--max-update", "3")
_SHAPE = ("--members", "8", "--stages", "2")
_ON_SLURM = ("--cluster", "slurm", "--gpus-per-node", "1", "--cpus-per-task", "1", "--mem-gb", "1")
_BAD = {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_UPDATE = re.compile(r'"num_updates": "(\d+)"')
_RUN_SECONDS = 900
"""Until a run counts as hanging."""


class Preemptions:
    """Runs on a cluster of one node, below `folder`; `count` preemptions have come so far."""

    def __init__(self, cluster: Cluster, folder: Path, rng: Random) -> None:
        self.count = 0
        self._cluster = cluster
        self._folder = folder
        self._rng = rng
        local = self._launcher("local")
        local.run(*_SHAPE, flags=_FLAGS)
        self._expected = local.rows

    def _launcher(self, name: str) -> Launcher:
        return make(self._folder / name, learner="ens", environment={"FAKE_SLEEP": "0.5"})

    def run(self, number: int) -> None:
        """Launch a run and preempt its jobs until it ends. Difference: something is not right."""
        launcher = self._launcher(f"run_{number}")
        launcher.environment |= self._cluster.environment
        before = set(self._cluster.jobs())
        process = launcher.start(*_SHAPE, *_ON_SLURM, "--wait", flags=_FLAGS)
        try:
            self._preempt(process, launcher)
            finish(process)
        except AssertionError as failed:
            raise Difference(f"the launch failed: {failed}") from failed
        finally:
            process.kill()
        states = {}
        restarts = 0
        for job_id, job in self._cluster.jobs().items():
            if job_id not in before and job["JobName"].startswith("alma-"):
                states[job_id] = job["JobState"]
                restarts += int(job["Restarts"])
        self.count += restarts
        bad = {job_id: state for job_id, state in states.items() if state in _BAD}
        if bad:
            raise Difference(f"jobs that did not complete: {bad}")
        if launcher.rows != self._expected:
            raise Difference("other rows")
        for log in launcher.out.rglob("train.log"):
            updates = [int(update) for update in _UPDATE.findall(log.read_text())]
            if updates != sorted(set(updates)):
                raise Difference(f"{log}: updates were trained twice: {updates}")

    def _preempt(self, process: subprocess.Popen, launcher: Launcher) -> None:
        """Preempt all running jobs again and again, until the launch has ended."""
        deadline = time.monotonic() + _RUN_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise Difference(f"no end within {_RUN_SECONDS} s")
            done = finished(launcher.out)
            if self._cluster.run("squeue", "--noheader", "--states=running").strip():
                time.sleep(self._rng.uniform(0, 5))
                above = self._cluster.submit("true", "--partition=high", "--exclusive")
                self._cluster.wait([above], timeout=120)
            time.sleep(0.05)
            check_kept(done)


def preempt(wanted: int, seed: int) -> int:
    """Preempt `wanted` jobs; print what differs; return the number of differences."""
    differences = 0
    with tempfile.TemporaryDirectory() as folder, Cluster(nodes=1) as cluster:
        preemptions = Preemptions(cluster, Path(folder), Random(f"slurm {seed}"))
        runs = 0
        while preemptions.count < wanted:
            try:
                preemptions.run(runs)
            except Difference as problem:
                differences += 1
                print(f"run {runs}: {problem}", flush=True)
            runs += 1
            print(f"{preemptions.count} preemptions in {runs} runs", flush=True)
    print(f"{preemptions.count} preemptions in {runs} runs, {differences} differences")
    return differences
