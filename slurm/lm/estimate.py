"""Cost of a run before launch: parameters, updates, tokens, FLOPs, memory, checkpoints.

Computed from the settings of a plan, without torch and fairseq. None, shown as "?", is unknown: the size of
an --arch other than the plug-in's and transformer_lm, or a training without --max-update.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from alma.flops import Shape
from alma.stream import Stream, is_stream
from slurm.engine.machine import Machine
from slurm.lm.memory import HOST_PROCESS, Memory, Precision
from slurm.lm.plan import Plan
from slurm.lm.settings import FlagValues, tokens_of_batch

SPECIALS = 4  # bos, pad, eos, unk: fairseq's dictionary adds them to the lines of dict.txt
CHECKPOINTS = 2  # files of a training, besides those at intervals: best and last, if none is a link


@dataclass(frozen=True)
class Cost:
    """Cost of one training."""

    directory: Path
    result: Path
    """Marker of the stage's evaluation."""
    settings: FlagValues
    vocabulary: int | None
    """Tokens in dict.txt."""
    machine: Machine
    shared: bool = False
    """Whether another run of the launch trains it, and this one takes over its files."""

    @property
    def on_gpu(self) -> bool:
        """Whether fairseq-train uses GPUs; it does if there are any."""
        return bool(self.machine.gpus) and not self.settings["--cpu"]

    @property
    def processes(self) -> int:
        return self.settings["--distributed-world-size"] or 1

    @cached_property
    def shape(self) -> Shape | None:
        """Of the model; None for an unknown --arch."""
        settings = self.settings
        switch = settings["--arch"].startswith("switch_")
        if self.vocabulary is None or not (switch or settings["--arch"].startswith("transformer_lm")):
            return None
        if settings.get("--moe-freq", 1) < 1:  # refused by fairseq-train
            return None
        args = SimpleNamespace(**{name[2:].replace("-", "_"): value for name, value in settings.items()})
        return Shape.of(args, self.vocabulary + SPECIALS)

    @property
    def parameters(self) -> int | None:
        return self.shape.parameters if self.shape else None

    @property
    def batch(self) -> int | None:
        return tokens_of_batch(self.settings)

    @property
    def updates(self) -> int | None:
        return self.settings["--max-update"] or None

    @property
    def tokens(self) -> int | None:
        """Of the whole training, with every batch full (the last of an epoch may be smaller)."""
        passes = self.settings["--update-freq"][0]  # of a process per update, in the first epoch
        factors = (self.batch, passes, self.processes, self.updates)
        return None if None in factors else math.prod(factor or 0 for factor in factors)

    @property
    def flops(self) -> int | None:
        """Of forward and backward passes, without attention scores, as in the records."""
        if self.shape is None or self.tokens is None:
            return None
        return self.shape.training_flops(self.tokens)

    @property
    def checkpoints(self) -> int:
        """Bytes on disk; 0 if unknown."""
        files = CHECKPOINTS + max(1, self.settings["--keep-interval-updates"])
        return files * Precision(self.settings).saved * (self.parameters or 0)

    @property
    def memory(self) -> int | None:
        """Bytes of one process; None if unknown."""
        if self.shape is None or self.parameters is None or self.batch is None:
            return None
        return Memory(
            self.settings, self.shape, self.parameters, self.batch, self.processes, self.on_gpu
        ).total

    def host_memory(self, processes: int) -> int | None:
        """Bytes of the memory of a node with so many of its processes; None if unknown.

        On GPUs each builds its model in fp32 on the CPU, then all map the same checkpoint, and the first
        copies its state to the CPU to save it.
        """
        if not self.on_gpu:
            return self.memory and processes * self.memory
        if self.parameters is None:
            return None
        checkpoint = Precision(self.settings).saved * self.parameters
        return processes * (int(HOST_PROCESS) + 4 * self.parameters) + 2 * checkpoint


@dataclass(frozen=True)
class Estimate:
    """Cost of a run, first to last stage."""

    out: Path
    learner: str
    costs: tuple[Cost, ...]
    deployed: tuple[Cost, ...]
    """Of the trainings whose models are deployed after the last stage."""
    parameters: int | None
    """Of all models deployed at the end."""
    updates: int | None
    """Of all trainings, as are `tokens` and `flops`."""
    tokens: int | None
    flops: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of one process of the largest training."""
        return max((cost.memory or 0 for cost in self.costs), default=0) or None

    @property
    def evaluation_host_memory(self) -> int | None:
        """Bytes of host memory of the evaluation of all deployed models on a GPU: built, and mapped."""
        return None if self.parameters is None else int(HOST_PROCESS) + 2 * 4 * self.parameters

    @property
    def experts(self) -> str:
        """In the first and the last stage, and members, such as 4->12 or 4@2; - for a dense model."""
        ends = (self.costs[0], self.deployed[-1])
        counts = dict.fromkeys(str(cost.settings["--moe-expert-count"] or "-") for cost in ends)
        members = max(len(self.deployed), self.deployed[0].settings["--members"])
        return "->".join(counts) + (f"@{members}" if members > 1 else "")


def estimate(plan: Plan, vocabulary: int | None, machine: Machine) -> Estimate:
    """Cost of `plan` on `machine`, for a dict.txt of `vocabulary` tokens."""
    costs = {
        training.directory: Cost(
            training.directory,
            spec.directory / "result.json",
            {**spec.settings, "--max-update": training.updates or 0},
            vocabulary,
            machine,
            training.source is not None,
        )
        for spec in plan.stages
        for training in spec.trainings
    }
    deployed = tuple(costs[directory] for directory in plan.stages[-1].models)
    return Estimate(
        plan.out,
        plan.config["learner"],
        tuple(costs.values()),
        deployed,
        parameters=total(cost.parameters for cost in deployed),
        updates=total(cost.updates for cost in costs.values()),
        tokens=total(cost.tokens for cost in costs.values()),
        flops=total(cost.flops for cost in costs.values()),
    )


def vocabulary_size(data: str) -> int | None:
    """Tokens in dict.txt of a stream, or of the first fairseq-preprocess directory; None without dict.txt."""
    if is_stream(data):
        return Stream.load(data).vocab_size
    try:
        with open(Path(data.split(":")[0]) / "dict.txt", encoding="utf-8") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:  # an error of fairseq-train
        return None


def total(numbers: Iterable[int | None]) -> int | None:
    """None if one of them is unknown."""
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)
