"""Cost of a run before launch: parameters, updates, tokens, FLOPs, memory.

Computed from the settings of a plan, without torch and fairseq. None, shown as "?", is unknown: the size of
an --arch other than the plug-in's and transformer_lm, or a training without --max-update and
--max-epoch, or with --max-epoch of a stream that does not exist yet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from alma.flops import Shape
from alma.stream import SPECIALS, Stream, is_stream
from slurm.engine.machine import Machine
from slurm.lm.plan import FlagValues, Plan, tokens_of_batch

PROCESS = 1.0e9  # bytes of a process without a model: fairseq and torch on a CPU, or a GPU's CUDA context
HOST_PROCESS = 4.0e9
"""Bytes of host memory of a process on a GPU without a model: torch, CUDA and the buffers of NCCL. A guess on
the safe side, not measured."""
_MOMENTS = {"adafactor": 0, "sgd": 0, "adagrad": 1, "nag": 1}
"""Numbers of the optimizer for a parameter, in fp32; others have 2, as Adam."""
_EFFICIENT = ("--memory-efficient-fp16", "--memory-efficient-bf16")


@dataclass(frozen=True)
class Cost:
    """Cost of one training."""

    result: Path  # marker of the stage's evaluation
    settings: FlagValues
    vocabulary: int | None  # tokens in dict.txt
    machine: Machine
    shared: bool = False  # whether another run of the launch trains it, and this one takes over its files
    epoch_tokens: int | None = None  # of --max-epoch; None: follows from the updates

    @property
    def on_gpu(self) -> bool:
        """Whether fairseq-train uses GPUs; it does if there are any."""
        return bool(self.machine.gpus) and not self.settings["--cpu"]

    @property
    def half(self) -> bool:
        """Whether weights, gradients and activations have 2 bytes instead of 4."""
        return any(self.settings.get(flag) for flag in ("--fp16", "--bf16", *_EFFICIENT))

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
    def updates(self) -> int | None:
        return self.settings["--max-update"] or None

    @property
    def tokens(self) -> int | None:
        """Of all epochs; else of the updates, with every batch full (the last of an epoch may be smaller)."""
        if self.epoch_tokens is not None:
            return self.epoch_tokens
        passes = self.settings["--update-freq"][0]  # of a process per update, in the first epoch
        factors = (tokens_of_batch(self.settings), passes, self.processes, self.updates)
        return None if None in factors else math.prod(factor or 0 for factor in factors)

    @property
    def flops(self) -> int | None:
        """Of forward and backward passes, without attention scores, as in the records."""
        return None if self.shape is None or self.tokens is None else self.shape.training_flops(self.tokens)

    @property
    def _has_master(self) -> bool:
        """Whether FP16Optimizer keeps weights and gradients in fp32 besides the model's."""
        return self.half and not any(self.settings.get(flag) for flag in _EFFICIENT)

    @property
    def _moments(self) -> int:
        """Bytes of a parameter in the optimizer's moments, in fp32."""
        return 4 * _MOMENTS.get(self.settings["--optimizer"], 2)

    @property
    def _average(self) -> int:
        """Bytes of a parameter in a moving average of the weights, in fp32."""
        return 4 if self.settings.get("--store-ema") else 0

    @property
    def _sharded(self) -> bool:
        """Whether each process has the moments of its share of the parameters alone."""
        return self.settings["--zero-sharding"] == "os" and self.processes > 1

    @property
    def _offloaded(self) -> int:
        """Bytes of activations that one process keeps on the host: the input of each layer."""
        batch = tokens_of_batch(self.settings)
        if self.shape is None or batch is None or not self.on_gpu:
            return 0
        if not self.settings["--offload-activations"]:
            return 0
        width = 2 if self.half else 4
        return self.shape.members * self.shape.layers * batch * self.shape.dim * width

    @property
    def saved(self) -> int:
        """Bytes of a checkpoint: fp32 weights, twice with FP16Optimizer, moments, average; 0 if unknown."""
        weight = 4 * (1 + self._has_master) + self._moments + self._average
        return weight * (self.parameters or 0)

    def host_memory(self, processes: int) -> int | None:
        """Bytes of the memory of a node with so many of its processes; None if unknown.

        On GPUs each builds its model in fp32 on the CPU, then all map the same checkpoint, and the first
        copies its state to the CPU to save it; with --zero-sharding each copies the state of its share.
        """
        if not self.on_gpu:
            return self.memory and processes * self.memory
        if self.parameters is None:
            return None
        copies = 3 if self._sharded else 2
        process = int(HOST_PROCESS) + 4 * self.parameters + self._offloaded
        return processes * process + copies * self.saved

    @cached_property
    def memory(self) -> int | None:
        """Bytes of one process, None if unknown; benchmarks/training_memory.py compares it with a count.

        PROCESS, weights, optimizer, and the larger of two peaks (on a CPU, where malloc keeps freed memory,
        their sum): the loss, when all activations are saved and no gradient exists; and the backward pass of
        the first layer, with its activations and all gradients. DistributedDataParallel has a copy of the
        gradients at all times. With --moe-expert-parallel each process holds some of the experts, with
        --zero-sharding the moments of one share (ZeRO, Rajbhandari et al., 2020, stage 1).

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section
        4.1, count for a token of a layer 8 widths and 2 hidden widths, and dropout masks of 2 widths. fairseq
        adds a copy of the attention's output, and its GELU saves its input in fp32. Their 5 a s^2 b bytes of
        attention scores are saved only with --attention-dropout on a CPU: else
        scaled_dot_product_attention recomputes them.
        """
        shape, settings, batch = self.shape, self.settings, tokens_of_batch(self.settings)
        if shape is None or batch is None:
            return None
        width, mask = (2 if self.half else 4), (1 if self.on_gpu else 4)  # a mask is a float on a CPU
        fused = settings.get("--fp16") or settings.get("--memory-efficient-fp16")  # log_softmax writes fp32
        here = averaged = shape.parameters
        if settings.get("--moe-expert-parallel") and self.processes > 1:
            experts = shape.members * shape.experts * shape.per_expert
            averaged -= experts
            here = averaged + experts // self.processes
        fixed = here * (width + 8 * self._has_master + self._moments + self._average)
        if self._sharded:
            fixed -= self._moments * (here - largest_share(shape.parameter_sizes, self.processes))
        if self.processes > 1:
            fixed += averaged * width
        dim, hidden, heads = shape.dim, shape.hidden, settings["--decoder-attention-heads"]
        layer = (9 * dim + hidden) * width + 4 * hidden + 2 * dim * mask + 4 * heads
        if not self.on_gpu and settings["--attention-dropout"]:
            layer += heads * settings["--tokens-per-sample"] * (2 * width + mask)
        # Tokens by expert, and outputs before the gate in fp32.
        layers = shape.layers * layer + shape.switch_layers * (dim * (width + 4) + 8 * shape.experts)
        if settings["--checkpoint-activations"]:
            layers = 0 if self._offloaded else shape.layers * dim * width
        ends = dim * (4 * width + mask)  # embedding, its dropout mask, the last norm
        # Logits, log-probabilities and gradients of all tokens, and with several members their sum; or of a
        # chunk, with gradients of the output weights.
        logits = batch * ((10 if fused else 12) + 4 * (shape.members > 1))
        if chunk := settings.get("--loss-chunk-tokens"):
            token, weight = (4, 4) if width == 4 else (8 if fused else 10, 6)
            logits = min(batch, chunk) * token + shape.members * dim * weight
        at_loss = batch * shape.members * (layers + ends) + shape.vocabulary * logits
        peaks = (at_loss, here * width + batch * (layer + ends))
        return int(PROCESS) + fixed + (max(peaks) if self.on_gpu else sum(peaks))


