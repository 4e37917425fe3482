"""Submission: all missing jobs go to SLURM at once, each depending on exactly the jobs it `needs`.

Jobs with the same `array` become array jobs, each with one dependency: none, or `aftercorr` on
earlier arrays where each element needs the elements at its own index. Any other job is submitted
alone, with `afterok`. A permanent failure cancels its dependents only (kill-on-invalid-dep).
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
from slurm.engine import children, queue
from slurm.engine.jobs import Job, shielded
from slurm.engine.partitions import all_in_service
from slurm.engine.queue import LOGS, JobStatus, SubmittedJob
from slurm.engine.resources import Resources
from slurm.engine.squeue import ask, call, clean_environment, largest_array, scancel
from slurm.engine.terminal import say

_PYTHON = shielded(f"{shlex.quote(sys.executable)} -P")
"""Python command of a job; -P ignores modules in the current folder, such as a slurm.py."""
_FULL = ("SubmitJob", "Resource temporarily unavailable")
"""In what sbatch says at a limit of jobs in the queue, such as AssocMaxSubmitJobLimit of a user,
QOSGrpSubmitJobsLimit of a group, or MaxJobCount of the cluster."""
_FULL_SECONDS = 30.0  # most, until the next try when other jobs of the user fill the queue
_FIRST_FULL_SECONDS = 1.0  # a job that is just ending still counts
_TRANSIENT = ("nodes are busy", "node not available", *_FULL)
_NO_NODE = "node configuration is not available"
Submit = Callable[[str, Sequence[Job], Resources, str | None], list[str]]
"""A function (name, jobs, resources, dependency) -> ids of the jobs, that submits a job, or several
jobs as an array."""


class QueueIsFull(UserError):
    """SLURM takes no more jobs of this user until some of those in the queue have ended."""


class FullQueue:
    """Decides whether to wait for room in a full queue; one object for each try to submit."""

    def __init__(self) -> None:
        self._was_empty = False
        self._pause = _FIRST_FULL_SECONDS

    def check(self, error: QueueIsFull) -> None:
        """Say that the rest waits. UserError: twice no job of this user was in the queue, so that
        SLURM's limit allows no job."""
        refusal = error.args[0].partition(";")[0]
        is_empty = not any(state.live for state in ask().values())
        if is_empty and self._was_empty:  # at the first time the last job may just have ended
            problem = "no job of yours is in the queue, so waiting does not help"
            raise UserError(f"{refusal}; {problem}: ask who set this limit") from error
        self._was_empty = is_empty
        say(f"{refusal}; submits the rest when jobs have ended")

    def wait(self) -> None:
        """Sleep, each time longer, while other jobs are in the queue."""
        if not self._was_empty:
            time.sleep(min(self._pause, _FULL_SECONDS))
            self._pause *= 2


def in_queue(runs: Sequence[Path]) -> list[SubmittedJob]:
    """Jobs of `runs` in SLURM's queue that can still run. Raises as `ask` does.

    Cancels queued jobs that need another job of these runs which is neither complete nor queued,
    because SLURM might start them too early.
    """
    launched = list(filter(queue.on_cluster, runs))
    live = {job.marker.resolve(): job for job in queue.live_jobs(launched)}
    folders = [run.resolve() for run in runs]
    stuck: list[str] = []
    unknown = [job for job in live.values() if job.marker.parent.name == queue.UNKNOWN_MARKER]
    if unknown:
        ids = ", ".join(str(job.job_id) for job in unknown)
        run = unknown[0].run
        problem = f"{run / queue.JOBS} is damaged, and jobs of this run are in the queue ({ids})"
        cancel = shlex.join(["alma", "cancel", str(run)])
        raise UserError(f"{problem}: wait for their end, or cancel them with: {cancel}")

    def is_stuck(job: SubmittedJob) -> bool:
        """Whether it needs a job of these runs that is neither complete nor live."""
        for need in job.needs:
            marker = need.resolve()
            of_these_runs = any(map(marker.is_relative_to, folders))
            if of_these_runs and marker not in live and not queue.is_there(marker):
                return True
        return False

    while stuck_jobs := list(filter(is_stuck, live.values())):
        for job in stuck_jobs:
            del live[job.marker.resolve()]
            stuck.append(str(job.job_id))
    if stuck:
        scancel(stuck)
    return list(live.values())


