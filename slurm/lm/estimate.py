"""Cost of a run before launch: parameters, updates, tokens, FLOPs, memory.

Computed from the settings of a plan, without torch and fairseq. None, shown as "?", is unknown: the
size of an --arch other than the plug-in's and transformer_lm, or a training without --max-update
and --max-epoch, or with --max-epoch of a stream that does not exist yet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from alma.cost_table import total
from alma.flops import Shape
from alma.stream import SPECIALS, Stream, is_stream
from slurm.engine.machine import Machine
from slurm.lm.plan import Plan
from slurm.lm.run_options import FlagValues, tokens_of_batch

PROCESS = 1.0e9
"""Bytes of a process without a model: fairseq and torch on a CPU, or a GPU's CUDA context."""
HOST_PROCESS = 4.0e9
"""Bytes of host memory of a GPU process without a model: torch, CUDA and NCCL's buffers. A
conservative guess, not measured."""
_MOMENTS = {"adafactor": 0, "sgd": 0, "adagrad": 1, "nag": 1}
"""fp32 numbers that an optimizer keeps per parameter; optimizers not listed keep 2, as Adam."""
_EFFICIENT = ("--memory-efficient-fp16", "--memory-efficient-bf16")


@dataclass(frozen=True)
class Cost:
    """Cost of one training."""

    result: Path  # marker of the stage's evaluation
    settings: FlagValues
    vocabulary: int | None  # tokens in dict.txt
    machine: Machine
    shared: bool = False
    """Whether another run of the launch trains it, so that this run only links the files."""
    epoch_tokens: int | None = None  # tokens of all epochs; None: follows from the updates

    @property
    def on_gpu(self) -> bool:
        """Whether fairseq-train uses GPUs: if the machine has any, and --cpu is not given."""
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
        """The shape of the model; None for an unknown --arch."""
        settings = self.settings
        switch = settings["--arch"].startswith("switch_")
        if self.vocabulary is None or not (
            switch or settings["--arch"].startswith("transformer_lm")
        ):
            return None
        if settings.get("--moe-freq", 1) < 1:  # fairseq-train will refuse it
            return None
        args = SimpleNamespace(
            **{name[2:].replace("-", "_"): value for name, value in settings.items()}
        )
        return Shape.of(args, self.vocabulary + SPECIALS)

    @property
    def parameters(self) -> int | None:
        if "parameters" in self.settings:  # counted by the engine transformers
            return self.settings["parameters"]
        return self.shape.parameters if self.shape else None

    @property
    def updates(self) -> int | None:
        return self.settings["--max-update"] or None

    @property
    def tokens(self) -> int | None:
        """Tokens of all epochs, if known; else of all updates, counting every batch as full.

        The last batch of an epoch may be smaller.
        """
        if self.epoch_tokens is not None:
            return self.epoch_tokens
        passes = self.settings["--update-freq"][0]  # passes per update and process, in epoch 1
        factors = (tokens_of_batch(self.settings), passes, self.processes, self.updates)
        return None if None in factors else math.prod(factor or 0 for factor in factors)

    @property
    def flops(self) -> int | None:
        """FLOPs of the forward and backward passes, without attention scores, as in records."""
        if self.tokens is None:
            return None
        if "parameters" in self.settings:
            return 6 * self.settings["parameters"] * self.tokens
        return self.shape.training_flops(self.tokens) if self.shape else None

    @property
    def _has_master(self) -> bool:
        """Whether FP16Optimizer keeps weights and gradients in fp32 besides the model's."""
        return self.half and not any(self.settings.get(flag) for flag in _EFFICIENT)

    @property
    def _moments(self) -> int:
        """Bytes per parameter of the optimizer's moments, in fp32."""
        return 4 * _MOMENTS.get(self.settings["--optimizer"], 2)

    @property
    def _average(self) -> int:
        """Bytes per parameter of a moving average of the weights, in fp32; 0 without one."""
        return 4 if self.settings.get("--store-ema") else 0

    @property
    def _sharded(self) -> bool:
        """Whether each process keeps only the moments of its share of the parameters (ZeRO 1)."""
        return self.settings["--zero-sharding"] == "os" and self.processes > 1

    @property
    def _offloaded(self) -> int:
        """Bytes of activations that a process offloads to the host: the input of each layer."""
        batch = tokens_of_batch(self.settings)
        if self.shape is None or batch is None or not self.on_gpu:
            return 0
        if not self.settings["--offload-activations"]:
            return 0
        return self.shape.members * self.shape.layers * batch * self.shape.dim * self._width

    @property
    def saved(self) -> int:
        """Bytes of a checkpoint: fp32 weights, twice with FP16Optimizer, moments, average; 0 if
        unknown."""
        weights = 8 if self._has_master else 4
        return (weights + self._moments + self._average) * (self.parameters or 0)

    def host_memory(self, processes: int) -> int | None:
        """Bytes of host memory of a node that runs `processes` of the training; None if unknown.

        On GPUs, each process builds its model in fp32 on the CPU. Later all processes memory-map
        the same checkpoint, and the first one copies its state to the CPU to save it; with
        --zero-sharding each copies the state of its share.
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
        """Bytes of one process; None if unknown. benchmarks/training_memory.py measures it.

        The sum of PROCESS, weights, optimizer, and the larger of two peaks: at the loss, when all
        activations are saved and no gradient exists; and in the backward pass of the first layer,
        with its activations and all gradients. On a CPU malloc keeps freed memory, so the peaks add
        up. DistributedDataParallel has a copy of the gradients at all times. With
        --moe-expert-parallel each process holds some of the experts, with --zero-sharding the
        moments of one share (ZeRO, Rajbhandari et al., 2020, stage 1).

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
        section 4.1, count for a token of a layer 8 widths and 2 hidden widths, and dropout masks of
        2 widths. fairseq adds a copy of the attention's output. Their 5 a s^2 b bytes of attention
        scores are saved only with --attention-dropout on a CPU: else scaled_dot_product_attention
        recomputes them.
        """
        shape = self.shape
        batch = tokens_of_batch(self.settings)
        if shape is None or batch is None:
            return None
        token = self._token_bytes(shape)
        logits = self._logit_bytes(shape, batch)
        at_loss = batch * shape.members * (token.layers + token.ends) + logits
        gradients = self._local_parameters(shape) * self._width
        at_first_layer = gradients + batch * (token.layer + token.ends)
        peak = max(at_loss, at_first_layer) if self.on_gpu else at_loss + at_first_layer
        return int(PROCESS) + self._fixed_bytes(shape) + peak

    @property
    def _width(self) -> int:
        """Bytes of one weight, gradient or activation: 2 or 4."""
        return 2 if self.half else 4

    def _expert_parameters(self, shape: Shape) -> int:
        """Parameters of the experts that --moe-expert-parallel divides among processes; else 0."""
        if not self.settings.get("--moe-expert-parallel") or self.processes == 1:
            return 0
        return shape.members * shape.experts * shape.per_expert

    def _local_parameters(self, shape: Shape) -> int:
        """Parameters that one process holds."""
        divided = self._expert_parameters(shape)
        return shape.parameters - divided + divided // self.processes

    def _fixed_bytes(self, shape: Shape) -> int:
        """Bytes of weights, optimizer, and DDP's copy of the gradients in one process."""
        local = self._local_parameters(shape)
        parameter = self._width + self._moments + self._average
        if self._has_master:
            parameter += 8
        fixed = local * parameter
        if self._sharded:
            share = largest_share(shape.parameter_sizes, self.processes)
            fixed -= self._moments * (local - share)
        if self.processes > 1:
            fixed += (shape.parameters - self._expert_parameters(shape)) * self._width
        return fixed

    def _token_bytes(self, shape: Shape) -> "_TokenBytes":
        """Bytes of saved activations for a token; see `memory` for the counts."""
        settings = self.settings
        width = self._width
        mask = 1 if self.on_gpu else 4  # bytes per value of a dropout mask, a float on a CPU
        heads = settings["--decoder-attention-heads"]
        layer = (9 * shape.dim + 2 * shape.hidden) * width
        layer += 2 * shape.dim * mask + 4 * heads
        if not self.on_gpu and settings["--attention-dropout"]:
            layer += heads * settings["--tokens-per-sample"] * (2 * width + mask)
        # A Switch layer saves the tokens sorted by expert, the outputs before the gate in fp32, and
        # two fp32 numbers per expert.
        switch = shape.dim * (width + 4) + 8 * shape.experts
        layers = shape.layers * layer + shape.switch_layers * switch
        if self._offloaded and settings["--checkpoint-activations"]:
            layers = 0
        elif settings["--checkpoint-activations"]:
            layers = shape.layers * shape.dim * width
        ends = shape.dim * (4 * width + mask)  # embedding, its dropout mask, the last norm
        return _TokenBytes(layer, layers, ends)

    def _logit_bytes(self, shape: Shape, batch: int) -> int:
        """Bytes at the loss for `batch` tokens: logits, log-probabilities and their gradients.

        On a GPU the gradient takes the place of the logits (`training.loss_kernel`). With
        --loss-chunk-tokens they are those of one chunk, plus the gradients of the output weights.
        """
        logit = _LOGIT[self._width]
        of_weights = 0
        if self.on_gpu:
            logit = _LogitBytes(whole=self._width, chunked=self._width, weight=logit.weight)
            of_weights = shape.dim * self._width  # their gradient, beside that of the logits
        chunk = self.settings.get("--loss-chunk-tokens")
        if chunk:
            weights = shape.members * shape.dim * logit.weight
            return shape.vocabulary * (min(batch, chunk) * logit.chunked + weights)
        whole = logit.whole
        if shape.members > 1 and self.on_gpu:  # a member's logits, and sums in fp32
            whole = max(whole, _UMIX[self._width])
        elif shape.members > 1:  # and the sum of the members' logits, in fp32
            whole += 4
        return shape.vocabulary * (batch * whole + of_weights)


