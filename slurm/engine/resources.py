"""What a job asks of SLURM: command-line flags, and their names in submitit."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from alma.errors import UserError
from alma.options import add_options, check_ranges, flag_of, given, option, options_of
from slurm.engine.machine import Machine


@dataclass(frozen=True)
class Resources:
    """Resources of one training; the defaults are the paper's node of 8 GPUs.

    Raises UserError for a number that is too small.
    """

    partition: str | None = option(None, "partition to submit to", metavar="NAME")
    account: str | None = option(None, "account to charge", metavar="NAME")
    qos: str | None = option(None, "quality of service, which sets priority and limits", metavar="NAME")
    constraint: str | None = option(
        None, "only nodes with these features, such as v100 or 'a100|h100'", metavar="FEATURES"
    )
    exclude: str | None = option(None, "nodes to avoid, such as node[03,17]", metavar="NODES")
    comment: str | None = option(None, "comment of the jobs; some clusters require one")
    nodes: int = option(1, "nodes; their GPUs train together", at_least=1)
    gpus_per_node: int = option(8, "GPUs per node; 0: none")
    tasks_per_node: int = option(
        1, "processes that SLURM starts per node; 1: fairseq starts one for each GPU", at_least=1
    )
    cpus_per_task: int | None = option(None, "CPU cores per task", at_least=1)
    mem_gb: int | None = option(None, "memory per node in GB", at_least=1)
    timeout_min: int = option(
        1440,
        "time limit in minutes, at least 20; a job that reaches it is requeued and resumes",
        at_least=1,
    )
    signal_delay_s: int = option(
        120,
        "seconds between the signal to save and the end of a job (time limit or preemption)",
        at_least=1,
    )
    array_parallelism: int = option(256, "jobs of an array that may run at the same time", at_least=1)
    max_requeues: int = option(10, "times that a job may be requeued after its time limit")

    def __post_init__(self):
        check_ranges(self)
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
    add_options(group, options_of(Resources).values(), usual)


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
    names = local if on_slurm else (*options_of(Resources), *slurm)
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    found = [name for name, value in values.items() if value is not None and value is not False]
    if found:
        words = ", ".join(map(flag_of, found))
        if on_slurm:
            raise UserError(f"{words}: not with --cluster slurm, only on this machine")
        raise UserError(f"{words}: only with --cluster slurm")
    if on_slurm and not getattr(options, "dry_run", False) and not shutil.which("sbatch"):
        raise UserError("no SLURM here (no sbatch): run this on a machine of the cluster")


def read(options: argparse.Namespace, usual: Resources = _PAPER) -> Resources:
    """The resources of parsed options; `usual` where an option is missing."""
    return replace(usual, **given(Resources, options))
