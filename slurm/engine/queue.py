"""What has become of the units of runs that went to a cluster: by their markers, and by asking SLURM.

All that is known of a launch is RUN/jobs.json: its units (`Unit`), each after those that it needs.
"""

import contextlib
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from alma.errors import UserError
from alma.files import write_json_atomic
from slurm.engine.children import last_problem
from slurm.lm.progress import say

JOBS, VERSION = "jobs.json", 1
MOVING = ("waiting", "queued", "requeued", "running")
BAD = ("failed", "cancelled", "lost", "never submitted", "stopped")
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
}
_WHICH = {"failed": "which failed", "cancelled": "which was cancelled", "lost": "which is lost"}
_WHICH["never submitted"] = "which was never submitted"
_SECONDS = 60  # for an answer of SLURM
_TAIL = 256 * 1024  # bytes of a log that are read
_NOT_OURS = ("srun: ", "slurmstepd: ")  # the last lines of a job's log: that a task failed, not why


class NoAnswer(UserError):
    """SLURM is there and does not answer; it may later."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One thing that a run does in a job (or an element of an array) of its own."""

    run: Path
    name: str
    kind: str  # untrained, train, evaluate, sweep, data_prep; run: all of a local run
    directory: Path
    marker: Path
    """The file that says that the unit is complete."""
    updates: int | None
    """Of its whole training."""
    job: str | None
    """None: it was complete when the run was launched, or could not be submitted."""
    log: Path | None
    """What its job prints."""
    needs: tuple["Unit", ...]

    @property
    def done(self) -> bool:
        """Whether its marker is there."""
        # Listed, not tested: NFS may say for a minute that a file is not there which it was asked for before.
        try:
            return self.marker.name in os.listdir(self.marker.parent)
        except OSError:
            return False

    @property
    def own_log(self) -> Path | None:
        """What its children print, of all jobs that ever worked at this unit; None: there is only `log`."""
        if self.kind == "sweep":
            return self.marker.with_suffix(".log")
        names = {"untrained": "untrained.log", "train": "train.log", "evaluate": "eval.log"}
        return self.directory / names[self.kind] if self.kind in names else None


@dataclass(frozen=True)
class Job:
    """What SLURM says of a job."""

    state: str
    """In its words, such as PENDING or NODE_FAIL."""
    node: str = ""
    restarts: int = 0
    reason: str = ""

    @property
    def live(self) -> bool:
        """Whether it may still do something."""
        return self.state in _QUEUED | _RUNNING


@dataclass(frozen=True)
class Status:
    """Where a unit is."""

    unit: Unit
    state: str  # one of MOVING, "done" or one of BAD
    node: str = ""
    why: str = ""
    """What went wrong, or what the queue is waiting for."""
    log: Path | None = None
    """Where that is to be read, if anywhere."""
    root: "Status | None" = None
    """The unit whose failure cancelled this one."""

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node and self.state == "running" else ""
        why = f": {self.why}" if self.why else ""
        log = f"; log: {self.log}" if self.log else ""
        return f"{self.unit.run}: {self.unit.name} (job {self.unit.job or '-'}) {self.state}{where}{why}{log}"


