"""Submitted jobs: RUN/jobs.json, and the state of each job from its marker and from SLURM."""

import os
import pwd
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from alma.errors import UserError
from alma.files import read_file, walk
from slurm.engine.children import last_problem
from slurm.engine.squeue import JobState, NoAnswer, ask
from slurm.engine.terminal import say

JOBS = "jobs.json"
UNKNOWN_MARKER = ".unknown"
LOGS = (
    "slurm_jobs"  # folder beside the runs: scripts and logs of each launch, in a folder of its own
)
PREFIX = "alma-"  # prefix of the names of jobs in SLURM
MOVING = ("waiting", "queued", "requeued", "running")
NEVER = "never submitted"
BAD = ("failed", "cancelled", "lost", NEVER, "stopped")
"""States from which a job does not recover by itself, the most informative first."""
_CHILD_LOGS = {
    "untrained": "untrained.log",
    "train": "train.log",
    "evaluate": "eval.log",
    "late": "late.log",
}
_BY_SLURM = re.compile(
    r"^(?:srun|slurmstepd\S*|\S*slurm_script): (?:error: |fatal: )?(.+)", re.MULTILINE
)
"""Pattern of SLURM's errors about a task; used only if the task's own processes report none."""
_CONSEQUENCE = re.compile(r"Exited with|Terminat|Killed|\*\*\*|Job step aborted")
"""Pattern of errors that are only consequences of a failure in another process."""
_FIRST_PAUSE = 0.3  # seconds from the first look at the queue to the second
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"
_Text = Annotated[str, msgspec.Meta(pattern=_PRINTABLE)]
_JobId = Annotated[str, msgspec.Meta(pattern=r"\A\d+(_\d+)?\Z")]
"""Type of a job id. Any other text might be taken for an option of scancel."""


class DamagedJobs(UserError):
    """jobs.json of a run cannot be read; a launch writes it anew."""


class SubmittedJob(msgspec.Struct, kw_only=True, eq=False):
    """A job as jobs.json records it; paths of markers are relative to the run."""

    run: Path = Path()
    name: _Text
    kind: _Text  # untrained, train, evaluate, late, sweep, data_prep; run: a whole local run
    marker: Path  # exists once the job is complete
    updates: Annotated[int, msgspec.Meta(ge=0)] | None = None  # total updates of a training
    job_id: _JobId | None = msgspec.field(default=None, name="job")
    """Id in SLURM, such as 7 or 7_1; None: complete at launch, or sbatch refused it."""
    log: Path | None = None  # output of the SLURM job
    needs: tuple[Path, ...] = ()  # markers of the jobs, also of other runs, that it waits for

    @property
    def done(self) -> bool:
        return is_there(self.marker)

    @property
    def own_log(self) -> Path | None:
        """Output of its child processes over all its SLURM jobs; None: only `log` exists."""
        if self.kind == "sweep":
            return self.marker.with_suffix(".log")
        return self.marker.with_name(_CHILD_LOGS[self.kind]) if self.kind in _CHILD_LOGS else None


@dataclass(frozen=True)
class JobStatus:
    """State of a submitted job, or of a local run."""

    job: SubmittedJob
    state: str  # one of MOVING, "done" or one of BAD
    node: str = ""
    why: str = ""  # the error, or what a queued job waits for
    log: Path | None = None  # with that error, if any
    root: "JobStatus | None" = None  # the failed job that cancelled this one
    held: bool = False  # whether SLURM starts it only once somebody releases it

    def __str__(self) -> str:
        job = self.job
        where = f" on {self.node}" if self.node and self.state == "running" else ""
        why = f": {self.why}" if self.why else ""
        log = f"; log: {self.log}" if self.log else ""
        return f"{job.run}: {job.name} (job id {job.job_id or '-'}) {self.state}{where}{why}{log}"


