"""The base class of SLURM jobs: restartable work that SLURM may kill and rerun at any time."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from alma.errors import UserError
from alma.processes import PR_SET_PDEATHSIG
from slurm.engine import children

SAVING_SECONDS = 90  # time for a training to finish its update and write its checkpoint
REQUEUE_SECONDS = 600
"""How long a job that was signalled waits for SLURM to requeue or to end it."""
ENDING_SIGNALS = ("TERM", "USR1", "USR2")
"""Signals of a preemption, of a time limit, and of the end of slurmstepd."""


def shielded(python: str) -> str:
    """The words of a shell that start `python` with the signals ignored.

    `Job.__call__` sets its handlers only after all imports. Until then a signal would end the
    process, and SLURM would call the job failed instead of preempted.
    """
    ignore = f'trap "" {" ".join(ENDING_SIGNALS)}; exec "$0" "$@"'
    return f"sh -c {shlex.quote(ignore)} {python}"


def shield_of_script() -> tuple[list[str], list[str]]:
    """Lines of a batch script before and after `srun`.

    The script ignores the signals too. A process can get one before its shell ignores it; then the
    script waits for SLURM, because a job that ends by itself is not requeued. If SLURM knows of no
    preemption, srun has ended the process because another one failed.
    """
    numbers = [128 + signal.Signals[f"SIG{name}"] for name in ENDING_SIGNALS]
    codes = "|".join(map(str, numbers))
    before = [f"trap '' {' '.join(ENDING_SIGNALS)}"]
    after = [
        "code=$?",
        f"case $code in {codes})",
        '  case $(scontrol show job "$SLURM_JOB_ID") in',
        "    *JobState=RUNNING*PreemptTime=None*) ;;",
        f"    *) sleep {REQUEUE_SECONDS};;",
        "  esac;;",
        "esac",
        "exit $code",
    ]
    return before, after


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """Restartable work for one SLURM job, complete once its `marker` exists.

    submitit pickles the job when it is submitted, so it must not hold the path of a checkpoint: at
    each start the job looks for the newest one.
    """

    run: Path  # its jobs.json lists the job
    name: str  # unique within `run`; shown to people
    kind: str  # one of the kinds listed at `SubmittedJob`
    array: str  # name of the SLURM array of which this job is an element
    directory: Path
    marker: Path  # the file that is written last
    needs: tuple[Path, ...] = ()  # markers of the jobs that must be complete before this one starts
    updates: int | None = None  # number of updates; None: not a training, or without a limit
    alone: bool = False  # whether it runs as one process, on at most one GPU

    @property
    def done(self) -> bool:
        return self.marker.exists()

    def __str__(self) -> str:
        return f"{self.run} {self.name}"

    @abstractmethod
    def work(self) -> None:
        """Do what is missing. Raises UserError or StageFailed if that is impossible."""

    def __call__(self) -> None:
        """Do what is missing; on failure print `error: ...` and exit with code 1. Called by
        submitit."""
        ending = []
        by_submitit = signal.getsignal(signal.SIGUSR2)
        slurmstepd = os.getppid()

        def end(number: int, frame) -> None:
            # SLURM signals all processes of a job, so the training may end at the same time.
            ending.append(number)
            if number == signal.SIGUSR2 and callable(by_submitit):
                by_submitit(number, frame)
            else:  # cancelled by scancel, or preempted without a signal of its own
                children.save(0)

        def orphaned(number: int, frame) -> None:
            # The kernel has killed slurmstepd because memory ran out. SLURM does not notice this:
            # srun and this process would go on until the job's time limit.
            if os.getppid() == slurmstepd:
                return
            children.save(SAVING_SECONDS)
            print("the slurmstepd of this job is gone: requeueing the job", flush=True)
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                # Fails if another task has already requeued the job.
                requeue = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
                subprocess.run(requeue, check=False, timeout=REQUEUE_SECONDS)
            sys.exit(1)

        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, end)
        signal.signal(signal.SIGUSR1, orphaned)
        ctypes.CDLL(None).prctl(
            PR_SET_PDEATHSIG, signal.SIGUSR1
        )  # sent by the kernel when slurmstepd ends
        try:
            self.work()
        except (UserError, children.StageFailed) as error:
            # SLURM, or submitit in another task, will requeue the job; if this process exits before
            # that, the job ends instead.
            if ending or isinstance(error, children.Saved):
                print("waiting for SLURM to end or to requeue this job", flush=True)
                time.sleep(REQUEUE_SECONDS)
            print(f"error: {error}", flush=True)
            sys.exit(1)
        finally:
            # submitit still writes a file, and the interpreter takes a while to end.
            for name in ENDING_SIGNALS:
                signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)

    def checkpoint(self):
        """Save before a requeue; submitit calls it on preemption by signal and when time runs
        out."""
        from submitit.helpers import DelayedSubmission

        children.save(SAVING_SECONDS)
        return DelayedSubmission(self)