def find(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run directories among and below `places`, each once; UserError where there are none."""
    found: dict[Path, Path] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"{place} is not a folder: give run directories, or folders that hold some")
        walk = os.walk(place)
        below = [Path(folder) for folder, _, files in walk if {JOBS, "run.json"} & set(files)]
        if not below:
            raise UserError(f"no runs in {place}: no folder in it has a jobs.json or a run.json")
        launched = set(filter(on_cluster, below))
        # The runs of a sweep are not launched one by one: its parts stand for them.
        below = [folder for folder in below if folder in launched or folder.parent not in launched]
        found |= {folder.resolve(): folder for folder in sorted(below)}
    return list(found.values())


def on_cluster(run: Path) -> bool:
    """Whether the run was launched on a cluster."""
    return (run / JOBS).exists()


def write_units(run: Path, units: Sequence[Mapping[str, Any]]) -> None:
    """Write jobs.json; `units` as `read_units` takes them, those that one needs before it."""
    write_json_atomic(run / JOBS, {"version": VERSION, "units": units})


def read_units(run: Path) -> list[Unit]:
    """The units of a run. UserError: it was not launched on a cluster, or jobs.json is damaged."""
    path = run / JOBS
    units: list[Unit] = []
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise UserError(
                f"{path}: version {content['version']}, not {VERSION}: use the ALMA that wrote it"
            )
        for each in content["units"]:
            if not all(0 <= index < len(units) for index in each["needs"]):
                raise ValueError(f"{each['name']} needs a unit that does not come before it")
            unit = Unit(
                run=run,
                name=str(each["name"]),
                kind=str(each["kind"]),
                directory=run / each["directory"],
                marker=run / each["marker"],
                updates=each["updates"],
                job=each["job"] and str(each["job"]),
                log=Path(each["log"]) if each["log"] else None,
                needs=tuple(units[index] for index in each["needs"]),
            )
            units.append(unit)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run} was not launched on a cluster: it has no jobs.json") from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged ({problem}): the command that launched the run mends it"
        ) from None
    return units


def ask(jobs: Collection[str]) -> dict[str, Job]:
    """What SLURM knows of the jobs with these ids, live or ended; those it does not know are left out.

    UserError: there is no SLURM here. NoAnswer: it does not answer.
    """
    if not jobs:
        return {}
    known = _squeue(jobs)
    # slurmctld forgets what ended some minutes ago (MinJobAge); where there is accounting, that does not.
    forgotten = [job for job in jobs if job not in known]
    return known | _sacct(forgotten) if forgotten else known


def look(runs: Sequence[Path]) -> list[Status]:
    """Where all units of the runs are, in the order of jobs.json. UserError and NoAnswer as of `ask`."""
    units = [unit for run in runs for unit in read_units(run)]
    jobs = ask([unit.job for unit in units if unit.job and not unit.done])
    seen: dict[Unit, Status] = {}
    for unit in units:  # markers are read again: a job that SLURM says has ended may have written its own
        seen[unit] = _judge(unit, jobs.get(unit.job or ""), [seen[need] for need in unit.needs])
    return list(seen.values())


def watch(runs: Sequence[Path], seconds: float, patient: bool = False) -> Iterator[list[Status]]:
    """`look` again and again, until all units are done or nothing moves any more.

    A SLURM that falls silent (its controller restarts) is asked again; NoAnswer if it does not answer the
    first time, unless `patient`.
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
            # Twice: between a node's failure and the requeue a job is failed for a moment.
            before, still = still, not any(status.state in MOVING for status in seen)
            if all(status.state == "done" for status in seen) or (before and still):
                return
        time.sleep(seconds)


def wait(runs: Sequence[Path], seconds: float = 5.0) -> list[Status]:
    """Wait until all units of the runs are done or nothing moves any more; those that failed, were cancelled
    or are lost. Shows a bar on a terminal, else a line for every change."""
    states: dict[tuple[Path, str], str] = {}
    seen: list[Status] = []
    form = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
    with tqdm(desc="units", total=0, bar_format=form, dynamic_ncols=True, disable=None) as bar:
        for seen in watch(runs, seconds):
            if bar.disable:
                if not states:
                    say(f"units: {count(seen)}")
                for status in seen:
                    key = (status.unit.run, status.unit.name)
                    if states.get(key, status.state) != status.state:
                        say(str(status))
                    states[key] = status.state
            else:
                bar.total, bar.n = len(seen), sum(status.state == "done" for status in seen)
                bar.set_postfix_str(count(seen))
    return [status for status in seen if status.state in BAD]


def count(seen: Iterable[Status]) -> str:
    """How many units are in which state."""
    counts = Counter(status.state for status in seen)
    return ", ".join(
        f"{counts[state]} {state}" for state in ("done", *reversed(MOVING), *BAD) if counts[state]
    )


def live_units(runs: Sequence[Path]) -> list[Unit]:
    """The units that are not done, and whose jobs SLURM still has in its queue."""
    units = {unit: unit.job for run in runs for unit in read_units(run) if unit.job and not unit.done}
    jobs = ask(list(units.values()))
    return [unit for unit, job in units.items() if job in jobs and jobs[job].live]


def scancel(jobs: Sequence[str]) -> None:
    """Cancel these jobs; those that have ended by now are passed over. UserError: SLURM refuses."""
    # The last first: none that waits for another can start because that one has ended.
    answer = _call("scancel", *reversed(dict.fromkeys(jobs)))
    if answer.returncode and any(job.live for job in ask(jobs).values()):
        raise UserError(f"scancel: {answer.stderr.strip() or f'exit code {answer.returncode}'}")


def tail(log: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _judge(unit: Unit, job: Job | None, needs: Sequence[Status]) -> Status:
    if unit.done:
        return Status(unit, "done", job.node if job else "")
    if unit.job is None:
        return Status(unit, "never submitted")
    if job and job.state in _RUNNING:
        return Status(unit, "running", job.node)
    if job and not job.live and job.state != "CANCELLED":
        why, log = _failure(unit, job.state)
        return Status(unit, "failed", job.node, why, log)
    roots = [need.root or need for need in needs if need.state in BAD]
    if roots:
        root = min(
            roots, key=lambda each: BAD.index(each.state)
        )  # what failed, rather than what was cancelled
        return Status(unit, "cancelled", why=f"needs {root.unit.name}, {_WHICH[root.state]}", root=root)
    if job is None:
        why, log = _problem(unit)
        return Status(unit, "lost", "", f"not known to SLURM any more{why and f'; {why}'}", log)
    if not job.live:
        return Status(unit, "cancelled", job.node)
    ahead = next((need.unit.name for need in needs if need.state != "done"), None)
    if ahead:
        return Status(unit, "waiting", why=f"needs {ahead}")
    return Status(unit, "requeued" if job.restarts else "queued", why=job.reason)


def _failure(unit: Unit, word: str) -> tuple[str, Path | None]:
    """Why a unit's job has ended with this state of SLURM's and without its marker; and the log."""
    if word not in ("FAILED", "COMPLETED"):  # TIMEOUT, OUT_OF_MEMORY: an error in the log follows from that
        return f"SLURM says {word}", unit.log
    why, log = _problem(unit)
    return why or f"its job ended without {unit.marker.name}", log


def _problem(unit: Unit) -> tuple[str, Path | None]:
    """The last error in a unit's logs, and where it is."""
    # That of the job first: the unit's own goes back to earlier jobs, whose errors are mended by now.
    for log in filter(None, (unit.log, unit.own_log)):
        lines = [line for line in tail(log).splitlines() if not line.startswith(_NOT_OURS)]
        found = last_problem("\n".join(lines))
        if found:
            return found[1], log
    return "", unit.log


def _squeue(jobs: Collection[str]) -> dict[str, Job]:
    """What slurmctld knows: also what ended some minutes ago."""
    fields = ("JobArrayID", "State", "NodeList", "RestartCnt", "Reason")
    form = ",".join(f"{field}:|" for field in fields)  # a suffix and no width: nothing is cut off
    answer = _call("squeue", "-h", "-a", "-r", "-t", "all", "-O", form, "-j", _numbers(jobs))
    if answer.returncode and "Invalid job id" not in answer.stderr:  # of one id; of several they are left out
        raise NoAnswer(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    known: dict[str, Job] = {}
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError):  # not a job: a message of the site
            job, state, node, restarts, reason = (word.strip() for word in line.split("|")[:5])
            if job in jobs:
                known[job] = Job(state, node, int(restarts), "" if reason == "None" else reason)
    return known


def _sacct(jobs: Collection[str]) -> dict[str, Job]:
    """What accounting knows of jobs that have ended; nothing where there is none."""
    try:
        answer = _call("sacct", "-n", "-P", "-X", "-o", "JobID,State,NodeList", "-j", _numbers(jobs))
    except UserError:
        return {}
    known: dict[str, Job] = {}
    for line in answer.stdout.splitlines():
        name, state, node = (*line.split("|"), "", "")[:3]
        job = Job((state.split() or [""])[0], "" if node == "None assigned" else node)  # CANCELLED by 1000
        # Of one that slurmctld does not know it may still say RUNNING, for good: its end got lost.
        if job.state and not job.live:
            known |= {each: job for each in _elements(name) if each in jobs}
    return known


def _elements(name: str) -> list[str]:
    """The jobs behind an id of sacct, which writes array elements that never ran as 7_[1-3,9%2]."""
    found = re.fullmatch(r"(\d+)_\[(.*?)(?:%\d+)?\]", name)
    if not found:
        return [name]
    parts = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", found[2])
    ranges = (range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in parts)
    return [f"{found[1]}_{index}" for each in ranges for index in each]


def _numbers(jobs: Iterable[str]) -> str:
    """Their ids without array elements, as SLURM's commands take them: an array is asked for once."""
    return ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))


def _call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM. UserError: there is none. NoAnswer: it takes too long."""
    # What a user has set there would filter the answer, or cut it off.
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    ours["SLURM_BITSTR_LEN"] = "0"
    try:
        command = [program, *arguments]
        return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise UserError(f"no SLURM here (no {program}): ask on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program}: no answer for {_SECONDS} s") from None
