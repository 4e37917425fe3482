"""What is printed before a launch, and the check that the remaining stages fit in memory."""

import argparse
import shlex
from collections.abc import Sequence
from itertools import chain

from alma.errors import UserError
from alma.records import Run
from alma.tables import as_text
from slurm.engine.cards import misfit
from slurm.engine.machine import Machine
from slurm.engine.terminal import say
from slurm.lm.estimate import Cost, Estimate, estimate, total, vocabulary_size
from slurm.lm.late import announcement
from slurm.lm.plan import Plan
from slurm.lm.record import run_config

_VOCABULARY = 50_260  # the paper's
_GB = 1e9


def announce(
    plans: Sequence[Plan], machine: Machine, options: argparse.Namespace
) -> list[Estimate]:
    """Print the cost of all runs and the programs of others that they start; return the cost.

    With --verbose it prints all commands too. Writes nothing. Raises UserError if a run does not
    fit `machine` (with --dry-run it only says so), or its directory was trained with other
    settings.
    """
    sizes = {plan.request.stream: vocabulary_size(plan.request.stream) for plan in plans}
    if options.megabatches and None in sizes.values():
        dictionary = f"a dictionary of {_VOCABULARY:,} tokens"
        say(f"assumed: {options.megabatches} mega-batches, and {dictionary}")
        sizes = {stream: size or _VOCABULARY for stream, size in sizes.items()}
    estimates = [estimate(plan, sizes[plan.request.stream], machine) for plan in plans]
    say(table(estimates))
    for plan in plans:
        for line in announcement(plan, sizes[plan.request.stream], machine):
            say(line)
    for program in dict.fromkeys(chain(*map(programs, plans))):
        say(program)
    if options.verbose:
        _say_commands(plans)
    try:
        check_fit(estimates)
    except UserError as error:
        if not options.dry_run:
            raise
        say(f"warning: {error}")
    unable = misfit(machine)
    if unable and any(cost.on_gpu for run in estimates for cost in run.costs):
        say(f"warning: {unable}")
    if not options.megabatches:
        for plan in plans:
            Run.check(plan.out, *run_config(plan))
    return estimates


def _say_commands(plans: Sequence[Plan]) -> None:
    for plan in plans:
        for spec in plan.stages:
            commands = [*(training.command for training in spec.trainings), spec.evaluate]
            say("\n".join(map(shlex.join, commands)))


def programs(plan: Plan) -> list[str]:
    """Lines about code of others that a run starts or imports."""
    request = plan.request
    programs = {"--trainer": request.trainer, "--evaluate": request.evaluate}
    programs["--user-dir"] = " ".join(request.flags.get("--user-dir", ())) or None
    return [f"runs code: {flag}: {words}" for flag, words in programs.items() if words]


def table(estimates: Sequence[Estimate]) -> str:
    """A line for each run, and the totals of several runs."""
    columns = "run learner experts parameters updates tokens TFLOPs GB/process"
    lines = [columns.split()]
    for run in estimates:
        cells = [str(run.out), run.learner, run.experts, _text(run.parameters, 1e6, "M")]
        lines.append([*cells, *_work(run.costs), _text(run.memory, _GB)])
    if len(estimates) > 1:
        own_costs = [cost for run in estimates for cost in run.costs if not cost.shared]
        lines.append(["total", "", "", "", *_work(own_costs), ""])
    return as_text(lines)


def _work(costs: Sequence[Cost]) -> list[str]:
    """Cells of the table: updates, tokens and TFLOPs of some trainings."""
    updates = total(cost.updates for cost in costs)
    tokens = total(cost.tokens for cost in costs)
    flops = total(cost.flops for cost in costs)
    return [
        "?" if updates is None else f"{updates:,}",
        _text(tokens, 1e6, "M"),
        _text(flops, 1e12),
    ]


def check_fit(estimates: Sequence[Estimate]) -> None:
    """Raise UserError if the rest of a run exceeds the memory, or needs a GPU for its fp16."""
    for run in estimates:
        remaining = [cost for cost in run.costs if not cost.result.exists()]
        if remaining:
            largest = max(remaining, key=lambda cost: cost.memory or 0)
            _check_fp16(run, largest)
            _check_memory(run, largest)


def _check_fp16(run: Estimate, cost: Cost) -> None:
    uses_fp16 = cost.settings["--fp16"] and not cost.settings["--memory-efficient-fp16"]
    if uses_fp16 and not cost.on_gpu:
        reason = "this training runs on a CPU" if cost.machine.gpus else "this machine has none"
        remedy = "`-- --fp16=false` turns it off"
        raise UserError(f"{run.out}: --fp16 needs a GPU, and {reason}: {remedy}")


def _check_memory(run: Estimate, cost: Cost) -> None:
    processes = 1 if cost.on_gpu else cost.processes  # which share a CPU's memory
    available = min(cost.machine.gpus) if cost.on_gpu else cost.machine.memory
    needed = (cost.memory or 0) * processes
    if available is None or needed <= available:
        return
    needs = f"training needs about {needed / _GB:,.1f} GB of memory"
    if processes > 1:
        needs += f" for {processes} processes"
    place = "a GPU here has" if cost.on_gpu else "this machine has free"
    flags = " or ".join(_memory_flags(cost))
    remedy = f"give a smaller --batch-size with a larger --update-freq, or {flags}"
    limit = f"{place} {available / _GB:,.1f} GB"
    raise UserError(f"{run.out}: {needs}, and {limit}: {remedy}, after the `--`")


def _memory_flags(cost: Cost) -> list[str]:
    """Flags with which the training would need less memory."""
    flags = ["--checkpoint-activations"]
    if cost.on_gpu and not cost.half:
        flags.append("--fp16")
    divided = cost.settings["--zero-sharding"] == "os" or cost.settings.get("--moe-expert-parallel")
    if cost.processes > 1 and not divided:
        flags.append("--zero-sharding os")
    return flags


def _text(number: int | None, scale: float, name: str = "") -> str:
    if number is None:
        return "?"
    scaled = number / scale
    return f"{scaled:,.1f}{name}" if scaled < 1000 else f"{scaled:,.0f}{name}"
