"""Step `switch`: the Switch layer by dispatcher, beside fairseq's dense FFN.

Forward and backward, load-balancing loss included, capacity factor 1. A column is a time, or a ratio of times
in the same turn. `difference` is the worst dispatcher's output against that of the loop in fp32 with the same
weights and inputs: the norm of the difference over the norm.

Shapes: S tokens, D model, E experts.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.gpu.process import Cases, Row
from benchmarks.switch_ffn import dense, step, switch
from benchmarks.timing import device, finished, turns
from benchmarks.training_memory import LAYOUTS
from fairseq_alma.moe import layer
from fairseq_alma.moe.dispatchers import LoopDispatcher
from fairseq_alma.moe.layer import SwitchFFN

DISPATCHERS: dict[str, Callable] = {
    **LAYOUTS,
    "loop": lambda x_SD, routing, capacity: LoopDispatcher(routing),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = [(512, 16_384, experts, dtype) for experts in (8, 32) for dtype in ("bf16", "fp16")]
SIZES += list(product((512, 768), (65_536, 4_096), (8, 32), ("bf16", "fp32")))
"""D, S, E, dtype; the paper's base model first."""
STEPS, REPEATS = 5, 7
"""Passes between two looks at the clock, for which the host waits for the GPU."""


def switch_layer(args: Any) -> Cases:
    """Widths, token counts, numbers of experts and dtypes."""
    for dim, tokens, experts, dtype in [(16, 64, 4, name) for name in DTYPES] if args.tiny else SIZES:
        labels = {"D": dim, "S": tokens, "E": experts, "dtype": dtype}
        yield labels, partial(measure, dim, tokens, experts, DTYPES[dtype], 2 if args.tiny else REPEATS)


def measure(dim: int, tokens: int, experts: int, dtype: torch.dtype, repeats: int) -> Row:
    """Times of the dense layer, and of the others relative to it."""
    torch.manual_seed(0)
    to: dict[str, Any] = {"device": device(), "dtype": dtype}
    x = torch.randn(min(512, tokens), max(1, tokens // 512), dim, requires_grad=True, **to)
    ours = switch(SwitchFFN, dim, experts).to(**to)
    works = {"dense": partial(step, dense(dim).to(**to), x)}
    row: Row = {}
    differences = [0.0]
    expected = dispatched("loop", copy.deepcopy(ours).float(), x.float())
    for name in DISPATCHERS:
        work = partial(dispatched, name, ours, x)
        try:
            differences.append(((work().float() - expected).norm() / expected.norm()).item())
            works[name] = work
        except RuntimeError as failed:  # there are no grouped products of this dtype
            row[f"{name} / dense"] = f"none: {str(failed)[:40]}"
    finished(lambda: [work() for work in works.values()], 3)  # compiles kernels, fills the allocator
    measured = turns({name: partial(finished, work, STEPS) for name, work in works.items()}, repeats)
    flops = 3 * 2 * 2 * tokens * dim * 4 * dim
    times = [turn["dense"] / STEPS for turn in measured]
    row |= {"difference": f"{max(differences):.1e}", "dense, ms": [1000 * time for time in times]}
    row["dense, TFLOP/s"] = [flops / time / 1e12 for time in times]
    del works["dense"]
    return row | {f"{name} / dense": [turn[name] / turn["dense"] for turn in measured] for name in works}


def dispatched(name: str, ffn: nn.Module, x: Tensor) -> Tensor:
    """The output of a pass with a dispatcher of DISPATCHERS."""
    with mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS[name]):
        return step(ffn, x)
