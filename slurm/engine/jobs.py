"""What one SLURM job does: a piece of a run that may be killed at any moment and is simply run again."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alma.errors import UserError
from alma.files import LOCK, locked, make_directory
from alma.records import Run
from slurm.engine import children as child
from slurm.lm import stage
from slurm.lm.plan import Plan, StageSpec

SAVING_SECONDS = 90  # that a training may take to its next update and its checkpoint
_REQUEUE_SECONDS = 600
_LOCK_SECONDS = 120


class Restartable:
    """What submitit pickles and a job calls; `work` is killed, saved and called again as SLURM likes."""

    def __call__(self) -> None:
        """Do what is not done yet. Ends the process with code 1 and a line `error: …` when it cannot."""
        ending = []
        by_submitit = signal.getsignal(signal.SIGUSR2)
        holder = os.getppid()

        def end(number: int, frame) -> None:
            # SLURM sends a signal to all processes of a job: this may be the end of the training as well.
            ending.append(number)
            if number == signal.SIGUSR2 and callable(by_submitit):
                by_submitit(number, frame)
            else:  # preemption without a signal of its own, scancel
                child.save(0)

        def orphaned(number: int, frame) -> None:
            if os.getppid() != holder:
                _requeue()

        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, end)
        signal.signal(signal.SIGUSR1, orphaned)
        child.signal_at_parents_death(signal.SIGUSR1)
        try:
            self.work()
        except (UserError, child.StageFailed) as error:
            # SLURM requeues the job, or submitit in another task of it, unless this one ends before.
            if ending or isinstance(error, child.Saved):
                print("waiting for SLURM to end or to requeue this job", flush=True)
                time.sleep(_REQUEUE_SECONDS)
            print(f"error: {error}", flush=True)
            sys.exit(1)

    def checkpoint(self):
        """What submitit calls before it requeues the job: at preemption by signal, and when time runs out."""
        from submitit.helpers import DelayedSubmission

        child.save(SAVING_SECONDS)
        return DelayedSubmission(self)

    def work(self) -> None:
        """Do what is not done yet. UserError and StageFailed: it cannot be done."""
        raise NotImplementedError


@dataclass(frozen=True)
class Unit(Restartable):
    """What submitit pickles: settings and directories, never a checkpoint, which a new start has to find."""

    plan: Plan
    kind: Literal["untrained", "train", "evaluate"]
    index: int = 0
    """Of the stage."""
    member: int = 0
    spawns: bool = True
    """fairseq starts the processes of a node; else there is a task for each."""

    @property
    def spec(self) -> StageSpec:
        """The stage."""
        return self.plan.stages[self.index]

    @property
    def name(self) -> str:
        """For people."""
        if self.kind == "untrained":
            return "untrained"
        if self.kind == "evaluate":
            return f"evaluation of stage {self.index}"
        of = (
            f", member {self.member + 1} of {len(self.spec.trainings)}"
            if len(self.spec.trainings) > 1
            else ""
        )
        return f"stage {self.index}{of}"

    @property
    def directory(self) -> Path:
        """Where its logs are."""
        if self.kind == "untrained":
            return self.plan.out
        return self.spec.trainings[self.member].directory if self.kind == "train" else self.spec.directory

    @property
    def marker(self) -> Path:
        """Exists when it is complete."""
        names = {"untrained": stage.UNTRAINED, "train": stage.TRAINED, "evaluate": stage.RESULT}
        return self.directory / names[self.kind]

    def __str__(self) -> str:
        return f"{self.plan.out} {self.name}"

    def work(self) -> None:
        """Train or evaluate."""
        if self.kind == "untrained":
            stage.evaluate_untrained(self.plan)
        elif self.kind == "evaluate":
            stage.evaluate(self.spec)
        else:
            self._train()
            return
        with patiently_locked(self.plan.out):
            stage.collect(self.plan, Run.open(self.plan.out, Run.read(self.plan.out).config))

    def _train(self) -> None:
        from submitit import JobEnvironment

        job = JobEnvironment()
        arguments, environment = [], {}
        port = str(20_000 + int(job.raw_job_id) % 40_000)
        if job.num_tasks > 1 and self.spawns:
            arguments = ["--distributed-port", port]  # fairseq reads the rest from SLURM
        elif job.num_tasks > 1:
            ranks = {"RANK": job.global_rank, "LOCAL_RANK": job.local_rank, "WORLD_SIZE": job.num_tasks}
            environment = {name: str(value) for name, value in ranks.items()}
            environment |= {"MASTER_ADDR": job.hostnames[0], "MASTER_PORT": port}
        training = self.spec.trainings[self.member]
        if job.global_rank:
            log = f"train.rank{job.global_rank}.log"
            stage.train(training, None, arguments, environment, log)
            return
        make_directory(training.directory)
        with patiently_locked(training.directory):  # a job that SLURM took for dead may still be at it
            stage.train(training, None, arguments, environment)


def _requeue() -> None:
    """Save and requeue the job whose slurmstepd is gone: killed, as by the kernel for want of memory.

    SLURM does not: its srun waits until the job's time is over, and nobody else ends this process.
    """
    child.save(SAVING_SECONDS)
    print("the slurmstepd of this job is gone: requeueing the job", flush=True)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        # Another task may have done it: then this fails.
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], timeout=_REQUEUE_SECONDS)
    sys.exit(1)


def units(plan: Plan, spawns: bool = True) -> list[Unit]:
    """All pieces of a run, in an order in which they can be done."""
    pieces = [Unit(plan, "untrained")]
    for index, spec in enumerate(plan.stages):
        pieces += [Unit(plan, "train", index, member, spawns) for member in range(len(spec.trainings))]
        pieces.append(Unit(plan, "evaluate", index))
    return pieces


def needs(unit: Unit, pieces: list[Unit]) -> list[Unit]:
    """What has to be complete before `unit` can start: of its `pieces` those that train what it reads."""
    if unit.kind == "untrained":
        return []
    if unit.kind == "evaluate":
        return [each for each in pieces if each.kind == "train" and each.directory in unit.spec.models]
    previous = unit.spec.trainings[unit.member].previous
    return [each for each in pieces if each.kind == "train" and each.directory == previous]


@contextlib.contextmanager
def patiently_locked(directory: Path, name: str = LOCK) -> Iterator[None]:
    """`alma.files.locked`, waiting for others that hold the lock. UserError: it takes minutes."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(directory, name))
                break
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield
