"""Place a training on a machine: number of processes, batch of each, cores and memory of a node.

The user determines the batch of an update: --batch-size (or --max-tokens) x --update-freq x
--distributed-world-size. On a machine with another number of GPUs, --update-freq is changed so that
the batch stays the same. Without --distributed-world-size, the first machine of a run determines
the batch, and the run keeps it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from alma.cost_table import total
from alma.errors import UserError
from alma.records import Run
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.engine.squeue import largest_node
from slurm.lm.estimate import HOST_PROCESS, Estimate
from slurm.lm.plan import Request
from slurm.lm.run_options import Placement, tokens_of_batch

_GB = 10**9


def place(request: Request, machine: Machine) -> Request:
    """The request with its `placement` on a machine.

    Raises UserError if the processes cannot share the batch of an update evenly.
    """
    settings = request.settings
    _check_gpus(request, machine)
    freq = settings["--update-freq"]
    batch = tokens_of_batch(settings)
    requested = settings["--distributed-world-size"]
    kept = None if requested else _kept_processes(request, batch, freq[0])
    gpus = 0 if settings["--cpu"] else len(machine.gpus)
    processes = requested or kept or gpus or 1
    if machine.tasks is None:
        processes = min(processes, gpus or processes)
    elif gpus or machine.tasks > 1:
        processes = gpus or machine.tasks
    planned = requested or kept or processes  # number of processes for which the batch is meant
    sharing = _most_sharing(processes, [passes * planned for passes in freq])
    if sharing < processes:
        if not kept or machine.tasks:
            raise _uneven(request, processes, planned, sharing)
        processes = sharing  # continue a run on fewer GPUs than the machine has
    if settings["--zero-sharding"] == "os" and processes == 1:
        problem = "--zero-sharding os divides the optimizer's state among processes"
        remedy = "leave it out, or use several GPUs (--cpu: --distributed-world-size 2)"
        raise UserError(f"{problem}, and this training has one: {remedy}")
    placement = Placement(
        processes=processes,
        gpus=processes if gpus else 0,
        tokens=batch and batch * freq[0] * planned,
        by_machine=not requested and planned > 1,
    )
    values = {
        "--distributed-world-size": processes,
        "--update-freq": [passes * planned // processes for passes in freq],
    }
    return replace(request, settings={**settings, **values}, placement=placement)


def _check_gpus(request: Request, machine: Machine) -> None:
    """UserError: several processes of transformers' Trainer on a machine without GPUs."""
    processes = request.settings["--distributed-world-size"] or 1
    if request.engine and processes > 1 and not (machine.gpus or request.settings["--cpu"]):
        problem = "each process needs a GPU, and none is here"
        raise UserError(f"--num_processes {processes}: {problem}: give --use_cpu too")


def _kept_processes(request: Request, batch: int | None, passes: int) -> int | None:
    """Number of processes with which the run began; None: unknown, or a new run.

    Derived from the tokens of an update that the run has recorded.
    """
    if not batch or not _is_begun(request):
        return None
    run = Run.read(request.out)
    tokens = run.info.get("tokens_per_update")
    if not run.trained or not tokens or tokens % (batch * passes):
        return None
    return tokens // (batch * passes)


def _is_begun(request: Request) -> bool:
    return (request.out / "run.json").exists()


def _most_sharing(processes: int, batches: Sequence[int]) -> int:
    """The largest number of processes, up to `processes`, that divides each number of batches."""
    for count in range(processes, 1, -1):
        if not any(number % count for number in batches):
            return count
    return 1


def _uneven(request: Request, processes: int, planned: int, sharing: int) -> UserError:
    """The error if `processes` cannot share an update evenly.

    It suggests flags for the largest number of processes that can, `sharing`.
    """
    passes = request.settings["--update-freq"][0]
    batches = passes * planned
    world = "--distributed-world-size"
    accumulation = "--update-freq"
    if request.engine:
        world = "--num_processes"
        accumulation = "--gradient_accumulation_steps"
    flags = f"{world} {sharing} {accumulation} {batches // sharing}"
    remedy = f"`-- {flags}` on {sharing} of them"
    if _is_begun(request):
        remedy = f"GPUs for {sharing} processes, or, for a new run, {remedy}"
    product = f"{accumulation} {passes} x {world} {planned}"
    problem = f"cannot share the {batches} batches of an update ({product}) evenly"
    return UserError(f"{processes} processes {problem}; for the same update give {remedy}")


def with_hosts(resources: Resources, estimates: Sequence[Estimate]) -> Resources:
    """Add the cores and host memory that the trainings need to `resources`, if it has GPUs.

    They are at most those of the largest node. Numbers that the user gave are not changed. If the
    memory cannot be estimated, it stays the cluster's default.
    """
    if not resources.gpus_per_node:
        return resources
    constraint = str(resources.passed.get("constraint", ""))
    node = largest_node(resources.partition, constraint)
    most_cores, most_memory = node or (math.inf, math.inf)
    costs = [cost for run in estimates for cost in run.costs]
    sized = resources
    if resources.cpus_per_task is None:
        workers = max(cost.settings["--num-workers"] for cost in costs)
        processes = resources.gpus_per_node // resources.tasks_per_node
        # submitit advises 2 cores for each training process and for each data worker.
        cores = min(2 * (1 + workers) * processes, most_cores // resources.tasks_per_node)
        sized = replace(sized, cpus_per_task=int(cores))
    if resources.mem_gb is None:
        trainings = [cost.host_memory(-(-cost.processes // resources.nodes)) for cost in costs]
        evaluations = [_memory_of_evaluation(run) for run in estimates]
        if total([*trainings, *evaluations]) is not None:
            most_gb = most_memory / 1024  # SLURM's GB; below 1 if the cluster does not configure it
            sized = replace(
                sized,
                mem_gb=_largest_in_gb(trainings, most_gb),
                mem_gb_alone=_largest_in_gb(evaluations, most_gb),
            )
    return sized


def _memory_of_evaluation(run: Estimate) -> int | None:
    """Bytes of host memory of an evaluation, which builds and memory-maps all deployed models."""
    return run.parameters and int(HOST_PROCESS) + 2 * 4 * run.parameters


def _largest_in_gb(needs: Sequence[int | None], most_gb: float) -> int | None:
    """The largest need in GB, rounded up, at most `most_gb`; None: less than 1."""
    largest = max(need or 0 for need in needs)
    return int(min(math.ceil(largest / _GB), most_gb)) or None
