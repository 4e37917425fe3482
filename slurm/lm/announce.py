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
from slurm.lm.plan import Plan
from slurm.lm.record import run_config

_VOCABULARY = 50_260  # the paper's
_GB = 1e9


def announce(plans: Sequence[Plan], machine: Machine, options: argparse.Namespace) -> list[Estimate]:
    """Print the cost of all runs, the programs of others that they start, and with --verbose their
    commands; return the cost. Writes nothing.

    Raises UserError if a run does not fit `machine` (with --dry-run it only says so), or its directory was
    trained with other settings.
    """
    sizes = {plan.request.stream: vocabulary_size(plan.request.stream) for plan in plans}
    if options.megabatches and None in sizes.values():
        say(f"assumed: {options.megabatches} mega-batches, and a dictionary of {_VOCABULARY:,} tokens")
        sizes = {stream: size or _VOCABULARY for stream, size in sizes.items()}
    estimates = [estimate(plan, sizes[plan.request.stream], machine) for plan in plans]
    say(table(estimates))
    for program in dict.fromkeys(chain(*map(programs, plans))):
        say(program)
    for spec in (spec for plan in plans if options.verbose for spec in plan.stages):
        commands = [*(one.command for one in spec.trainings), spec.evaluate]
        say("\n".join(map(shlex.join, commands)))
    try:
        check_fit(estimates)
    except UserError as error:
        if not options.dry_run:
            raise
        say(f"warning: {error}")
    unable = misfit(machine)
    if unable and any(cost.on_gpu for run in estimates for cost in run.costs):
        say(f"warning: {unable}")
    for plan in [] if options.megabatches else plans:
        Run.check(plan.out, *run_config(plan))
    return estimates


def programs(plan: Plan) -> list[str]:
    """Lines about code of others that a run starts or imports."""
    request = plan.request
    given = {"--trainer": request.trainer, "--evaluate": request.evaluate}
    given["--user-dir"] = " ".join(request.flags.get("--user-dir", ())) or None
    return [f"runs code: {flag}: {words}" for flag, words in given.items() if words]


def table(estimates: Sequence[Estimate]) -> str:
    """A line for each run, and the totals of several runs."""

    def work(costs: Sequence[Cost]) -> list[str]:
        updates, flops = total(cost.updates for cost in costs), total(cost.flops for cost in costs)
        tokens = _text(total(cost.tokens for cost in costs), 1e6, "M")
        return ["?" if updates is None else f"{updates:,}", tokens, _text(flops, 1e12)]

    lines = [["run", "learner", "experts", "parameters", "updates", "tokens", "TFLOPs", "GB/process"]]
    for run in estimates:
        parameters, memory = _text(run.parameters, 1e6, "M"), _text(run.memory, _GB)
        lines.append([str(run.out), run.learner, run.experts, parameters, *work(run.costs), memory])
    if len(estimates) > 1:
        trained = [cost for run in estimates for cost in run.costs if not cost.shared]
        lines.append(["total", "", "", "", *work(trained), ""])
    return as_text(lines)


def check_fit(estimates: Sequence[Estimate]) -> None:
    """Raise UserError if the rest of a run does not fit the memory of its machine, or its fp16 a CPU."""
    for run in estimates:
        left = [cost for cost in run.costs if not cost.result.exists()]
        if not left:
            continue
        cost = max(left, key=lambda cost: cost.memory or 0)
        if cost.settings["--fp16"] and not cost.settings["--memory-efficient-fp16"] and not cost.on_gpu:
            why = "this training runs on a CPU" if cost.machine.gpus else "this machine has none"
            raise UserError(f"{run.out}: --fp16 needs a GPU, and {why}: `-- --fp16=false` turns it off")
        processes = 1 if cost.on_gpu else cost.processes  # which share a CPU's memory
        there = min(cost.machine.gpus) if cost.on_gpu else cost.machine.memory
        need = (cost.memory or 0) * processes
        if there is not None and need > there:
            several = f" for {processes} processes" if processes > 1 else ""
            what = "a GPU here has" if cost.on_gpu else "this machine has free"
            needs = f"training needs about {need / _GB:,.1f} GB of memory{several}"
            flags = " or ".join(_memory_flags(cost))
            remedy = f"give a smaller --batch-size with a larger --update-freq, or {flags}"
            raise UserError(f"{run.out}: {needs}, and {what} {there / _GB:,.1f} GB: {remedy}, after the `--`")


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
