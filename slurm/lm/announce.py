"""Print the cost of a launch before it starts, and check that its stages fit in memory."""

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from alma.cost_table import (
    GIGA,
    MEGA,
    TERA,
    cost_table,
    in_bytes,
    scaled,
    total,
    with_commas,
)
from alma.errors import UserError
from alma.records import Run
from alma.trainer import TRAINED
from slurm.engine.cards import misfit
from slurm.engine.machine import Machine
from slurm.engine.terminal import say
from slurm.lm.estimate import Cost, Estimate, estimate, vocabulary_size
from slurm.lm.late import announcement
from slurm.lm.plan import Plan
from slurm.lm.planned import Training
from slurm.lm.record import run_config

_VOCABULARY = 50_260  # the paper's
_COLUMNS = ("run", "learner", "experts", "parameters", "updates", "tokens", "TFLOPs", "GB/process")


def announce(
    plans: Sequence[Plan], machine: Machine, options: argparse.Namespace
) -> list[Estimate]:
    """Print the estimated cost of all runs, and warn of foreign code that they run.

    Returns the estimates. With --verbose all commands are printed too. Writes no file. Raises
    UserError if a run does not fit on `machine` (with --dry-run this is only printed), or if its
    directory was trained with other settings.
    """
    sizes = {plan.request.stream: vocabulary_size(plan.request.stream) for plan in plans}
    if options.megabatches and None in sizes.values():
        dictionary = f"a dictionary of {_VOCABULARY:,} tokens"
        say(f"assumed: {options.megabatches} mega-batches, and {dictionary}")
        sizes = {stream: size or _VOCABULARY for stream, size in sizes.items()}
    estimates = [estimate(plan, sizes[plan.request.stream], machine) for plan in plans]
    say(table(estimates))
    _say_about_runs(plans, sizes, machine)
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


def _say_about_runs(
    plans: Sequence[Plan], sizes: Mapping[str, int | None], machine: Machine
) -> None:
    """Print the engine and late evaluations of each run, and the disk that they need."""
    for plan in plans:
        if plan.request.engine:
            say(_by_transformers(plan))
        for line in announcement(plan, sizes[plan.request.stream], machine):
            say(line)
    for line in disk_lines(plans):
        say(line)


def _by_transformers(plan: Plan) -> str:
    """What the engine transformers trains: model, weights that change, batch of an update."""
    settings = plan.stages[0].settings
    parameters = f"{settings['parameters']:,} parameters"
    if settings["trained_parameters"] < settings["parameters"]:
        parameters += f", of which {settings['trained_parameters']:,} are trained"
    cost = Cost(plan.out, settings, None, Machine((), None))
    blocks = settings["--batch-size"] * settings["--update-freq"][0] * cost.processes
    length = settings["--tokens-per-sample"] + 1
    update = f"an update has {blocks:,} blocks of {length:,} tokens"
    return f"{plan.out}: transformers trains {settings['--arch']}: {parameters}; {update}"


def _say_commands(plans: Sequence[Plan]) -> None:
    for plan in plans:
        for spec in plan.stages:
            commands = [*(training.command for training in spec.trainings), spec.evaluate]
            say("\n".join(map(shlex.join, commands)))


def disk_lines(plans: Sequence[Plan]) -> list[str]:
    """Lines about the disk that runs need, where the engine tells it; a warning if it is full."""
    with_disk = [plan for plan in plans if "model_bytes" in plan.request.settings]
    lines = [_disk_line(plan) for plan in with_disk]
    models = 0  # bytes of those that are to be trained
    while_training = 0
    for plan in with_disk:
        missing = [training for training in _of_its_own(plan) if not _is_trained(training)]
        models += len(missing) * plan.request.settings["model_bytes"]
        if missing:
            while_training = max(while_training, _bytes_while_training(plan))
    if not models:
        return lines
    needed = models + while_training
    free = min(_free_bytes(plan.out) for plan in with_disk)
    if needed > free:
        problem = f"the disk has {in_bytes(free)} free, and {in_bytes(needed)} are needed"
        lines.append(f"warning: {problem}: free some space, or choose another --out")
    return lines


