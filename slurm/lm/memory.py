"""Memory of a training process, by formulas; benchmarks/training_memory.py compares them with a count."""

from collections.abc import Iterable
from dataclasses import dataclass

from alma.flops import Shape
from slurm.lm.settings import FlagValues

PROCESS = 1.0e9  # bytes of a process without a model: fairseq and torch on a CPU, or a GPU's CUDA context
HOST_PROCESS = 4.0e9
"""Bytes of host memory of a process on a GPU without a model: torch, CUDA and the buffers of NCCL. A guess on
the safe side, not measured."""
MOMENTS = {"adafactor": 0, "sgd": 0, "adagrad": 1, "nag": 1}  # fp32 numbers per parameter; others: 2, as Adam
_EFFICIENT = ("--memory-efficient-fp16", "--memory-efficient-bf16")
_FP16 = ("--fp16", "--memory-efficient-fp16")
_HALF = ("--fp16", "--bf16", *_EFFICIENT)


@dataclass(frozen=True)
class Precision:
    """What a training keeps of each parameter."""

    settings: FlagValues

    @property
    def width(self) -> int:
        """Bytes of a weight, a gradient and an activation."""
        return 2 if self.any(_HALF) else 4

    @property
    def has_master(self) -> bool:
        """Whether FP16Optimizer keeps weights and gradients in fp32 besides the model's."""
        return self.width == 2 and not self.any(_EFFICIENT)

    @property
    def moments(self) -> int:
        """Numbers of the optimizer, in fp32."""
        return MOMENTS.get(self.settings["--optimizer"], 2)

    @property
    def has_average(self) -> bool:
        """Whether fairseq keeps a moving average of the weights, in fp32."""
        return self.any(["--store-ema"])

    @property
    def saved(self) -> int:
        """Bytes of a parameter in a checkpoint: fp32 weights (twice with FP16Optimizer), state, average."""
        return 4 * (1 + self.has_master + self.moments + self.has_average)

    @property
    def fused(self) -> bool:
        """Whether a GPU's log_softmax reads half precision and writes fp32."""
        return self.any(_FP16)

    def any(self, flags: Iterable[str]) -> bool:
        """Whether one of the flags is on."""
        return any(self.settings.get(flag) for flag in flags)


@dataclass(frozen=True)
class Memory(Precision):
    """Memory of one process in bytes."""

    shape: Shape
    parameters: int
    batch: int
    """Tokens of a forward pass."""
    processes: int
    on_gpu: bool

    @property
    def total(self) -> int:
        """PROCESS, weights, optimizer, and the larger of two peaks (on a CPU their sum).

        The peaks: the loss, when all activations are saved and there is no gradient yet; and the backward
        pass of the first layer, with its activations and all gradients. DistributedDataParallel has a copy of
        the gradients at all times. With --moe-expert-parallel each process holds some of the experts.
        """
        experts = self.shape.members * self.shape.experts * self.shape.per_expert
        here = averaged = self.parameters
        if self.any(["--moe-expert-parallel"]) and self.processes > 1:
            averaged -= experts
            here = averaged + experts // self.processes
        numbers = self.width + 8 * self.has_master + 4 * self.moments + 4 * self.has_average
        fixed = here * numbers + averaged * self.width * (self.processes > 1)
        peaks = (self._saved + self._at_loss, here * self.width + self.batch * (self._layer + self._ends))
        # On a CPU malloc keeps what is freed.
        return int(PROCESS) + fixed + (max(peaks) if self.on_gpu else sum(peaks))

    @property
    def _saved(self) -> int:
        """What the forward pass saves for the backward pass."""
        layers = self.shape.layers * self._layer + self.shape.switch_layers * self._switch
        if self.settings["--checkpoint-activations"]:
            layers = self.shape.layers * self.shape.dim * self.width
        return self.batch * self.shape.members * (layers + self._ends)

    @property
    def _ends(self) -> int:
        """Bytes per token of the embedding, its dropout mask and the last norm."""
        return self.shape.dim * (4 * self.width + self._mask)

    @property
    def _layer(self) -> int:
        """Bytes per token of a layer.

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section
        4.1, count 8 widths and 2 hidden widths, and dropout masks of 2 widths. fairseq adds a copy of the
        attention's output, and its GELU saves its input in fp32. Their 5 a s^2 b bytes of attention scores
        are saved only with --attention-dropout on a CPU: else scaled_dot_product_attention recomputes them.
        """
        dim, hidden, width = self.shape.dim, self.shape.hidden, self.width
        heads = self.settings["--decoder-attention-heads"]
        layer = (9 * dim + hidden) * width + 4 * hidden + 2 * dim * self._mask + 4 * heads
        if not self.on_gpu and self.settings["--attention-dropout"]:
            layer += heads * self.settings["--tokens-per-sample"] * (2 * width + self._mask)
        return layer

    @property
    def _switch(self) -> int:
        """Bytes per token that a Switch layer adds: tokens by expert, outputs before the gate in fp32."""
        return self.shape.dim * (self.width + 4) + 8 * self.shape.experts

    @property
    def _at_loss(self) -> int:
        """Logits, log-probabilities and gradients when the backward pass begins.

        cross_entropy keeps those of all tokens, and with several members one more tensor for their sum.
        chunked_cross_entropy keeps those of a chunk, and gradients of the output weights.
        """
        shape = self.shape
        chunk = self.settings.get("--loss-chunk-tokens")
        if not chunk:
            return self.batch * shape.vocabulary * ((10 if self.fused else 12) + 4 * (shape.members > 1))
        logits, weights = (4, 4) if self.width == 4 else (8 if self.fused else 10, 6)
        return shape.vocabulary * (min(self.batch, chunk) * logits + shape.members * shape.dim * weights)

    @property
    def _mask(self) -> int:
        """Bytes per element of a dropout mask, which is a float on a CPU."""
        return 1 if self.on_gpu else 4
