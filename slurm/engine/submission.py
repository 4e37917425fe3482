"""Submission: all missing jobs go to SLURM at once, each depending on exactly the jobs it `needs`.

Jobs with the same `array` become array jobs, each with one dependency: none, or `aftercorr` on earlier arrays
where each element needs the elements at its own index. Any other job is submitted alone, with `afterok`. A
permanent failure cancels its dependents only (kill-on-invalid-dep).
"""

import contextlib
import io
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from alma.errors import UserError
from alma.files import write_json_atomic
from slurm.engine import queue
from slurm.engine.jobs import Job
from slurm.engine.queue import LOGS, JobStatus, SubmittedJob
from slurm.engine.resources import Resources
from slurm.engine.squeue import call, clean_environment, largest_array, scancel
from slurm.engine.terminal import say

_PYTHON = f"{shlex.quote(sys.executable)} -P"  # without modules of the current folder, such as a slurm.py
_TRANSIENT = ("nodes are busy", "node not available", "node configuration is not available")
Submit = Callable[[str, Sequence[Job], Resources, str | None], list[str]]
"""(name, jobs, resources, dependency) -> the id of each job: one SLURM job, or one array of several."""


def in_queue(runs: Sequence[Path]) -> list[SubmittedJob]:
    """Jobs of `runs` that SLURM has and that can still run. Raises UserError and NoAnswer as `ask` does.

    Cancels those that need a job of these runs which is neither complete nor queued: SLURM might start them.
    """
    live = {job.marker.resolve(): job for job in queue.live_jobs(list(filter(queue.on_cluster, runs)))}
    folders, stuck = [run.resolve() for run in runs], []

    def lacks(need: Path) -> bool:
        return need not in live and any(map(need.is_relative_to, folders)) and not queue.is_there(need)

    while found := [job for job in live.values() if any(lacks(need.resolve()) for need in job.needs)]:
        stuck += [str(live.pop(job.marker.resolve()).job_id) for job in found]
    if stuck:
        scancel(stuck)
    return list(live.values())


def launch(jobs: Sequence[Job], wanted: Resources, folder: Path, busy: Sequence[SubmittedJob]) -> None:
    """Submit the jobs that are neither complete nor `busy`, logging to `folder`; write their jobs.json."""
    if busy:
        say(f"{len(busy)} jobs are already in the queue, among them {busy[0].run} {busy[0].name}")
    ids = {job.marker: str(job.job_id) for job in busy}

    def write(about: Sequence[Job]) -> None:
        for run in dict.fromkeys(job.run for job in about):
            record(run, [job for job in jobs if job.run == run], ids, folder, busy)

    try:  # after each submission, so that a kill loses none
        submit(jobs, wanted, to_slurm(folder), ids, write)
    except UserError as error:
        done = f"{len(ids) - len(busy)} jobs are submitted"
        raise UserError(f"{error}; {done}; rerun the command to submit the rest") from error
    finally:
        write(jobs)
    new = len(ids) - len(busy)
    say(f"{new} jobs submitted" + (f"; their logs: {folder}" if new else ""))


def follow(runs: Sequence[Path], wait: bool) -> list[JobStatus]:
    """Wait for the end of all jobs and return those that failed; without `wait`, print how to see them."""
    if wait:
        return queue.wait(runs)
    print("see their state with:", shlex.join(["alma", "status", *map(str, runs)]))
    return []