def launch(
    jobs: Sequence[Job], job_resources: Resources, folder: Path, busy: Sequence[SubmittedJob]
) -> None:
    """Submit the jobs that are neither complete nor `busy`; write the jobs.json of their runs.

    folder: where to write scripts and logs. busy: jobs that are already in the queue. UserError:
    SLURM refuses; QueueIsFull: only because of its limit of jobs.
    """
    if busy:
        say(f"{len(busy)} jobs are already in the queue, among them {busy[0].run} {busy[0].name}")
    ids = {job.marker: str(job.job_id) for job in busy}

    def write(about: Sequence[Job]) -> None:
        for run in dict.fromkeys(job.run for job in about):
            record(run, [job for job in jobs if job.run == run], ids, folder, busy)

    try:  # `submit` calls `write` after each submission, so that a kill loses no job
        submit(jobs, job_resources, to_slurm(folder), ids, write)
    except UserError as error:
        done = f"{len(ids) - len(busy)} jobs are submitted"
        problem = f"{error}; {done}; rerun the command to submit the rest"
        if isinstance(error, QueueIsFull):
            raise QueueIsFull(f"{problem}, or give --wait") from error
        raise UserError(problem) from error
    finally:
        write(jobs)
    new = len(ids) - len(busy)
    logs = f"; their logs: {folder}" if new else ""
    say(f"{new} jobs submitted{logs}")


def submit_all(start: Callable[[], None], runs: Sequence[Path], wait: bool) -> None:
    """Call `start`, which submits the jobs of `runs` that are missing.

    With `wait`, the jobs in a full queue are followed to their end, then the rest is submitted.
    StageFailed: a job has failed meanwhile. QueueIsFull: the queue is full, without `wait`.
    UserError: the limit allows no job.
    """
    full_queue = FullQueue()
    while True:
        try:
            start()
            return
        except QueueIsFull as error:
            if not wait:
                raise
            full_queue.check(error)
        if queue.live_jobs(runs):
            problems = [job for job in queue.wait(runs) if job.state != queue.NEVER]
            if problems:
                raise children.StageFailed("; ".join(map(str, problems)))
        else:
            full_queue.wait()


def follow(runs: Sequence[Path], wait: bool) -> list[JobStatus]:
    """With `wait`, wait for the end of all jobs and return those that failed.

    Else print how to see their state, and return none.
    """
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

    jobs: each after the jobs it needs. ids: ids of queued jobs by marker; those of new jobs are
    added. sent: called with the jobs of each submission when their ids are known.
    """
    missing = [job for job in jobs if job.marker not in ids and not job.done]
    largest = largest_array()  # most elements; an array that follows others is no longer than these
    followers: dict[Path, int] = defaultdict(int)
    """Length of the chain of jobs that wait for a marker."""
    for job in reversed(missing):
        for marker in job.needs:
            followers[marker] = max(followers[marker], 1 + followers[job.marker])
    groups: dict[str, list[Job]] = {job.array: [] for job in missing}
    # Runs with many stages come first, so that their jobs have the same index in all arrays.
    for job in sorted(missing, key=lambda job: -followers[job.marker]):
        groups[job.array].append(job)
    for name, group in groups.items():
        job_resources = resources.alone() if group[0].alone else resources
        arrays: list[tuple[list[Job], str | None]] = []
        for elements, dependency in _arrays(group, ids):
            for start in range(0, len(elements), largest):
                arrays.append((elements[start : start + largest], dependency))
        while arrays:
            part, dependency = arrays.pop(0)
            try:
                part_ids = send(name, part, job_resources, dependency)
            except QueueIsFull:
                if len(part) == 1:
                    raise
                # SLURM takes an array as a whole or not at all; a smaller one may still fit.
                half = len(part) // 2
                arrays = [*_arrays(part[:half], ids), *_arrays(part[half:], ids), *arrays]
                continue
            ids.update(zip((job.marker for job in part), part_ids, strict=True))
            sent(part)


def _arrays(
    group: Sequence[Job], ids: Mapping[Path, str]
) -> Iterator[tuple[list[Job], str | None]]:
    """Split a group into arrays and single jobs, each with its dependency."""
    arrays: dict[tuple[str, ...], list[Job]] = defaultdict(list)  # by ids of the arrays they follow
    needs: dict[Path, list[str]] = {}  # marker of a job -> ids of the jobs for which it waits
    for job in group:
        needs[job.marker] = [ids[marker] for marker in job.needs if marker in ids]
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
    """Submit with submitit, with files and logs in `folder`. UserError: SLURM refuses."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    def send(
        name: str, jobs: Sequence[Job], resources: Resources, dependency: str | None
    ) -> list[str]:
        try:
            executor = SlurmExecutor(folder, max_num_timeout=10, python=_PYTHON)
            executor.update_parameters(**resources.parameters(name, dependency))
            # A job inherits the environment of sbatch. On errors submitit also prints what it
            # raises, hence the redirection.
            with clean_environment(), contextlib.redirect_stderr(io.StringIO()):
                return [str(sent.job_id) for sent in executor.submit_array(jobs)]
        except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            problem = f"sbatch refused {name}: {reason}; {remedy}"
            if any(words in reason for words in _FULL):
                raise QueueIsFull(problem) from error
            raise UserError(problem) from error

    return send


