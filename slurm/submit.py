"""Runs to SLURM jobs: one array for each stage, all submitted up front.

An element of an array is one training: run x seed x ensemble member. A stage's array follows the one before
by `aftercorr`, element by element; the evaluation of a run's stage follows its members by `afterok`. What
fails for good takes what needs it along (kill-on-invalid-dep).
"""

import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alma.errors import UserError
from slurm import queue
from slurm.plan import Plan
from slurm.resources import Resources
from slurm.unit import Restartable, Unit, needs, units

LOGS = "slurm_jobs"
_LATER = ("Requested nodes are busy", "Required node not available")
Submit = Callable[[str, Sequence[Restartable], Resources, str | None], list[str]]
"""(name, units, resources, dependency) -> a job id for each unit: one job, or one array of several."""


def submit(plans: Sequence[Plan], resources: Resources, send: Submit, jobs: dict[Path, str]) -> None:
    """Give `send` all that is not complete, in an order in which it can run.

    `jobs` gets the job of each unit, by its marker, as soon as there is one.
    """
    spawns = resources.tasks_per_node == 1 and resources.gpus_per_node > 1
    pieces = {plan.out: units(plan, spawns) for plan in plans}
    missing = [unit for each in pieces.values() for unit in each if not unit.marker.exists()]

    def hand_over(name: str, some: Sequence[Unit], each: Resources, after: str | None) -> None:
        ids = send(f"alma-{name}", some, each, after)
        jobs.update(zip((unit.marker for unit in some), ids, strict=True))

    for unit in missing:
        if unit.kind == "untrained":
            hand_over("untrained", [unit], resources.alone(), None)
    for chains in _alike(missing):
        before: list[str] = []
        for index in range(chains[0][0].index, chains[0][-1].index + 1):
            now = [unit for chain in chains for unit in chain if unit.index == index]
            hand_over(f"stage{index}", now, resources, _after(before, len(now)))
            before = [jobs[unit.marker] for unit in now]
    for unit in missing:
        if unit.kind == "evaluate":
            needed = [each.marker for each in needs(unit, pieces[unit.plan.out])]
            waits = [jobs[marker] for marker in needed if marker in jobs]
            after = ":".join(["afterok", *waits]) if waits else None
            hand_over(f"evaluate{unit.index}", [unit], resources.alone(), after)


def _alike(missing: Sequence[Unit]) -> list[list[list[Unit]]]:
    """Chains of trainings (of a member, stage by stage), those that begin alike together, long ones first.

    The arrays of their stages then have the same elements in the same places, as aftercorr wants it.
    """
    chains: dict[tuple[Path, int], list[Unit]] = defaultdict(list)
    for unit in missing:
        if unit.kind == "train":
            chains[unit.plan.out, unit.member].append(unit)
    by_start: dict[int, list[list[Unit]]] = defaultdict(list)
    for chain in sorted(chains.values(), key=len, reverse=True):
        by_start[chain[0].index].append(chain)
    return list(by_start.values())


def _after(before: Sequence[str], count: int) -> str | None:
    """The dependency of `count` trainings on as many or more of the stage before."""
    if not before:
        return None
    if count == 1:
        return f"afterok:{before[0]}"
    return f"aftercorr:{before[0].split('_')[0]}"


