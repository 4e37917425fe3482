"""What a job asks of SLURM: the flags of a launch, and submitit's names for them."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from alma.errors import UserError
from slurm.engine.machine import Machine

_LEAST = {"nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1, "mem_gb": 1}
_LEAST |= {"timeout_min": 1, "array_parallelism": 1, "max_requeues": 0, "signal_delay_s": 1}


@dataclass(frozen=True)
class Resources:
    """Of one training; the paper's set-up by default. Sizes are a node's, or a task's where they say so.

    UserError: a number that is too small.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    nodes: int = 1
    gpus_per_node: int = 8
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    mem_gb: int | None = None
    timeout_min: int = 1440
    signal_delay_s: int = 120
    array_parallelism: int = 256
    max_requeues: int = 10

    def __post_init__(self):
        for name, least in _LEAST.items():
            given = getattr(self, name)
            if given is not None and given < least:
                raise UserError(f"--{name.replace('_', '-')} {given}: give {least} or more")

    def parameters(self) -> dict[str, Any]:
        """For submitit's SlurmExecutor.update_parameters."""
        gpus = {"gpus_per_node": self.gpus_per_node} if self.gpus_per_node else {}
        memory = {"mem": f"{self.mem_gb}GB"} if self.mem_gb else {}
        named = ("partition", "account", "qos", "constraint", "exclude", "comment", "cpus_per_task")
        return {
            **{name: getattr(self, name) for name in named if getattr(self, name) is not None},
            **gpus,
            **memory,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "time": self.timeout_min,
            "signal_delay_s": self.signal_delay_s,
            "array_parallelism": self.array_parallelism,
            "stderr_to_stdout": True,
        }

    def machine(self) -> Machine:
        """What a training has, where memory is not given as much as it likes."""
        memory = self.mem_gb * 10**9 if self.mem_gb else None
        return Machine((sys.maxsize,) * self.gpus_per_node * self.nodes, memory)

    def alone(self) -> "Resources":
        """What an evaluation takes: one process, a GPU at most."""
        few: dict[str, Any] = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": min(1, self.gpus_per_node)}
        if self.mem_gb:  # a process's share of a node
            few["mem_gb"] = max(1, self.mem_gb // max(1, self.gpus_per_node))
        return replace(self, **few)


_PAPER = Resources()


def add_flags(parser: argparse.ArgumentParser, usual: Resources = _PAPER, what: str = "training") -> None:
    """The flags of `Resources`, spelt as sbatch and submitit spell them; `usual` is what they default to."""
    group = parser.add_argument_group(f"on SLURM (what each {what} asks for)")
    for name, text in (
        ("partition", "as in sbatch"),
        ("account", "as in sbatch"),
        ("qos", "as in sbatch"),
        ("constraint", "as in sbatch"),
        ("exclude", "nodes, as in sbatch"),
        ("comment", "as in sbatch"),
    ):
        group.add_argument(f"--{name}", metavar="X", help=text)
    for name, text in (
        ("nodes", "several are one training"),
        ("gpus-per-node", "0: none"),
        ("tasks-per-node", "1: fairseq starts a process for each GPU; else a task is a process"),
        ("cpus-per-task", "as in sbatch"),
        ("mem-gb", "memory of a node"),
        ("timeout-min", "minutes until a job is requeued, its training saved; 20 or more"),
        ("signal-delay-s", "seconds before that (or before preemption) at which it saves"),
        ("array-parallelism", "jobs of a stage that run at a time"),
        ("max-requeues", "times a job may run out of its time"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(f"--{name}", type=int, metavar="N", help=text + shown)


def check_cluster(
    options: argparse.Namespace,
    slurm: Sequence[str] = ("dry_run", "wait"),
    local: Sequence[str] = (),
) -> None:
    """UserError: options that --cluster rules out, or --cluster slurm where there is no SLURM.

    `slurm` and `local`: the command's own options for --cluster slurm only, and for this machine only, beside
    the fields of `Resources`. An option that is None or False was not given.
    """
    on_slurm = options.cluster == "slurm"
    names = local if on_slurm else (*(field.name for field in fields(Resources)), *slurm)
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        if on_slurm:
            raise UserError(f"{words}: not for --cluster slurm, only for this machine: leave it out")
        raise UserError(f"{words}: only for --cluster slurm: give that too, or leave it out")
    if on_slurm and not getattr(options, "dry_run", False) and not shutil.which("sbatch"):
        raise UserError("no SLURM here (no sbatch): start this on a machine of the cluster")


def read(options: argparse.Namespace, usual: Resources = _PAPER) -> Resources:
    """Of the flags that were given, and `usual` where none was."""
    given = {field.name: getattr(options, field.name) for field in fields(Resources)}
    return replace(usual, **{name: value for name, value in given.items() if value is not None})
