"""Call SLURM's programs: states of jobs, scancel, and the sizes of nodes and arrays."""

import contextlib
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from alma.errors import UserError

_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
_RUNNING |= {"SUSPENDED"}
_ANSWER_SECONDS = 60
_OF_ANOTHER_JOB = re.compile(
    r"_?(SLURMD?|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCANCEL|SCONTROL|SUBMITIT)_(?!CONF|JWT)"
    r"|(MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)|[A-Z]+_VISIBLE_DEVICES)$"
)
"""Pattern of the variables that clean_environment hides; not SLURM_CONF and SLURM_JWT, which are
needed to reach SLURM."""


class NoAnswer(UserError):
    """SLURM is installed but does not answer at the moment; try again later."""


@dataclass(frozen=True)
class JobState:
    word: str  # such as PENDING or NODE_FAIL
    node: str = ""
    restarts: int = 0
    reason: str = ""
    waits_for: frozenset[str] = frozenset()  # ids of the jobs that must end before it starts
    user: str = ""
    name: str = ""
    script: str = ""  # path of the batch script; empty: from standard input

    @property
    def running(self) -> bool:
        return self.word in _RUNNING

    @property
    def live(self) -> bool:
        return self.running or self.word in _QUEUED


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Hide variables of this process that would override sbatch's options or leak into the job."""
    hidden = {
        name: os.environ.pop(name) for name in list(os.environ) if _OF_ANOTHER_JOB.match(name)
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def ask(ids: Collection[str] | None = None) -> dict[str, JobState]:
    """States of the jobs `ids` (None: all jobs of this user), by id.

    Jobs that ended some time ago are missing, because slurmctld forgets them.

    Raises UserError without SLURM on this machine, NoAnswer if it does not answer.
    """
    if ids is not None and not ids:
        return {}
    states: dict[str, JobState] = {}
    fields: tuple[str, ...] = (
        "JobArrayID",
        "State",
        "NodeList",
        "RestartCnt",
        "Reason",
        "Dependency",
    )
    fields += ("UserName", "Name", "Command")
    form = ",".join(f"{field}:|" for field in fields)  # suffix "|"; a width would truncate values
    # Ask for whole arrays, which SLURM answers much faster than for their elements.
    whole = dict.fromkeys(job_id.partition("_")[0] for job_id in ids or ())
    chosen = ("-j", ",".join(whole)) if whole else ("-u", str(os.getuid()))
    answer = call("squeue", "-h", "-a", "-r", "-t", "all", "-O", form, *chosen)
    # squeue ignores invalid ids, but fails if the only id is invalid.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise NoAnswer(f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError):  # a line of the site's own, not a job
            cells = [cell.strip() for cell in line.split("|")]
            job_id, word, node, restarts, reason, needs, *about = cells
            user, name, script = (*about, "", "", "")[:3]
            # With aftercorr, an array waits for 7_*: each element for the element of its index.
            waits_for = re.findall(
                r":(\d+(?:_\d+)?)", needs.replace("_*", "_" + job_id.partition("_")[2])
            )
            if ids is None or job_id in ids:
                reason = "" if reason == "None" else reason
                state = JobState(word, node, int(restarts), reason, frozenset(waits_for))
                states[job_id] = replace(state, user=user, name=name, script=script)
    return states


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended are ignored. Raises UserError if SLURM refuses."""
    # In reverse order, so that no dependent starts because its dependency has ended.
    answer = call("scancel", *reversed(dict.fromkeys(ids)))
    if answer.returncode and any(state.live for state in ask(ids).values()):
        raise UserError(f"scancel: {answer.stderr.strip() or f'exit code {answer.returncode}'}")


def largest_node(partition: str | None, constraint: str = "") -> tuple[int, int] | None:
    """Largest number of cores and largest memory in MiB of the partition's nodes; None: sinfo
    fails.

    partition: None for all partitions. constraint: that of sbatch, without regard to its
    parentheses.
    """
    chosen = ["--partition", partition] if partition else []
    try:
        answer = call("sinfo", "--noheader", "--exact", "--format=%c %m %f", *chosen)
    except UserError:
        return None
    nodes = re.findall(r"^(\d+) (\d+) (\S+)$", answer.stdout, re.MULTILINE)
    fitting = [node for node in nodes if fits_constraint(node[2].split(","), constraint)]
    candidates = fitting or nodes
    if not candidates:
        return None
    return max(int(node[0]) for node in candidates), max(int(node[1]) for node in candidates)


def fits_constraint(features: Iterable[str], constraint: str) -> bool:
    """Whether a node with these features has those of one alternative of a constraint.

    The parentheses of the constraint are ignored; no node fits an empty one.
    """
    alternatives = re.sub(r"[][()]|\*\d+", "", constraint).split("|")
    needs = [set(names.split("&")) for names in alternatives if names]
    node_features = set(features)
    return any(names <= node_features for names in needs)


def largest_array() -> int:
    """Most elements of an array job; SLURM's default if scontrol fails."""
    try:
        config = call("scontrol", "show", "config").stdout
    except UserError:
        config = ""
    limits = re.findall(r"\b(?:MaxArraySize +=|max_array_tasks=) *(\d+)", config)
    return max(1, min(map(int, limits), default=1001))


def call(
    program: str, *arguments: str, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM with the input `text`.

    UserError: it is missing. NoAnswer: after a timeout.
    """
    command = [program, *arguments]
    limit = _ANSWER_SECONDS
    with clean_environment():
        env = {**os.environ, "SLURM_BITSTR_LEN": "0"}
    try:
        return subprocess.run(
            command,
            check=False,
            input=text,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except FileNotFoundError:
        raise UserError(
            f"no SLURM here (no {program}): run this on a machine of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program}: no answer for {_ANSWER_SECONDS} s") from None
