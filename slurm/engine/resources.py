"""What a job asks of SLURM: command-line flags, and their names in submitit."""

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
    """Resources of one training; the defaults are the paper's node of 8 GPUs.

    Raises UserError for a number that is too small.
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
    """Of a node."""
    timeout_min: int = 1440
    signal_delay_s: int = 120
    array_parallelism: int = 256
    max_requeues: int = 10

    def __post_init__(self):
        for name, least in _LEAST.items():
            given = getattr(self, name)
            if given is not None and given < least:
                raise UserError(f"--{name.replace('_', '-')} {given}: give {least} or more")
        if self.gpus_per_node and self.tasks_per_node not in (1, self.gpus_per_node):
            raise UserError(
                f"--tasks-per-node {self.tasks_per_node}, but --gpus-per-node {self.gpus_per_node}: give as "
                "many tasks as GPUs, or one, or --gpus-per-node 0"
            )

    def parameters(self) -> dict[str, Any]:
        """Arguments of submitit's SlurmExecutor.update_parameters."""
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
        """The machine of a training: its GPUs, of unknown size, and its memory if it is given."""
        memory = self.mem_gb * 10**9 if self.mem_gb else None
        gpus = (sys.maxsize,) * self.gpus_per_node * self.nodes
        return Machine(gpus, memory, self.tasks_per_node * self.nodes)

    def alone(self) -> "Resources":
        """For a job of one process on at most one GPU, such as an evaluation."""
        few: dict[str, Any] = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": min(1, self.gpus_per_node)}
        if self.mem_gb:  # the share of one GPU's process
            few["mem_gb"] = max(1, self.mem_gb // max(1, self.gpus_per_node))
        return replace(self, **few)


_PAPER = Resources()


_PLACES = {
    "local": "on this machine",
    "debug": "on this machine, with training attached to the terminal, so that breakpoint() works (one GPU)",
    "slurm": "as SLURM jobs",
}
WAIT = "with --cluster slurm: wait until all jobs have ended; exit with 1 if one failed"
_FLAGS = {
    "partition": ("NAME", "partition to submit to"),
    "account": ("NAME", "account to charge"),
    "qos": ("NAME", "quality of service, which sets priority and limits"),
    "constraint": ("FEATURES", "only nodes with these features, such as v100 or 'a100|h100'"),
    "exclude": ("NODES", "nodes to avoid, such as node[03,17]"),
    "comment": ("TEXT", "comment of the jobs; some clusters require one"),
    "nodes": ("N", "nodes; their GPUs train together"),
    "gpus_per_node": ("N", "GPUs per node; 0: none"),
    "tasks_per_node": (
        "N",
        "processes that SLURM starts per node; 1: fairseq starts one for each GPU",
    ),
    "cpus_per_task": ("N", "CPU cores per task"),
    "mem_gb": ("N", "memory per node in GB"),
    "timeout_min": ("N", "time limit in minutes, at least 20; a job that reaches it is requeued and resumes"),
    "signal_delay_s": (
        "N",
        "seconds between the signal to save and the end of a job (time limit or preemption)",
    ),
    "array_parallelism": ("N", "jobs of an array that may run at the same time"),
    "max_requeues": ("N", "times that a job may be requeued after its time limit"),
}
"""Metavar and help by field of `Resources`."""


def add_cluster(group: argparse._ArgumentGroup, *places: str) -> None:
    """Add --cluster with the choices `places`, the first of which is the default."""
    texts = "; ".join(f"{place}: {_PLACES[place]}" for place in places)
    group.add_argument(
        "--cluster", choices=places, default=places[0], help=f"where to run; {texts} (default: {places[0]})"
    )


def add_flags(parser: argparse.ArgumentParser, usual: Resources = _PAPER, what: str = "training") -> None:
    """Add the flags of `Resources`, spelt as in sbatch and submitit, with the defaults `usual`."""
    group = parser.add_argument_group(
        "SLURM",
        f"Resources of each {what}, for --cluster slurm. Flags without a default use the cluster's.",
    )
    for name, (metavar, text) in _FLAGS.items():
        default = getattr(usual, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=int if name in _LEAST else str,
            metavar=metavar,
            help=text if default is None else f"{text} (default: {default})",
        )


def check_cluster(
    options: argparse.Namespace,
    slurm: Sequence[str] = ("dry_run", "wait"),
    local: Sequence[str] = (),
) -> None:
    """Raise UserError for options that contradict --cluster, or if `--cluster slurm` finds no SLURM.

    slurm, local: further options for SLURM only and for this machine only; the fields of `Resources` are for
    SLURM only. An option that is None or False was not given.
    """
    on_slurm = options.cluster == "slurm"
    names = local if on_slurm else (*(field.name for field in fields(Resources)), *slurm)
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        if on_slurm:
            raise UserError(f"{words}: not with --cluster slurm, only on this machine")
        raise UserError(f"{words}: only with --cluster slurm")
    if on_slurm and not getattr(options, "dry_run", False) and not shutil.which("sbatch"):
        raise UserError("no SLURM here (no sbatch): run this on a machine of the cluster")


def read(options: argparse.Namespace, usual: Resources = _PAPER) -> Resources:
    """The resources of parsed options; `usual` where an option is missing."""
    given = {field.name: getattr(options, field.name) for field in fields(Resources)}
    return replace(usual, **{name: value for name, value in given.items() if value is not None})