def _disk_line(plan: Plan) -> str:
    """What the trainings of a run keep, and what one needs while it runs."""
    settings = plan.request.settings
    trainings = len(_of_its_own(plan))
    whole = in_bytes(trainings * settings["model_bytes"])
    line = f"{plan.out}: disk: {trainings} models, {whole}; {in_bytes(_bytes_while_training(plan))}"
    checkpoint = in_bytes(settings["checkpoint_bytes"])
    return f"{line} more during a training, {settings['checkpoints']} checkpoints of {checkpoint}"


def _of_its_own(plan: Plan) -> list[Training]:
    """The trainings of a run but for those whose files are links to another run's."""
    trainings = chain(*(spec.trainings for spec in plan.stages))
    return [training for training in trainings if training.source is None]


def _is_trained(training: Training) -> bool:
    return (training.directory / TRAINED).exists()


def _bytes_while_training(plan: Plan) -> int:
    """Bytes of the checkpoints of a training, which go when its model is written."""
    return plan.request.settings["checkpoints"] * plan.request.settings["checkpoint_bytes"]


def _free_bytes(folder: Path) -> int:
    """The free bytes of the disk on which a folder is, or will be."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def programs(plan: Plan) -> list[str]:
    """Lines about foreign code that a run starts or imports: --trainer, --evaluate, --user-dir."""
    request = plan.request
    programs = {"--trainer": request.trainer, "--evaluate": request.evaluate}
    programs["--user-dir"] = " ".join(request.flags.get("--user-dir", ())) or None
    return [f"runs code: {flag}: {words}" for flag, words in programs.items() if words]


def table(estimates: Sequence[Estimate]) -> str:
    """A line for each run, and the totals of several runs."""
    runs = []
    for run in estimates:
        about_model = {
            "run": str(run.out),
            "learner": run.learner,
            "experts": run.experts,
            "parameters": scaled(run.parameters, MEGA, "M"),
            "GB/process": scaled(run.memory, GIGA),
        }
        runs.append(about_model | _work(run.costs))
    sums = None
    if len(estimates) > 1:
        costs_once = [cost for run in estimates for cost in run.costs if not cost.shared]
        sums = {"run": "total"} | _work(costs_once)
    return cost_table(_COLUMNS, runs, sums)


def _work(costs: Sequence[Cost]) -> dict[str, str]:
    """Cells of the table: updates, tokens and TFLOPs of some trainings."""
    return {
        "updates": with_commas(total(cost.updates for cost in costs)),
        "tokens": scaled(total(cost.tokens for cost in costs), MEGA, "M"),
        "TFLOPs": scaled(total(cost.flops for cost in costs), TERA),
    }


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
    processes = 1 if cost.on_gpu else cost.processes  # on a CPU, all processes share the memory
    available = min(cost.machine.gpus) if cost.on_gpu else cost.machine.memory
    needed = (cost.memory or 0) * processes
    if available is None or needed <= available:
        return
    needs = f"training needs about {needed / GIGA:,.1f} GB of memory"
    if processes > 1:
        needs += f" for {processes} processes"
    place = "a GPU here has" if cost.on_gpu else "this machine has free"
    flags = " or ".join(_memory_flags(cost))
    remedy = f"give a smaller --batch-size with a larger --update-freq, or {flags}"
    limit = f"{place} {available / GIGA:,.1f} GB"
    raise UserError(f"{run.out}: {needs}, and {limit}: {remedy}, after the `--`")


def _memory_flags(cost: Cost) -> list[str]:
    """Flags that would reduce the memory of the training, for the error message."""
    flags = ["--checkpoint-activations"]
    if cost.on_gpu and not cost.half:
        flags.append("--fp16")
    divided = cost.settings["--zero-sharding"] == "os" or cost.settings.get("--moe-expert-parallel")
    if cost.processes > 1 and not divided:
        flags.append("--zero-sharding os")
    return flags
