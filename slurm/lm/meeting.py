"""Flags by which the processes of a training find each other."""

from pathlib import Path
from urllib.parse import quote

from alma.options import flag_words
from slurm.lm.run_options import Placement

RENDEZVOUS = (
    ".rendezvous.json"  # file in a training's folder through which its processes find each other
)


def words_of_task(
    directory: Path, placement: Placement, tasks: int, task: int, attempt: str, host: str | None
) -> list[str]:
    """Flags of fairseq-train in a task of a job (fairseq_alma.rendezvous).

    directory: of the training. tasks: number of tasks of the SLURM job; this is number `task`.
    attempt: an ID of this start, different from those of earlier starts. host: where the first
    process is; None: its node.
    """
    processes = placement.processes // tasks  # number of processes of this task
    arguments = flag_words("--expect-gpus", processes if placement.gpus else None)
    if placement.processes > 1:
        file = quote(str((directory / RENDEZVOUS).resolve()))
        meeting = f"alma://{file}?attempt={attempt}"
        if host:
            meeting += f"&host={host}"
        arguments += ["--distributed-init-method", meeting]
        arguments += ["--distributed-rank", str(task * processes)]
        if processes == 1:  # this process trains; otherwise fairseq starts others
            arguments.append("--distributed-no-spawn")
    return arguments


def words_of_node(nodes: int, node: int, attempt: str) -> list[str]:
    """Flags of transformers_alma on a node of a job, whose task starts the processes there.

    attempt: as for `words_of_task`.
    """
    if nodes == 1:
        return []
    words = flag_words("--num_machines", nodes)
    words += flag_words("--machine_rank", node)
    return words + flag_words("--attempt", attempt)
