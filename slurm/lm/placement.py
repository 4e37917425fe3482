"""The processes of a training, how they share the batch of an update, and what they need of their
nodes.

The batch is the user's: --batch-size (or --max-tokens) x --update-freq x --distributed-world-size.
If the machine has another number of GPUs, --update-freq changes so that the batch stays. Without
--distributed-world-size the batch follows from the first machine of a run, and the run keeps it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from alma.errors import UserError
from alma.records import Run
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.engine.squeue import largest_node
from slurm.lm.estimate import HOST_PROCESS, Estimate, total
from slurm.lm.plan import Request
from slurm.lm.run_options import Placement, tokens_of_batch

_GB = 10**9


def place(request: Request, machine: Machine) -> Request:
    """The request with its `placement` on a machine.

    Raises UserError if the processes cannot share the batch of an update evenly.
    """
    settings = request.settings
    freq = settings["--update-freq"]
    batch = tokens_of_batch(settings)
    requested, kept = settings["--distributed-world-size"], None
    begun = (request.out / "run.json").exists()
    if begun and batch and not requested and (run := Run.read(request.out)).trained:
        before = run.info.get("tokens_per_update")
        kept = before // (batch * freq[0]) if before and before % (batch * freq[0]) == 0 else None
    gpus = 0 if settings["--cpu"] else len(machine.gpus)
    processes = requested or kept or gpus or 1
    if machine.tasks is None:
        processes = min(processes, gpus or processes)
    elif gpus or machine.tasks > 1:
        processes = gpus or machine.tasks
    wanted = requested or kept or processes
    fewer = max(
        n for n in range(1, processes + 1) if not any(passes * wanted % n for passes in freq)
    )
    if fewer < processes:
        if not kept or machine.tasks:
            passes = freq[0] * wanted
            flags = f"--distributed-world-size {fewer} --update-freq {passes // fewer}"
            other = f"`-- {flags}` on {fewer} of them"
            if begun:
                other = f"GPUs for {fewer} processes, or, for a new run, {other}"
            product = f"--update-freq {freq[0]} x --distributed-world-size {wanted}"
            what = f"{processes} processes cannot share the {passes} batches of an update ({product}) evenly"
            raise UserError(f"{what}; for the same update give {other}")
        processes = fewer  # a run in progress goes on, on some of the GPUs
    if settings["--zero-sharding"] == "os" and processes == 1:
        what = "--zero-sharding os divides the optimizer's state among processes, and this training has one"
        raise UserError(
            f"{what}: leave it out, or use several GPUs (--cpu: --distributed-world-size 2)"
        )
    shared = [passes * wanted // processes for passes in freq]
    tokens = batch and batch * freq[0] * wanted
    made = Placement(
        processes, processes if gpus else 0, tokens, by_machine=not requested and wanted > 1
    )
    values = {"--distributed-world-size": processes, "--update-freq": shared}
    return replace(request, settings={**settings, **values}, placement=made)


def with_hosts(resources: Resources, estimates: Sequence[Estimate]) -> Resources:
    """`resources` with the cores and the memory that its GPUs need, at most those of a node.

    Numbers that the user gave stay, and so does everything without GPUs. Without an estimate the
    memory is the cluster's default.
    """
    if not resources.gpus_per_node:
        return resources
    constraint = str(resources.passed.get("constraint", ""))
    most_cores, most_memory = largest_node(resources.partition, constraint) or (math.inf, math.inf)
    sized, costs = resources, [cost for run in estimates for cost in run.costs]
    if resources.cpus_per_task is None:
        workers = max(cost.settings["--num-workers"] for cost in costs)
        processes = resources.gpus_per_node // resources.tasks_per_node
        # 2 for each process that trains and each of its workers that read data, as submitit
        # advises.
        cores = min(2 * (1 + workers) * processes, most_cores // resources.tasks_per_node)
        sized = replace(sized, cpus_per_task=int(cores))
    if resources.mem_gb is None:
        trainings = [cost.host_memory(-(-cost.processes // resources.nodes)) for cost in costs]
        # All deployed models are built, and mapped.
        evaluations = [
            run.parameters and int(HOST_PROCESS) + 2 * 4 * run.parameters for run in estimates
        ]
        if total([*trainings, *evaluations]) is not None:
            most = most_memory / 1024  # SLURM's GB; less than 1: the cluster does not know
            needs = [max(need or 0 for need in needs) for needs in (trainings, evaluations)]
            training, evaluation = (int(min(math.ceil(need / _GB), most)) or None for need in needs)
            sized = replace(sized, mem_gb=training, mem_gb_alone=evaluation)
    return sized
