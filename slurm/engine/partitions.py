"""What sinfo says about the nodes of a partition: its time limit, and the GPUs of its nodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alma.errors import UserError
from slurm.engine.squeue import call

_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$")
_IN_SERVICE = {"idle", "mix", "alloc", "comp"}
_GPUS = re.compile(r"\bgpu:(?:([^:(),]+):)?(\d+)")


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition."""

    partition: str
    is_default: bool
    minutes: int | None  # the partition's time limit; None: it has none, or it is not known
    gpus: tuple[tuple[str, int], ...]  # type and number of each kind of GPU on a node
    features: frozenset[str]


def nodes_of(partition: str | None) -> list[Nodes]:
    """The nodes of a partition, of several separated by commas, or of the default one (None).

    Empty if sinfo does not answer.
    """
    chosen = ["--partition", partition] if partition else []
    try:
        answer = call("sinfo", "--noheader", "--exact", "--format=%P|%l|%G|%f", *chosen)
    except UserError:
        return []
    nodes: list[Nodes] = []
    for line in answer.stdout.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 4:
            continue
        name, limit, resources, features = cells
        kinds = tuple((kind, int(number)) for kind, number in _GPUS.findall(resources))
        entry = Nodes(
            partition=name.removesuffix("*"),
            is_default=name.endswith("*"),
            minutes=_minutes(limit),
            gpus=kinds,
            features=frozenset(features.split(",")),
        )
        nodes.append(entry)
    if partition:
        return nodes
    return [entry for entry in nodes if entry.is_default]


def all_in_service(partition: str | None) -> bool:
    """Whether sinfo says that no node of a partition is down, drained or reserved.

    None: of any partition. False too if sinfo does not answer.
    """
    chosen = ["--partition", partition] if partition else []
    try:
        answer = call("sinfo", "--noheader", "--format=state %t", *chosen)
    except UserError:
        return False
    states = re.findall(r"^state (\S+)$", answer.stdout, re.MULTILINE)
    return bool(states) and set(states) <= _IN_SERVICE


def longest_limit(nodes: Sequence[Nodes]) -> int | None:
    """The largest time limit of the partitions in minutes; None: one has none, or it is unknown."""
    limits = [entry.minutes for entry in nodes]
    if not limits or None in limits:
        return None
    return max(limit for limit in limits if limit is not None)


def most_gpus(nodes: Sequence[Nodes], kind: str = "") -> int:
    """Most GPUs of a node, of the type `kind` if it is given; 0: none, or not known."""
    largest = 0
    for entry in nodes:
        numbers = [number for name, number in entry.gpus if kind in ("", name)]
        largest = max(largest, sum(numbers))
    return largest


def _minutes(limit: str) -> int | None:
    """Parse a time limit such as 1-00:00:00, 30:00 (minutes and seconds) or infinite."""
    match = _LIMIT.fullmatch(limit)
    if not match:
        return None
    days, first, second, third = match.groups()
    if third is not None:
        return int(days or 0) * 1440 + int(first) * 60 + int(second)
    if days is not None:
        return int(days) * 1440 + int(first) * 60 + int(second or 0)
    return int(first)
