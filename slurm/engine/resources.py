"""The resources that a job requests from SLURM: flags, and their names in submitit."""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alma.errors import UserError, require_extra
from alma.options import add_options, check_ranges, flag_of, given, option, options_of
from slurm.engine.jobs import shield_of_script
from slurm.engine.machine import Machine
from slurm.engine.partitions import Nodes, longest_limit, most_gpus, nodes_of
from slurm.engine.squeue import fits_constraint

_VOLTA = 7.0  # compute capability of a V100
_SET_HERE = re.compile(  # options of sbatch that --sbatch refuses: a flag or the launcher sets them
    r"partition|nodes|(n?tasks|gpus|cpus|mem)(-per-\w+)?|time|job-name"
    r"|output|error|input|open-mode|chdir"
    r"|dependency|array|(no-)?requeue|kill-on-invalid-dep|wrap|wait|test-only|parsable"
)


@dataclass(frozen=True)
class Resources:
    """Resources of one training; the defaults are the paper's node of 8 GPUs.

    Raises UserError for a number that is too small, and for an option in --sbatch that another flag
    sets.
    """

    partition: str | None = option(None, "partition to submit to", metavar="NAME")
    nodes: int = option(1, "nodes; their GPUs train together", at_least=1)
    gpus_per_node: int = option(8, "GPUs per node; 0: none")
    tasks_per_node: int = option(
        1, "processes per node; 1: fairseq starts one for each GPU", at_least=1
    )
    cpus_per_task: int | None = option(None, "CPU cores per task; 0: the cluster's default")
    mem_gb: int | None = option(None, "memory per node in GB; 0: the cluster's default")
    timeout_min: int = option(
        1440,
        "time limit in minutes; jobs save 2 minutes before, are requeued and resume",
        at_least=5,
    )
    sbatch: Sequence[str] | None = option(
        None,
        "another option of sbatch, such as account=nlp or exclusive; may repeat",
        metavar="KEY[=VALUE]",
    )
    mem_gb_alone: int | None = None
    """Memory in GB of a job of one process; None: its share of `mem_gb`."""

    def __post_init__(self):
        check_ranges(self)
        for key, value in self.passed.items():
            words = f"--sbatch {key}" if value is True else f"--sbatch {key}={value}"
            if not re.fullmatch(r"[a-z][a-z-]+", key) or "\n" in str(value):
                raise UserError(
                    f"{words}: give the long name of an option of sbatch, such as account=NAME"
                )
            if _SET_HERE.fullmatch(key):
                raise UserError(
                    f"{words}: alma sets it, by a flag such as --timeout-min or for each job"
                )
            if key == "signal" and not str(value).startswith("USR2@"):
                raise UserError(f"{words}: jobs save on USR2: give the seconds as signal=USR2@300")
        if self.gpus_per_node and self.tasks_per_node not in (1, self.gpus_per_node):
            both = (
                f"--tasks-per-node {self.tasks_per_node}, but --gpus-per-node {self.gpus_per_node}"
            )
            raise UserError(f"{both}: give as many tasks as GPUs, or one, or --gpus-per-node 0")

    @property
    def passed(self) -> dict[str, str | bool]:
        """The options of --sbatch; True for one without a value."""
        pairs = (words.removeprefix("--").partition("=") for words in self.sbatch or ())
        return {key: value if equals else True for key, equals, value in pairs}

    def parameters(self, name: str, dependency: str | None = None) -> dict[str, Any]:
        """Arguments of submitit's SlurmExecutor.update_parameters for a job called `name`.

        They also make srun take over --cpus-per-task (not the default since SLURM 22.05), and end a
        job when one of its processes dies.
        """
        passed = {
            "signal": "USR2@120",
            **self.passed,
            "requeue": True,
            "kill-on-invalid-dep": "yes",
        }
        gpus = self.gpus_per_node or None
        gres = passed.pop("gres", None)
        if gpus and gres:
            gres = f"{gres}:{gpus}"
            gpus = None
        cores = self.cpus_per_task or None
        before, after = shield_of_script()
        srun_args = ["--kill-on-bad-exit=1"]
        if cores:
            srun_args.append(f"--cpus-per-task={cores}")
        return {
            "job_name": name,
            "dependency": dependency,
            "partition": self.partition,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "gpus_per_node": gpus,
            "gres": gres,
            "cpus_per_task": cores,
            "mem": f"{self.mem_gb}GB" if self.mem_gb else None,
            "time": self.timeout_min,
            "srun_args": srun_args,
            "setup": before,
            "teardown": after,
            "wckey": None,  # submitit would set its own, which a cluster may not accept
            "stderr_to_stdout": True,
            "additional_parameters": passed,
        }

    def script(
        self,
        command: str,
        folder: Path,
        name: str,
        dependency: str | None = None,
        count: int | None = None,
    ) -> str:
        """The batch script that submitit would submit.

        `count` is the number of elements of an array (None: a single job); logs go to `folder`.
        """
        from submitit.slurm.slurm import _make_sbatch_string

        options = self.parameters(name, dependency)
        return _make_sbatch_string(command, folder, map_count=count, **options)

    def machine(self) -> Machine:
        """The machine on which a training will run, as far as the resources tell.

        GPUs are of unknown size; memory is known if --mem-gb is given. If the constraint or gres of
        --sbatch names a V100, the GPUs' compute capability is known.
        """
        memory = self.mem_gb * 10**9 if self.mem_gb else None
        gpus = (sys.maxsize,) * self.gpus_per_node * self.nodes
        named = " ".join(str(self.passed.get(key, "")) for key in ("constraint", "gres"))
        capability = _VOLTA if re.search(r"v100|volta|sm_?70", named, re.IGNORECASE) else None
        return Machine(gpus, memory, self.tasks_per_node * self.nodes, capability)

    def alone(self) -> "Resources":
        """For a job of one process on at most one GPU, such as an evaluation."""
        few: dict[str, Any] = {
            "nodes": 1,
            "tasks_per_node": 1,
            "gpus_per_node": min(1, self.gpus_per_node),
        }
        gpus = max(1, self.gpus_per_node)  # the job gets 1 / gpus of the node
        if self.mem_gb:
            few["mem_gb"] = self.mem_gb_alone or max(1, self.mem_gb // gpus)
        if self.cpus_per_task and self.gpus_per_node:
            few["cpus_per_task"] = max(1, self.cpus_per_task * self.tasks_per_node // gpus)
        return replace(self, **few)


_PAPER = Resources()
WAIT = "with --cluster slurm: wait until all jobs have ended; exit with 1 if one failed"


def add_cluster(group: argparse._ArgumentGroup, *places: str) -> None:
    """Add --cluster with the choices `places`, the first of which is the default."""
    text = f"where to run; local: on this machine; slurm: as SLURM jobs (default: {places[0]})"
    group.add_argument("--cluster", choices=places, default=places[0], help=text)


def add_flags(
    parser: argparse.ArgumentParser, usual: Resources = _PAPER, job: str = "training"
) -> None:
    """Add the flags of `Resources`, spelt as in sbatch and submitit, with the defaults `usual`."""
    about = f"Resources of each {job}, for --cluster slurm. Flags without a default use the "
    about += "cluster's; for GPUs `alma train` works out the cores and the memory."
    group = parser.add_argument_group("SLURM", about)
    repeated = {"sbatch": {"action": "append", "type": str}}
    add_options(group, options_of(Resources).values(), usual, changes=repeated)


def check_cluster(
    options: argparse.Namespace,
    slurm: Sequence[str] = ("dry_run", "wait"),
    local: Sequence[str] = (),
) -> None:
    """Raise UserError for options that contradict --cluster, or if `--cluster slurm` finds no
    SLURM or no submitit.

    slurm, local: further options for SLURM only and for this machine only; the fields of
    `Resources` are for SLURM only. An option that is None or False was not given.
    """
    on_slurm = options.cluster == "slurm"
    names = local if on_slurm else (*options_of(Resources), *slurm)
    values = {name: getattr(options, name, None) for name in names}
    wrong = [
        flag_of(name) for name, value in values.items() if value is not None and value is not False
    ]
    if wrong:
        where = (
            "not with --cluster slurm, only on this machine"
            if on_slurm
            else "only with --cluster slurm"
        )
        raise UserError(f"{', '.join(wrong)}: {where}")
    if on_slurm:
        require_extra("cluster", "--cluster slurm")
    if on_slurm and not getattr(options, "dry_run", False) and not shutil.which("sbatch"):
        raise UserError("no SLURM here (no sbatch): run this on a machine of the cluster")
    if on_slurm and (ignored := sorted(name for name in os.environ if name.startswith("SBATCH_"))):
        print(
            f"ignored: {', '.join(ignored)}: give --partition or --sbatch KEY=VALUE",
            file=sys.stderr,
        )


def read(options: argparse.Namespace, usual: Resources = _PAPER) -> Resources:
    """The resources of parsed options; `usual` where an option is missing.

    With --cluster slurm, defaults fit the partition where sinfo tells its time limit and the GPUs
    of its nodes. UserError: --timeout-min is above that limit.
    """
    chosen = given(Resources, options)
    job_resources = replace(usual, **chosen)
    if options.cluster != "slurm":
        return job_resources
    nodes = _fitting_nodes(job_resources)
    limit = longest_limit(nodes)
    # A QOS may have a limit of its own, which replaces that of the partition.
    if (
        limit is not None
        and job_resources.timeout_min > limit
        and "qos" not in job_resources.passed
    ):
        place = f"partition {' or '.join(sorted({entry.partition for entry in nodes}))}"
        if "timeout_min" in chosen:
            minutes = job_resources.timeout_min
            problem = f"--timeout-min {minutes}: the time limit of {place} is {limit} minutes"
            raise UserError(f"{problem}: give at most {limit}, or another --partition")
        job_resources = replace(job_resources, timeout_min=limit)
        print(f"--timeout-min {limit}: the time limit of {place}", file=sys.stderr)
    gpus = most_gpus(nodes, _kind_of_gpus(job_resources))
    usual_gpus = job_resources.gpus_per_node
    if gpus and usual_gpus and gpus != usual_gpus and "gpus_per_node" not in chosen:
        tasks = job_resources.tasks_per_node
        if tasks in (1, gpus):
            job_resources = replace(job_resources, gpus_per_node=gpus)
            print(f"--gpus-per-node {gpus}: the GPUs of a node there", file=sys.stderr)
    return job_resources


def _fitting_nodes(job_resources: Resources) -> list[Nodes]:
    """The partition's nodes that have the features of --sbatch constraint, or all of them."""
    nodes = nodes_of(job_resources.partition)
    constraint = str(job_resources.passed.get("constraint", ""))
    fitting = [entry for entry in nodes if fits_constraint(entry.features, constraint)]
    return fitting or nodes


def _kind_of_gpus(job_resources: Resources) -> str:
    """The type of GPU that --sbatch gres asks for; empty: any."""
    words = str(job_resources.passed.get("gres", "")).split(":")
    return words[1] if words[0] == "gpu" and len(words) > 1 else ""