def find(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Run directories at or below `places`, also along links, without duplicates.

    UserError: a place has none.
    """
    runs: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"{place} is not a folder: give run directories, or folders of runs")
        below = []
        for folder, _, files in walk(place):
            if {JOBS, "run.json"} & set(files):
                below.append(Path(folder))
        if not below:
            raise UserError(f"no runs in {place}: no folder in it has a jobs.json or a run.json")
        # A sweep's jobs already cover its runs, which are folders below it.
        launched = set(filter(on_cluster, below))
        below = [folder for folder in below if folder in launched or folder.parent not in launched]
        runs |= {folder.resolve(): folder for folder in sorted(below)}
    return list(runs.values())


def is_there(marker: Path) -> bool:
    """Whether a marker exists.

    Lists its folder, because NFS caches for a minute that a file is missing.
    """
    try:
        return marker.name in os.listdir(marker.parent)
    except OSError:
        return False


def on_cluster(run: Path) -> bool:
    """Whether the run was launched on a cluster."""
    return (run / JOBS).exists()


def read_jobs(run: Path) -> list[SubmittedJob]:
    """The jobs of a run. Raises UserError if jobs.json is missing or damaged."""

    def path_in(kind: type, text: Any) -> Path:
        if not isinstance(text, str) or not text or not re.match(_PRINTABLE, text):
            raise ValueError("expected a path")
        return run / text

    file = run / JOBS
    try:
        content = msgspec.json.decode(
            read_file(file), type=dict[str, list[SubmittedJob]], dec_hook=path_in
        )
        jobs = content["jobs"]
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run} was not launched on a cluster: it has no jobs.json") from None
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise DamagedJobs(
            f"{file} is damaged ({problem}): rerun the launch command to rewrite it"
        ) from None
    for job in jobs:
        job.run = run
    return jobs


def live_jobs(runs: Sequence[Path]) -> list[SubmittedJob]:
    """Incomplete jobs of `runs` that SLURM has queued or running. Raises as `ask` does."""
    return _live(runs)[0]


def strangers(runs: Sequence[Path]) -> dict[str, JobState]:
    """Jobs in the queue, by id, that jobs.json of a run names but that do not belong to the run.

    That happens if jobs.json was copied from elsewhere, or if SLURM has reused an id.
    """
    return _live(runs)[1]


def _live(runs: Sequence[Path]) -> tuple[list[SubmittedJob], dict[str, JobState]]:
    jobs: list[SubmittedJob] = []
    damaged: list[Path] = []
    for run in runs:
        try:
            jobs += [job for job in read_jobs(run) if job.job_id and not job.done]
        except DamagedJobs:
            damaged.append(run)
    states = ask([str(job.job_id) for job in jobs])
    of_runs = _unrecorded(damaged, set(states))
    strange: dict[str, JobState] = {}
    for job in jobs:
        state = states.get(str(job.job_id))
        if state is None or not state.live:
            continue
        if _is_of_run(state, job.run):
            of_runs.append(job)
        else:
            strange[str(job.job_id)] = state
    return of_runs, strange


def _unrecorded(runs: Sequence[Path], recorded: Collection[str]) -> list[SubmittedJob]:
    """Live jobs of runs whose jobs.json is damaged, by the folder of their scripts.

    recorded: ids of jobs that other runs name.
    """
    if not runs:
        return []
    of_runs: list[SubmittedJob] = []
    for job_id, state in ask().items():
        if job_id in recorded or not state.live or not state.script.startswith("/"):
            continue
        for run in runs:
            if _is_of_run(state, run):
                # Its marker is not known; no job has this one.
                marker = run / UNKNOWN_MARKER / job_id
                job = SubmittedJob(name=state.name, kind="run", marker=marker, job_id=job_id)
                job.run = run
                of_runs.append(job)
                break
    return of_runs


def _is_of_run(state: JobState, run: Path) -> bool:
    """Whether this user submitted a job for `run`: by its name, and by the folder of its script."""
    if state.user != pwd.getpwuid(os.getuid()).pw_name or not state.name.startswith(PREFIX):
        return False
    if not state.script.startswith("/"):  # submitted from standard input: there is no folder
        return True
    launches = Path(state.script).parent.parent
    return launches.name == LOGS and run.resolve().is_relative_to(launches.parent)


def look(runs: Sequence[Path]) -> list[JobStatus]:
    """Status of all jobs, in the order of jobs.json. Raises as `ask` does."""
    jobs = [job for run in runs for job in read_jobs(run)]
    states = ask([job.job_id for job in jobs if job.job_id and not job.done])
    seen: dict[Path, JobStatus] = {}
    for job in jobs:
        needs = [seen[marker] for marker in job.needs if marker in seen]
        # `_judge` checks the marker again: a job that SLURM reports as ended may just have
        # written it.
        seen[job.marker] = _judge(job, states.get(job.job_id or ""), needs)
    return list(seen.values())


def watch(runs: Sequence[Path], seconds: float, patient: bool = False) -> Iterator[list[JobStatus]]:
    """Yield `look(runs)` until all are done or none is moving: every `seconds`, first more often.

    Retries while SLURM does not answer. Unless `patient`, raises NoAnswer if it does not answer at
    the first time.
    """
    still = False
    silent = False
    pause = min(seconds, _FIRST_PAUSE)  # short jobs are seen to end at once
    while True:
        try:
            seen = look(runs)
        except NoAnswer as error:
            if not patient:
                raise
            if not silent:
                say(f"warning: {error}; asking again")
            silent = True
        else:
            patient = True
            silent = False
            yield seen
            # Stop only after two looks without a moving job: between a node's failure and the
            # requeue, SLURM reports the job as failed.
            was_still = still
            still = not any(status.state in MOVING for status in seen)
            if all(status.state == "done" for status in seen) or (was_still and still):
                return
        time.sleep(seconds if still or silent else pause)
        pause = min(seconds, 1.5 * pause)


def wait(runs: Sequence[Path], seconds: float = 5.0) -> list[JobStatus]:
    """Wait until all jobs are done or none is moving; print changes and return the BAD ones."""
    before: dict[Path, JobStatus] = {}
    seen: list[JobStatus] = []
    # Patient: the jobs are submitted, so a silent SLURM must not end the wait.
    for seen in watch(runs, seconds, patient=True):
        if not before:
            say(f"jobs: {count(seen)}")
        for status in seen:
            if _is_news(status, before.get(status.job.marker)):
                say(str(status))
            before[status.job.marker] = status
    return [status for status in seen if status.state in BAD]


def _is_news(status: JobStatus, last: JobStatus | None) -> bool:
    """Whether a job's state has changed since the `last` look.

    At the first look (None), only a job that SLURM holds is news.
    """
    if last is None:
        return status.held
    return (status.state, status.held) != (last.state, last.held)


def count(seen: Iterable[JobStatus]) -> str:
    """Such as "2 done, 1 running, 1 failed"."""
    counts = Counter(status.state for status in seen)
    states = ("done", *reversed(MOVING), *BAD)
    return ", ".join(f"{counts[state]} {state}" for state in states if counts[state])


def tail(log: Path) -> str:
    """The last 256 KiB of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 256 * 1024))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _judge(job: SubmittedJob, state: JobState | None, needs: Sequence[JobStatus]) -> JobStatus:
    """The status of a job from its marker, SLURM's `state` and the status of the jobs it needs.

    `state` is None if SLURM does not know the job.
    """
    if job.done:
        return JobStatus(job, "done", state.node if state else "")
    if job.job_id is None:
        return JobStatus(job, NEVER)
    if state and state.running:
        return JobStatus(job, "running", state.node)
    if state and not state.live and state.word != "CANCELLED":
        # Such as TIMEOUT or OUT_OF_MEMORY: SLURM's word is the cause, errors in the log follow.
        if state.word not in ("FAILED", "COMPLETED"):
            return JobStatus(job, "failed", state.node, f"SLURM says {state.word}", job.log)
        why, log = _last_error(job)
        why = why or f"its job ended without {job.marker.name}"
        return JobStatus(job, "failed", state.node, why, log)
    roots = [need.root or need for need in needs if need.state in BAD]
    if roots:
        root = min(roots, key=_order_of_blame)
        return JobStatus(job, "cancelled", why=f"needs {root.job.name} ({root.state})", root=root)
    if state is None:
        why, log = _last_error(job)
        reasons = ("no longer known to SLURM", why)
        return JobStatus(job, "lost", "", "; ".join(filter(None, reasons)), log)
    if not state.live:
        return JobStatus(job, "cancelled", state.node)
    return _queued(job, state, needs)