def submit(
    jobs: Sequence[Job],
    resources: Resources,
    send: Submit,
    ids: dict[Path, str],
    sent: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> None:
    """Submit, in the given order of arrays, all `jobs` that are neither complete nor in `ids`.

    jobs: each after the jobs it needs. ids: ids of queued jobs by marker; those of new jobs are added.
    sent: called with the jobs of each submission when their ids are known.
    """
    missing = [job for job in jobs if job.marker not in ids and not job.done]
    largest = largest_array()  # that follow others are no longer than these
    followers: dict[Path, int] = defaultdict(int)  # length of the chain of jobs that wait for a marker
    for job in reversed(missing):
        for marker in job.needs:
            followers[marker] = max(followers[marker], 1 + followers[job.marker])
    groups: dict[str, list[Job]] = {job.array: [] for job in missing}
    for job in sorted(missing, key=lambda job: -followers[job.marker]):  # long runs keep their index
        groups[job.array].append(job)
    for name, group in groups.items():
        for elements, dependency in _arrays(group, ids):
            wanted = resources.alone() if group[0].alone else resources
            for part in (elements[start : start + largest] for start in range(0, len(elements), largest)):
                new = send(name, part, wanted, dependency)
                ids.update(zip((job.marker for job in part), new, strict=True))
                sent(part)


def _arrays(group: Sequence[Job], ids: Mapping[Path, str]) -> Iterator[tuple[list[Job], str | None]]:
    """Split a group into arrays and single jobs, each with its dependency."""
    arrays: dict[tuple[str, ...], list[Job]] = defaultdict(list)  # by the arrays that they follow
    needs = {job.marker: [ids[marker] for marker in job.needs if marker in ids] for job in group}
    for job in group:
        needed = [job_id.partition("_") for job_id in needs[job.marker]]
        followed = tuple(array for array, _, _ in needed)
        if all(index == str(len(arrays[followed])) for _, _, index in needed):
            arrays[followed].append(job)
        else:
            yield [job], ":".join(("afterok", *needs[job.marker]))
    for followed, jobs in arrays.items():
        if followed and len(jobs) == 1:
            yield jobs, ":".join(("afterok", *needs[jobs[0].marker]))
        elif jobs:
            yield jobs, ":".join(("aftercorr", *followed)) if followed else None


def to_slurm(folder: Path, remedy: str = "--dry-run shows its input") -> Submit:
    """Submit with submitit; its files and logs go to `folder`. Raises UserError if SLURM refuses."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    def send(name: str, jobs: Sequence[Job], resources: Resources, dependency: str | None) -> list[str]:
        try:
            executor = SlurmExecutor(folder / "%j", max_num_timeout=10, python=_PYTHON)
            executor.update_parameters(**resources.parameters(name, dependency))
            # A job starts with the environment of sbatch. On errors submitit prints what it raises.
            with clean_environment(), contextlib.redirect_stderr(io.StringIO()):
                return [str(sent.job_id) for sent in executor.submit_array(jobs)]
        except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"sbatch refused {name}: {reason}; {remedy}") from error

    return send


def dry_run(jobs: Sequence[Job], resources: Resources, folder: Path) -> tuple[list[str], str]:
    """Submit nothing; return the input of sbatch for each single job or array, and the totals in words."""
    texts: list[str] = []
    gpu_hours: list[float] = []  # of each job

    def send(name: str, group: Sequence[Job], wanted: Resources, dependency: str | None) -> list[str]:
        number, several = f"<{len(texts) + 1}>", len(group) > 1
        command = f"{_PYTHON} -u -m submitit.core._submit {shlex.quote(f'{folder}/%j')}"
        text = wanted.script(command, folder / "%j", name, dependency, len(group) if several else None)
        texts.append(f"# {number} {', '.join(map(str, group))}\n{text}")
        gpu_hours.extend([wanted.nodes * wanted.gpus_per_node * wanted.timeout_min / 60] * len(group))
        return [f"{number}_{index}" for index in range(len(group))] if several else [number]

    submit(jobs, resources, send, {})
    count = f"{len(texts)} submissions with {len(gpu_hours)} jobs"
    requested = f"{sum(gpu_hours):,.0f} GPU-hours requested, before requeues (jobs x GPUs x --timeout-min)"
    return texts, f"{count}, {requested}"


def record(
    run: Path, jobs: Sequence[Job], ids: Mapping[Path, str], folder: Path, before: Sequence[SubmittedJob] = ()
) -> None:
    """Write the run's jobs.json, whose entries are as `SubmittedJob`, each after the jobs it needs.

    ids: by marker. folder: logs of the new jobs. before: jobs that were already queued; they keep their logs,
    and stay recorded even if `jobs` no longer has them.
    """
    # As submitit names the output of a job's first task.
    logs = {marker: os.path.abspath(folder / job / f"{job}_0_log.out") for marker, job in ids.items()}
    logs |= {job.marker: str(job.log) for job in before}
    listed: dict[Path, Job | SubmittedJob] = {job.marker: job for job in jobs}
    for queued in before:
        if queued.run == run:
            listed.setdefault(queued.marker, queued)
    entries = [
        {
            "name": job.name,
            "kind": job.kind,
            "marker": os.path.relpath(job.marker, run),
            "updates": job.updates,
            "job": ids.get(job.marker),
            "log": logs.get(job.marker),
            "needs": [os.path.relpath(marker, run) for marker in job.needs],
        }
        for job in listed.values()
    ]
    write_json_atomic(run / queue.JOBS, {"jobs": entries})


def log_folder(place: Path) -> Path:
    """A new folder for each launch: SLURM reuses job ids, and submitit would find old results."""
    return place / LOGS / time.strftime("%Y%m%d-%H%M%S")


def check(resources: Resources) -> None:
    """Raise UserError if sbatch would refuse a training with these resources, or its evaluation."""
    for name, wanted in (("training", resources), ("evaluation", resources.alone())):
        script = wanted.script("true", Path(LOGS), name)
        answer = call("sbatch", "--test-only", text=script)
        # A full, drained or reserved cluster fails the test but accepts jobs for later.
        if answer.returncode and not any(reason in answer.stderr for reason in _TRANSIENT):
            raise UserError(f"sbatch would refuse the {name}: {' '.join(answer.stderr.split())}")
