"""Submitted jobs: RUN/jobs.json, and the state of each job from its marker and from SLURM."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from tqdm import tqdm

from alma.errors import UserError
from alma.files import write_json_atomic
from alma.schema import NATURAL, TEXT, parse_json, require
from slurm.engine.children import last_problem
from slurm.engine.squeue import JobState, NoAnswer, ask
from slurm.engine.terminal import say

JOBS, VERSION = "jobs.json", 1
MOVING = ("waiting", "queued", "requeued", "running")
BAD = ("failed", "cancelled", "lost", "never submitted", "stopped")
"""States that a job does not leave by itself, the most telling first."""
_WHICH = {"failed": "which failed", "cancelled": "which was cancelled", "lost": "which is lost"}
_WHICH |= {"never submitted": "which was never submitted"}
_CHILD_LOGS = {"untrained": "untrained.log", "train": "train.log", "evaluate": "eval.log"}
_TAIL_BYTES = 256 * 1024
_JOB_ID = Annotated[str, Meta(pattern=r"^[0-9]+(_[0-9]+)?\Z")]
_JOB: dict[str, Any] = {
    "name": TEXT,
    "kind": TEXT,
    "directory": TEXT,
    "marker": TEXT,
    "updates": NATURAL | None,
}
_JOB |= {"job": _JOB_ID | None, "log": TEXT | None, "needs": list[NATURAL]}
_BY_SLURM = ("srun: ", "slurmstepd")  # lines that report the failure of a task but not its cause


@dataclass(frozen=True, eq=False)
class SubmittedJob:
    """A job as jobs.json records it."""

    run: Path
    name: str
    kind: str  # untrained, train, evaluate, sweep, data_prep; run: a whole local run
    directory: Path
    marker: Path
    """File that exists once the job is complete."""
    updates: int | None
    """Of a whole training."""
    job_id: str | None
    """In SLURM, such as 7 or 7_1; None: it was complete at launch, or sbatch refused it."""
    log: Path | None
    """Output of the SLURM job."""
    needs: tuple["SubmittedJob", ...]

    @property
    def done(self) -> bool:
        # Listed, not tested: NFS caches for up to a minute that a file does not exist.
        try:
            return self.marker.name in os.listdir(self.marker.parent)
        except OSError:
            return False

    @property
    def own_log(self) -> Path | None:
        """Output of its child processes over all its SLURM jobs; None: only `log` exists."""
        if self.kind == "sweep":
            return self.marker.with_suffix(".log")
        return self.directory / _CHILD_LOGS[self.kind] if self.kind in _CHILD_LOGS else None


@dataclass(frozen=True)
class JobStatus:
    """State of a submitted job, or of a local run."""

    job: SubmittedJob
    state: str  # one of MOVING, "done" or one of BAD
    node: str = ""
    why: str = ""
    """The error, or what a queued job waits for."""
    log: Path | None = None
    """File with that error, if any."""
    root: "JobStatus | None" = None
    """The failed job that cancelled this one."""
    held: bool = False
    """Whether SLURM starts it only once somebody releases it."""

    def __str__(self) -> str:
        job = self.job
        where = f" on {self.node}" if self.node and self.state == "running" else ""
        why = f": {self.why}" if self.why else ""
        log = f"; log: {self.log}" if self.log else ""
        return f"{job.run}: {job.name} (job id {job.job_id or '-'}) {self.state}{where}{why}{log}"


def find(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Run directories at or below `places`, without duplicates. Raises UserError if a place has none."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"{place} is not a folder: give run directories, or folders of runs")
        below = [Path(folder) for folder, _, files in os.walk(place) if {JOBS, "run.json"} & set(files)]
        if not below:
            raise UserError(f"no runs in {place}: no folder in it has a jobs.json or a run.json")
        launched = set(filter(on_cluster, below))
        # The jobs of a sweep stand for its runs, which are folders below it.
        below = [folder for folder in below if folder in launched or folder.parent not in launched]
        found |= {folder.resolve(): folder for folder in sorted(below)}
    return list(found.values())


def on_cluster(run: Path) -> bool:
    """Whether the run was launched on a cluster."""
    return (run / JOBS).exists()


def write_jobs(run: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write jobs.json; `entries` are jobs as `read_jobs` reads them, each after the jobs it needs."""
    write_json_atomic(run / JOBS, {"version": VERSION, "units": entries})


def read_jobs(run: Path) -> list[SubmittedJob]:
    """The jobs of a run. Raises UserError if jobs.json is missing or damaged."""
    path = run / JOBS
    jobs: list[SubmittedJob] = []
    try:
        content = parse_json(path.read_bytes())
        if content["version"] != VERSION:
            raise UserError(
                f"{path}: version {content['version']}, not {VERSION}: use the ALMA that wrote it"
            )
        for each in content["units"]:
            require(each, _JOB)
            if not all(0 <= index < len(jobs) for index in each["needs"]):
                raise ValueError(f"{each['name']} needs a job that does not come before it")
            jobs.append(
                SubmittedJob(
                    run=run,
                    name=each["name"],
                    kind=each["kind"],
                    directory=run / each["directory"],
                    marker=run / each["marker"],
                    updates=each["updates"],
                    job_id=each["job"],
                    log=Path(each["log"]) if each["log"] else None,
                    needs=tuple(jobs[index] for index in each["needs"]),
                )
            )
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run} was not launched on a cluster: it has no jobs.json") from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged ({problem}): rerun the launch command to rewrite it") from None
    return jobs


