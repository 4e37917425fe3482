"""Cores and memory that a training on GPUs needs of its nodes, where the user says nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace

from slurm.engine.resources import Resources
from slurm.engine.squeue import largest_node
from slurm.lm.estimate import Estimate, total

_CORES = 2
"""For each process that trains and each of its workers that read data, as submitit advises."""
_GB = 10**9


def with_hosts(wanted: Resources, estimates: Sequence[Estimate]) -> Resources:
    """`wanted` with the cores and the memory that its GPUs need, at most what a node has.

    Numbers that the user gave stay, and so does everything without GPUs. Without an estimate the memory is
    the cluster's default.
    """
    if not wanted.gpus_per_node:
        return wanted
    most_cores, most_memory = largest_node(wanted.partition) or (math.inf, math.inf)
    sized = wanted
    if wanted.leaves_open("cpus_per_task"):
        workers = max(cost.settings["--num-workers"] for each in estimates for cost in each.costs)
        processes = wanted.gpus_per_node // wanted.tasks_per_node
        cores = min(_CORES * (1 + workers) * processes, most_cores // wanted.tasks_per_node)
        sized = replace(sized, cpus_per_task=int(cores))
    if wanted.leaves_open("mem_gb"):
        most = most_memory / 1024  # SLURM's GB
        training, evaluation = (_gb(each, most) for each in _needs(wanted, estimates))
        sized = replace(sized, mem_gb=training, mem_gb_alone=evaluation)
    return sized


def _needs(wanted: Resources, estimates: Sequence[Estimate]) -> tuple[int | None, int | None]:
    """Bytes of a node of the largest training, and of the largest evaluation; None: unknown."""
    costs = [cost for each in estimates for cost in each.costs]
    trainings = [cost.host_memory(-(-cost.processes // wanted.nodes)) for cost in costs]
    evaluations = [each.evaluation_host_memory for each in estimates]
    if None in trainings or total(evaluations) is None:
        return None, None
    return max(each or 0 for each in trainings), max(each or 0 for each in evaluations)


def _gb(need: int | None, most: float) -> int | None:
    """None: unknown, or the cluster does not know the memory of its nodes."""
    return None if need is None else int(min(math.ceil(need / _GB), most)) or None