@dataclass(frozen=True)
class Estimate:
    """Cost of a run, first to last stage."""

    out: Path
    learner: str
    costs: tuple[Cost, ...]
    deployed: tuple[Cost, ...]  # of the trainings whose models are deployed after the last stage

    @property
    def parameters(self) -> int | None:
        """Of all models deployed at the end."""
        return total(cost.parameters for cost in self.deployed)

    @property
    def memory(self) -> int | None:
        """Bytes of one process of the largest training."""
        return max((cost.memory or 0 for cost in self.costs), default=0) or None

    @property
    def experts(self) -> str:
        """In the first and the last stage, and members, such as 4->12 or 4@2; - for a dense model."""
        ends = (self.costs[0], self.deployed[-1])
        counts = dict.fromkeys(str(cost.settings["--moe-expert-count"] or "-") for cost in ends)
        members = max(len(self.deployed), self.deployed[0].settings["--members"])
        return "->".join(counts) + (f"@{members}" if members > 1 else "")


def estimate(plan: Plan, vocabulary: int | None, machine: Machine) -> Estimate:
    """Cost of `plan` on `machine`, for a dict.txt of `vocabulary` tokens."""
    costs = {}
    for spec in plan.stages:
        for training in spec.trainings:
            settings = {**spec.settings, "--max-update": training.updates or 0}
            marker, shared = spec.directory / "result.json", training.source is not None
            costs[training.directory] = Cost(
                marker, settings, vocabulary, machine, shared, epoch_tokens=training.tokens
            )
    deployed = tuple(costs[directory] for directory in plan.stages[-1].models)
    return Estimate(plan.out, plan.config["learner"], tuple(costs.values()), deployed)


def vocabulary_size(data: str) -> int | None:
    """Tokens in dict.txt of a stream, or of the first fairseq-preprocess directory; None without dict.txt."""
    if is_stream(data):
        return Stream.load(data).vocab_size
    file = Path(data.split(":")[0], "dict.txt")
    return len(file.read_bytes().splitlines()) if file.exists() else None  # without it fairseq-train fails


def largest_share(sizes: Iterable[int], processes: int) -> int:
    """Elements of the largest share of --zero-sharding os, of parameters with `sizes` elements.

    fairscale gives each parameter, whole and in the model's order, to the process that has least so far.
    """
    shares = [0] * processes
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)


def total(numbers: Iterable[int | None]) -> int | None:
    """None if one of them is unknown."""
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)