def live_jobs(runs: Sequence[Path]) -> list[SubmittedJob]:
    """Incomplete jobs that SLURM has queued or running. Raises UserError and NoAnswer as `ask` does."""
    ids = {job: job.job_id for run in runs for job in read_jobs(run) if job.job_id and not job.done}
    states = ask(list(ids.values()))
    return [job for job, job_id in ids.items() if job_id in states and states[job_id].live]


def look(runs: Sequence[Path]) -> list[JobStatus]:
    """Status of all jobs, in the order of jobs.json. Raises UserError and NoAnswer as `ask` does."""
    jobs = [job for run in runs for job in read_jobs(run)]
    states = ask([job.job_id for job in jobs if job.job_id and not job.done])
    seen: dict[SubmittedJob, JobStatus] = {}
    for job in jobs:
        # `_judge` rereads the marker: a job that SLURM reports as ended may just have written it.
        seen[job] = _judge(job, states.get(job.job_id or ""), [seen[need] for need in job.needs])
    return list(seen.values())


def watch(runs: Sequence[Path], seconds: float, patient: bool = False) -> Iterator[list[JobStatus]]:
    """Yield `look(runs)` every `seconds` until all jobs are done or none is moving.

    Retries while SLURM does not answer, for example during a restart of its controller. Without `patient`, a
    first look without an answer raises NoAnswer.
    """
    still = silent = False
    first = not patient
    while True:
        try:
            seen = look(runs)
        except NoAnswer as error:
            if first:
                raise
            if not silent:
                say(f"warning: {error}; asking again")
            silent = True
        else:
            first = silent = False
            yield seen
            # Two still looks: between a node's failure and its requeue, SLURM calls a job failed.
            before, still = still, not any(status.state in MOVING for status in seen)
            if all(status.state == "done" for status in seen) or (before and still):
                return
        time.sleep(seconds)


def wait(runs: Sequence[Path], seconds: float = 5.0) -> list[JobStatus]:
    """Wait until all jobs are done or none is moving; return those in a state of BAD.

    Shows a progress bar on a terminal, else a line for each change; held jobs are named on both.
    """
    states: dict[tuple[Path, str], str] = {}
    seen: list[JobStatus] = []
    form = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
    with tqdm(desc="jobs", total=0, bar_format=form, dynamic_ncols=True, disable=None) as bar:
        for seen in watch(runs, seconds):
            if bar.disable and not states:
                say(f"jobs: {count(seen)}")
            for status in seen:
                key, state = (status.job.run, status.job.name), "held" if status.held else status.state
                if states.get(key, status.state) != state and (bar.disable or status.held):
                    say(str(status))
                states[key] = state
            bar.total, bar.n = len(seen), sum(status.state == "done" for status in seen)
            bar.set_postfix_str(count(seen))
    return [status for status in seen if status.state in BAD]


def count(seen: Iterable[JobStatus]) -> str:
    counts = Counter(status.state for status in seen)
    return ", ".join(
        f"{counts[state]} {state}" for state in ("done", *reversed(MOVING), *BAD) if counts[state]
    )


def tail(log: Path) -> str:
    """The last 256 KiB of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _judge(job: SubmittedJob, state: JobState | None, needs: Sequence[JobStatus]) -> JobStatus:
    """Status from the marker, SLURM's `state` (None: unknown to SLURM) and the status of the needed jobs."""
    if job.done:
        return JobStatus(job, "done", state.node if state else "")
    if job.job_id is None:
        return JobStatus(job, "never submitted")
    if state and state.running:
        return JobStatus(job, "running", state.node)
    if state and not state.live and state.word != "CANCELLED":
        why, log = _failure(job, state.word)
        return JobStatus(job, "failed", state.node, why, log)
    if roots := [need.root or need for need in needs if need.state in BAD]:
        root = min(roots, key=lambda each: BAD.index(each.state))  # a failure before a cancellation
        return JobStatus(job, "cancelled", why=f"needs {root.job.name}, {_WHICH[root.state]}", root=root)
    if state is None:
        why, log = _problem(job)
        return JobStatus(job, "lost", "", "; ".join(filter(None, ("no longer known to SLURM", why))), log)
    if not state.live:
        return JobStatus(job, "cancelled", state.node)
    if ahead := next((need.job.name for need in needs if need.state != "done"), None):
        return JobStatus(job, "waiting", why=f"needs {ahead}")
    held = "held" in state.reason.lower()  # such as JobHeldUser, or: launch failed requeued held
    why = f"{state.reason}: release it with: scontrol release {job.job_id}" if held else state.reason
    return JobStatus(job, "requeued" if state.restarts else "queued", why=why, held=held)


def _failure(job: SubmittedJob, word: str) -> tuple[str, Path | None]:
    """Why a job ended in SLURM's state `word` without its marker, and the log that tells."""
    if word not in ("FAILED", "COMPLETED"):  # TIMEOUT, OUT_OF_MEMORY: errors in the log only follow from it
        return f"SLURM says {word}", job.log
    why, log = _problem(job)
    return why or f"its job ended without {job.marker.name}", log


def _problem(job: SubmittedJob) -> tuple[str, Path | None]:
    """The last error in a job's logs, and its log."""
    # Those of its processes first: `own_log` also has errors of earlier attempts. SLURM ends the first
    # process when another one fails, which alone says why.
    others = sorted(job.log.parent.glob(f"{job.job_id}_*_log.out")) if job.log else []
    for log in filter(None, (job.log, *others, job.own_log)):
        lines = [line for line in tail(log).splitlines() if not line.startswith(_BY_SLURM)]
        if found := last_problem("\n".join(lines)):
            return found[1], log
    return "", job.log