def _order_of_blame(status: JobStatus) -> int:
    """Sort key of the jobs that may have cancelled another one: failed before cancelled ones."""
    return BAD.index(status.state)


def _queued(job: SubmittedJob, state: JobState, needs: Sequence[JobStatus]) -> JobStatus:
    """Status of a job that has not started."""
    for need in needs:
        if need.state != "done":
            return JobStatus(job, "waiting", why=f"needs {need.job.name}")
    why = state.reason
    held = "held" in state.reason.lower()  # such as JobHeldUser, or: launch failed requeued held
    if held:
        why += f": release it with: scontrol release {job.job_id}"
    return JobStatus(job, "requeued" if state.restarts else "queued", why=why, held=held)


def _last_error(job: SubmittedJob) -> tuple[str, Path | None]:
    """The last error in a job's logs, and its log."""
    # Look at the logs of the SLURM job's processes first, since `own_log` also has errors of
    # earlier attempts. When a process fails, SLURM ends the others, so only its log says why.
    process_logs = sorted(job.log.parent.glob(f"{job.job_id}_*_log.out")) if job.log else []
    for log in filter(None, (job.log, *process_logs, job.own_log)):
        lines = [line for line in tail(log).splitlines() if not _BY_SLURM.match(line)]
        problem = last_problem("\n".join(lines))
        if problem:
            return problem[1], log
    # Perhaps none of the processes started: then only SLURM's own error is in the log.
    by_slurm = _BY_SLURM.findall(tail(job.log)) if job.log else []
    causes = [line for line in by_slurm if not _CONSEQUENCE.search(line)]
    return (causes or by_slurm or [""])[-1], job.log