def to_slurm(folder: Path) -> Submit:
    """Submit with submitit, whose files and the jobs' logs go to `folder`. UserError: SLURM refuses."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    def send(
        name: str, pieces: Sequence[Restartable], resources: Resources, dependency: str | None
    ) -> list[str]:
        try:
            executor = SlurmExecutor(folder / "%j", max_num_timeout=resources.max_requeues)
            executor.update_parameters(**parameters(name, resources, dependency))
            return [str(job.job_id) for job in executor.submit_array(pieces)]
        except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"sbatch refused {name}: {reason}; with --dry-run you see what it was given"
            ) from error

    return send


@dataclass
class Paper:
    """What a dry run would submit."""

    texts: list[str] = field(default_factory=list)
    """Of each job or array, as sbatch would get it."""
    units: int = 0
    gpu_hours: float = 0.0
    """If every job took all its time."""

    def __str__(self) -> str:
        jobs = f"{len(self.texts)} jobs and arrays with {self.units} units"
        return f"{jobs}, at most {self.gpu_hours:,.0f} GPU-hours (every job for all its time)"


def to_paper(folder: Path, paper: Paper) -> Submit:
    """Submit nothing; `paper` gets what would be."""
    from submitit.slurm.slurm import _make_sbatch_string

    def send(
        name: str, pieces: Sequence[Restartable], resources: Resources, dependency: str | None
    ) -> list[str]:
        number = f"<{len(paper.texts) + 1}>"
        count: dict[str, Any] = {"map_count": len(pieces)} if len(pieces) > 1 else {}
        command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {folder}/%j"
        text = _make_sbatch_string(command, folder / "%j", **parameters(name, resources, dependency), **count)
        names = ", ".join(map(str, pieces))
        paper.texts.append(f"# {number} {names}\n{text}")
        paper.units += len(pieces)
        gpus = resources.nodes * resources.gpus_per_node
        paper.gpu_hours += len(pieces) * gpus * resources.timeout_min / 60
        return [f"{number}_{place}" for place in range(len(pieces))] if len(pieces) > 1 else [number]

    return send


def parameters(name: str, resources: Resources, dependency: str | None) -> dict[str, Any]:
    """For submitit."""
    more = {"requeue": True, "kill-on-invalid-dep": "yes"}
    after = {"dependency": dependency} if dependency else {}
    return {**resources.parameters(), **after, "job_name": name, "additional_parameters": more}


def record(plans: Sequence[Plan], jobs: dict[Path, str], folder: Path) -> None:
    """Write each run's jobs.json, which slurm.status and slurm.cancel read."""
    for plan in plans:
        pieces = units(plan)
        places = {unit.marker: place for place, unit in enumerate(pieces)}
        entries = []
        for unit in pieces:
            job = jobs.get(unit.marker)
            entries.append(
                {
                    "name": unit.name,
                    "kind": unit.kind,
                    "stage": None if unit.kind == "untrained" else unit.index,
                    "directory": os.path.relpath(unit.directory, plan.out),
                    "marker": os.path.relpath(unit.marker, plan.out),
                    "updates": plan.max_update if unit.kind == "train" else None,
                    "job": job,
                    "log": job_log(folder, job) if job else None,
                    "needs": [places[each.marker] for each in needs(unit, pieces)],
                }
            )
        queue.write_units(plan.out, entries)


def job_log(folder: Path, job: str) -> str:
    """Where submitit has the output of a job's first task go."""
    return str(folder / job / f"{job}_0_log.out")


def log_folder(plans: Sequence[Plan]) -> Path:
    """A new one for each launch: SLURM may give a job number again, and submitit find its old result."""
    return log_folder_in(Path(os.path.commonpath([plan.out.resolve() for plan in plans])))


def log_folder_in(place: Path) -> Path:
    """A new one for a launch whose runs are in `place`."""
    return place / LOGS / time.strftime("%Y%m%d-%H%M%S")


def check(resources: Resources) -> None:
    """UserError: sbatch would refuse a training with these resources, or its evaluation; submits nothing."""
    from submitit.slurm.slurm import _make_sbatch_string

    for name, each in (("training", resources), ("evaluation", resources.alone())):
        text = _make_sbatch_string("true", Path(LOGS), **parameters(name, each, None))
        answer = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True)
        # A full or reserved cluster fails this test, but takes jobs for later.
        if answer.returncode and not any(reason in answer.stderr for reason in _LATER):
            raise UserError(f"sbatch would refuse the {name}: {' '.join(answer.stderr.split())}")
