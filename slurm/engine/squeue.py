"""SLURM's programs: states of jobs from squeue, scancel, and the nodes from sinfo."""

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
    """States of jobs by id; left out are those that slurmctld forgot, minutes after their end (MinJobAge).

    Raises UserError without SLURM on this machine, NoAnswer if it does not answer.
    """
    if not ids:
        return {}
    known: dict[str, JobState] = {}
    fields = ("JobArrayID", "State", "NodeList", "RestartCnt", "Reason")
    form = ",".join(f"{field}:|" for field in fields)  # a suffix and no width, which would truncate
    answer = _call("squeue", "-h", "-a", "-r", "-t", "all", "-O", form, "-j", _without_indices(ids))
    # squeue omits invalid ids, but for a single one it fails.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise NoAnswer(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError):  # not a job but a message of the site
            job_id, word, node, restarts, reason = (text.strip() for text in line.split("|")[:5])
            if job_id in ids:
                known[job_id] = JobState(word, node, int(restarts), "" if reason == "None" else reason)
    return known


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended are ignored. Raises UserError if SLURM refuses."""
    # In reverse order, so that no dependent starts because its dependency has ended.
    answer = _call("scancel", *reversed(dict.fromkeys(ids)))
    if answer.returncode and any(state.live for state in ask(ids).values()):
        raise UserError(f"scancel: {answer.stderr.strip() or f'exit code {answer.returncode}'}")


def largest_node(partition: str | None) -> tuple[int, int] | None:
    """Largest number of cores and largest memory in MiB of the partition's nodes; None: sinfo fails.

    partition: None for all partitions.
    """
    chosen = ["--partition", partition] if partition else []
    try:
        answer = _call("sinfo", "--noheader", "--exact", "--format=%c %m", *chosen)
    except UserError:
        return None
    nodes = re.findall(r"^(\d+) (\d+)$", answer.stdout, re.MULTILINE)
    return (max(int(cores) for cores, _ in nodes), max(int(mib) for _, mib in nodes)) if nodes else None


def _without_indices(ids: Iterable[str]) -> str:
    """The ids of jobs and of whole arrays, which SLURM answers much faster than single elements."""
    return ",".join(dict.fromkeys(job_id.partition("_")[0] for job_id in ids))


def _call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM. Raises UserError if it is missing, NoAnswer after a timeout."""
    # The user's own SQUEUE_ and SINFO_ variables would filter or truncate the answer.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_"))
    }
    environment["SLURM_BITSTR_LEN"] = "0"
    command, limit = [program, *arguments], _ANSWER_SECONDS
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except FileNotFoundError:
        raise UserError(f"no SLURM here (no {program}): run this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program}: no answer for {_ANSWER_SECONDS} s") from None
