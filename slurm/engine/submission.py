"""Runs to SLURM jobs: all that is missing is submitted at once, each after what it `needs` and nothing else.

The trainings of a stage (run x seed x ensemble member) are elements of an array, and so are evaluations. An
array whose elements need those in their own places of other arrays follows them by `aftercorr`; a unit with
other needs is a job of its own, by `afterok`. When one fails for good SLURM cancels what depends on it, and
nothing else (kill-on-invalid-dep).
"""

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alma.errors import UserError
from slurm.engine import queue
from slurm.engine.jobs import Restartable, Unit, needs, units
from slurm.engine.resources import Resources
from slurm.lm.plan import Plan

LOGS = "slurm_jobs"
_KINDS = ("untrained", "train", "evaluate")  # in this order they are submitted
_LATER = (
    "Requested nodes are busy",
    "Required node not available",
    "Requested node configuration is not available",
)
Submit = Callable[[str, Sequence[Restartable], Resources, str | None], list[str]]
"""(name, units, resources, dependency) -> a job id for each unit: one job, or one array of several."""


def in_queue(runs: Sequence[Path]) -> list[queue.Unit]:
    """The units of the runs that are in SLURM's queue and can still run. UserError and NoAnswer as of `ask`.

    Those whose needs are neither there nor complete are cancelled, as SLURM is about to do.
    """
    there = queue.live_units([run for run in runs if queue.on_cluster(run)])
    able: list[queue.Unit] = []
    for unit in there:  # what a unit needs comes before it
        if all(need.done or need in able for need in unit.needs):
            able.append(unit)
    if stuck := [str(unit.job) for unit in there if unit not in able]:
        queue.scancel(stuck)
    return able


def submit(plans: Sequence[Plan], resources: Resources, send: Submit, jobs: dict[Path, str]) -> None:
    """Give `send` all that is neither complete nor in `jobs`, each unit after those that it needs.

    `jobs` has the jobs of the units that are in the queue, by their markers; those of new ones are added.
    """
    spawns = resources.tasks_per_node == 1 and resources.gpus_per_node > 1
    needed: dict[Path, list[Path]] = {}
    missing: list[Unit] = []
    for pieces in (units(plan, spawns) for plan in plans):
        missing += [unit for unit in pieces if unit.marker not in jobs and not unit.marker.exists()]
        needed |= {unit.marker: [each.marker for each in needs(unit, pieces)] for unit in pieces}
    groups: dict[tuple[int, int], list[Unit]] = defaultdict(list)
    for unit in _in_places(missing, needed):
        groups[_KINDS.index(unit.kind), unit.index].append(unit)
    for (kind, index), group in sorted(groups.items()):
        name = ("alma-untrained", f"alma-stage{index}", f"alma-evaluate{index}")[kind]
        each = resources if _KINDS[kind] == "train" else resources.alone()
        waits = [[jobs[marker] for marker in needed[unit.marker] if marker in jobs] for unit in group]
        for array, dependency in _arrays(group, waits):
            ids = send(name, array, each, dependency)
            jobs.update(zip((unit.marker for unit in array), ids, strict=True))


def _in_places(missing: Sequence[Unit], needed: Mapping[Path, Sequence[Path]]) -> list[Unit]:
    """The units in the order that they have in arrays: so that an element follows that in its own place.

    First those with the longest chain of trainings after them; of these, models that are evaluated alone.
    """
    following: dict[Path, int] = {}
    for unit in reversed(missing):
        if unit.kind == "train":
            following |= dict.fromkeys(needed[unit.marker], 1 + following.get(unit.marker, 0))
    return sorted(missing, key=lambda unit: (-following.get(unit.marker, 0), len(unit.spec.models)))


def _arrays(group: Sequence[Unit], waits: Sequence[Sequence[str]]) -> Iterator[tuple[list[Unit], str | None]]:
    """A group as arrays and single jobs, each with its dependency; `waits`: the jobs that each unit needs."""
    free: list[Unit] = []
    corresponding: dict[tuple[str, ...], dict[int, tuple[Unit, str]]] = defaultdict(dict)
    for unit, jobs in zip(group, waits, strict=True):
        arrays = tuple(job.partition("_")[0] for job in jobs)
        places = {job.partition("_")[2] for job in jobs}
        after = ":".join(("afterok", *jobs))
        if not jobs:
            free.append(unit)
        elif len(places) == 1 and places != {""} and len(set(arrays)) == len(arrays):
            corresponding[arrays][int(places.pop())] = unit, after
        else:
            yield [unit], after
    if free:
        yield free, None
    for arrays, placed in corresponding.items():
        same = next(place for place in itertools.count() if place not in placed)
        if same > 1:
            yield [placed.pop(place)[0] for place in range(same)], ":".join(("aftercorr", *arrays))
        for unit, after in placed.values():
            yield [unit], after


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


def record(
    plans: Sequence[Plan], jobs: Mapping[Path, str], folder: Path, before: Sequence[queue.Unit] = ()
) -> None:
    """Write each run's jobs.json, which slurm.status and slurm.cancel read.

    `before`: units that were in the queue already; those that the plans no longer have stay recorded.
    """
    logs = {marker: job_log(folder, job) for marker, job in jobs.items()}
    logs |= {unit.marker: str(unit.log) for unit in before}
    for plan in plans:
        pieces = units(plan)
        needed = {unit.marker: [each.marker for each in needs(unit, pieces)] for unit in pieces}
        old = [unit for unit in before if unit.run == plan.out and unit.marker not in needed]
        needed |= {unit.marker: [each.marker for each in unit.needs] for unit in old}
        places = {marker: place for place, marker in enumerate(needed)}
        both: list[Unit | queue.Unit] = [*pieces, *old]
        entries = [
            {
                "name": unit.name,
                "kind": unit.kind,
                "directory": os.path.relpath(unit.directory, plan.out),
                "marker": os.path.relpath(unit.marker, plan.out),
                "updates": plan.max_update if unit.kind == "train" else None,
                "job": jobs.get(unit.marker),
                "log": logs.get(unit.marker),
                "needs": [places[marker] for marker in needed[unit.marker] if marker in places],
            }
            for unit in both
        ]
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
        # A full, drained or reserved cluster fails this test, but takes jobs for later.
        if answer.returncode and not any(reason in answer.stderr for reason in _LATER):
            raise UserError(f"sbatch would refuse the {name}: {' '.join(answer.stderr.split())}")