@dataclass(frozen=True)
class _TokenBytes:
    """Bytes of the activations that training saves for one token."""

    layer: int  # all activations of one layer
    layers: int  # saved activations of all layers; fewer with --checkpoint-activations
    ends: int  # activations before the first layer and after the last one


@dataclass(frozen=True)
class _LogitBytes:
    """Bytes of the loss per token and dictionary entry."""

    whole: int  # if the loss is computed for a whole batch
    chunked: int  # if it is computed in chunks
    weight: int  # per element of the output weights, with chunks: copy and gradient


_LOGIT = {
    4: _LogitBytes(whole=12, chunked=4, weight=4),
    2: _LogitBytes(whole=12, chunked=10, weight=6),
}
"""By the bytes of an activation; of PyTorch's operators."""


_UMIX = {4: 12, 2: 14}
"""Bytes a token and dictionary entry where UMix adds up its members' logits on a GPU, by the bytes
of an activation: the logits of a member, their copy in fp32, the sum before and after."""


@dataclass(frozen=True)
class Estimate:
    """Cost of a run, first to last stage."""

    out: Path
    learner: str
    costs: tuple[Cost, ...]
    deployed: tuple[Cost, ...]  # trainings whose models are deployed after the last stage

    @property
    def parameters(self) -> int | None:
        """Parameters of all models deployed at the end; None if unknown."""
        return total(cost.parameters for cost in self.deployed)

    @property
    def memory(self) -> int | None:
        """Bytes of one process of the largest training."""
        return max((cost.memory or 0 for cost in self.costs), default=0) or None

    @property
    def experts(self) -> str:
        """Experts of the first and last stage @ members, such as 4->12 or 4@2; - if dense."""
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
            costs[training.directory] = Cost(
                result=spec.directory / "result.json",
                settings=settings,
                vocabulary=vocabulary,
                machine=machine,
                shared=training.source is not None,
                epoch_tokens=training.tokens,
            )
    deployed = tuple(costs[directory] for directory in plan.stages[-1].models)
    return Estimate(plan.out, plan.config["learner"], tuple(costs.values()), deployed)


def vocabulary_size(data: str) -> int | None:
    """Tokens in dict.txt of a stream or of the first fairseq-preprocess directory.

    None without dict.txt, where fairseq-train fails.
    """
    if is_stream(data):
        return Stream.load(data).vocab_size
    file = Path(data.split(":")[0], "dict.txt")
    if not file.exists():
        return None
    return len(file.read_bytes().splitlines())


def largest_share(sizes: Iterable[int], processes: int) -> int:
    """Elements of the largest share of --zero-sharding os, of parameters with `sizes` elements.

    fairscale assigns whole parameters, in the model's order, each to the process with the fewest
    elements so far.
    """
    shares = [0] * processes
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)
