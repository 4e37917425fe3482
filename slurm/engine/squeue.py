"""SLURM's programs: states of jobs from squeue and sacct, scancel, and the nodes from sinfo."""

import contextlib
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from alma.errors import UserError

_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
_RUNNING |= {"SUSPENDED"}
_ANSWER_SECONDS = 60


class NoAnswer(UserError):
    """SLURM is installed but does not answer; it may later."""


@dataclass(frozen=True)
class JobState:
    word: str
    """Such as PENDING or NODE_FAIL."""
    node: str = ""
    restarts: int = 0
    reason: str = ""

    @property
    def running(self) -> bool:
        return self.word in _RUNNING

    @property
    def live(self) -> bool:
        return self.running or self.word in _QUEUED


def ask(ids: Collection[str]) -> dict[str, JobState]:
    """States of live and ended jobs by id; unknown ids are left out.

    Raises UserError without SLURM on this machine, NoAnswer if it does not answer.
    """
    if not ids:
        return {}
    known = _squeue(ids)
    # slurmctld forgets jobs some minutes after their end (MinJobAge); accounting, if there is any, does not.
    forgotten = [job_id for job_id in ids if job_id not in known]
    return known | _sacct(forgotten) if forgotten else known


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended are ignored. Raises UserError if SLURM refuses."""
    # In reverse order, so that no dependent starts because its dependency has ended.
    answer = _call("scancel", *reversed(dict.fromkeys(ids)))
    if answer.returncode and any(state.live for state in ask(ids).values()):
        raise UserError(f"scancel: {answer.stderr.strip() or f'exit code {answer.returncode}'}")


def largest_node(partition: str | None) -> tuple[int, int] | None:
    """The most cores and the most memory, in MiB, of a node; of any partition without `partition`.

    None: SLURM does not tell.
    """
    chosen = ["--partition", partition] if partition else []
    try:
        answer = _call("sinfo", "--noheader", "--exact", "--format=%c %m", *chosen)
    except UserError:
        return None
    found = [tuple(map(int, each)) for each in re.findall(r"^(\d+) (\d+)$", answer.stdout, re.MULTILINE)]
    return (max(cores for cores, _ in found), max(memory for _, memory in found)) if found else None


def _squeue(ids: Collection[str]) -> dict[str, JobState]:
    """Jobs that slurmctld knows, those that ended some minutes ago included."""
    fields = ("JobArrayID", "State", "NodeList", "RestartCnt", "Reason")
    form = ",".join(f"{field}:|" for field in fields)  # a suffix and no width, which would truncate
    answer = _call("squeue", "-h", "-a", "-r", "-t", "all", "-O", form, "-j", _array_ids(ids))
    # squeue omits invalid ids, but for a single one it fails.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise NoAnswer(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    known: dict[str, JobState] = {}
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError):  # not a job but a message of the site
            job_id, word, node, restarts, reason = (text.strip() for text in line.split("|")[:5])
            if job_id in ids:
                known[job_id] = JobState(word, node, int(restarts), "" if reason == "None" else reason)
    return known


def _sacct(ids: Collection[str]) -> dict[str, JobState]:
    """Ended jobs in SLURM's accounting; empty without accounting."""
    try:
        answer = _call("sacct", "-n", "-P", "-X", "-o", "JobID,State,NodeList", "-j", _array_ids(ids))
    except UserError:
        return {}
    known: dict[str, JobState] = {}
    for line in answer.stdout.splitlines():
        name, words, node = (*line.split("|"), "", "")[:3]
        word = (words.split() or [""])[0]  # of CANCELLED by 1000
        state = JobState(word, "" if node == "None assigned" else node)
        # RUNNING here and unknown to slurmctld: the job has ended, but accounting missed it.
        if word and not state.live:
            known |= {each: state for each in _elements(name) if each in ids}
    return known


def _elements(name: str) -> list[str]:
    """Job ids behind an id of sacct, where 7_[1-3,9%2] stands for array elements that never ran."""
    found = re.fullmatch(r"(\d+)_\[(.*?)(?:%\d+)?\]", name)
    if not found:
        return [name]
    parts = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", found[2])
    ranges = (range(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in parts)
    return [f"{found[1]}_{index}" for each in ranges for index in each]


def _array_ids(ids: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))


def _call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM. Raises UserError if it is missing, NoAnswer after a timeout."""
    # The user's own SQUEUE_, SACCT_ and SINFO_ variables would filter or truncate the answer.
    users = ("SQUEUE_", "SACCT_", "SINFO_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(users)}
    ours["SLURM_BITSTR_LEN"] = "0"
    command = [program, *arguments]
    try:
        return subprocess.run(command, env=ours, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except FileNotFoundError:
        raise UserError(f"no SLURM here (no {program}): run this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program}: no answer for {_ANSWER_SECONDS} s") from None