def dry_run(jobs: Sequence[Job], resources: Resources, folder: Path) -> tuple[list[str], str]:
    """Submit nothing; return the input of sbatch for each job or array, and the totals in words."""
    texts: list[str] = []
    gpu_hours: list[float] = []  # one number for each job

    def send(
        name: str, group: Sequence[Job], job_resources: Resources, dependency: str | None
    ) -> list[str]:
        number = f"<{len(texts) + 1}>"
        is_array = len(group) > 1
        command = f"{_PYTHON} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        count = len(group) if is_array else None
        text = job_resources.script(command, folder, name, dependency, count)
        texts.append(f"# {number} {', '.join(map(str, group))}\n{text}")
        gpus = job_resources.nodes * job_resources.gpus_per_node
        for _ in group:
            gpu_hours.append(gpus * job_resources.timeout_min / 60)
        return [f"{number}_{index}" for index in range(len(group))] if is_array else [number]

    submit(jobs, resources, send, {})
    count = f"{len(texts)} submissions with {len(gpu_hours)} jobs"
    hours = f"{sum(gpu_hours):,.0f} GPU-hours requested"
    return texts, f"{count}, {hours}, before requeues (jobs x GPUs x --timeout-min)"


def record(
    run: Path,
    jobs: Sequence[Job],
    ids: Mapping[Path, str],
    folder: Path,
    before: Sequence[SubmittedJob] = (),
) -> None:
    """Write the run's jobs.json, whose entries are as `SubmittedJob`, each after the jobs it needs.

    ids: ids of jobs by marker. folder: where the logs of new jobs are. before: jobs that were
    already queued; they keep their logs, and stay recorded even if they are not in `jobs`.
    """
    # submitit's name for the output of a job's first task.
    logs = {marker: os.path.abspath(folder / f"{job}_0_log.out") for marker, job in ids.items()}
    logs |= {job.marker: str(job.log) for job in before}
    listed: dict[Path, Job | SubmittedJob] = {job.marker: job for job in jobs}
    for queued in before:
        if queued.run == run:
            listed.setdefault(queued.marker, queued)
    entries = []
    for job in listed.values():
        entry = {
            "name": job.name,
            "kind": job.kind,
            "marker": os.path.relpath(job.marker, run),
            "updates": job.updates,
            "job": ids.get(job.marker),
            "log": logs.get(job.marker),
            "needs": [os.path.relpath(marker, run) for marker in job.needs],
        }
        entries.append(entry)
    write_json_atomic(run / queue.JOBS, {"jobs": entries})


def log_folder(place: Path) -> Path:
    """A new folder for each launch: SLURM reuses job ids, and submitit would find old results.

    UserError: SLURM would read a character of its path as a pattern.
    """
    check_place(place)
    return place / LOGS / time.strftime("%Y%m%d-%H%M%S")


def check_place(place: Path) -> None:
    """Raise UserError for a path that SLURM cannot take for logs."""
    path = os.path.abspath(place)
    for character in "%\\\n":
        if character in path:
            problem = f"SLURM reads {character!r} in the path of a log as a pattern"
            raise UserError(f"{path!r}: {problem}: give --out a path without it")


def check(resources: Resources) -> None:
    """Raise UserError if sbatch would refuse a training with these resources, or its evaluation."""
    check_job("training", resources)
    check_job("evaluation", resources.alone())


def check_job(name: str, job_resources: Resources) -> None:
    """Raise UserError if sbatch would refuse a job with these resources; `name` is for people."""
    script = job_resources.script("true", Path(LOGS), name)
    answer = call("sbatch", "--test-only", text=script)
    if not answer.returncode:
        return
    # On a full, drained or reserved cluster the test fails, but sbatch accepts the job. At a limit
    # of jobs in the queue, `submit_all` says what to do.
    transient = any(reason in answer.stderr for reason in _TRANSIENT)
    if _NO_NODE in answer.stderr:  # said of nodes that are drained, and of those that do not exist
        transient = not all_in_service(job_resources.partition)
    if not transient:
        raise UserError(f"sbatch would refuse the {name}: {' '.join(answer.stderr.split())}")
