"""Step `switch`: the Switch layer by dispatcher, beside fairseq's dense FFN and a one-hot dispatch.

Forward and backward, load-balancing loss included, capacity factor 1. A column is a time, or a ratio of times
in the same turn. `error` is that of the worst dispatcher's output, against the loop in fp32 with the same
weights and inputs: the norm of the difference over the norm.

Shapes: S tokens, D model, E experts.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.switch_ffn import OneHotFFN, dense, step, switch
from benchmarks.timing import turns
from benchmarks.training_memory import LAYOUTS
from fairseq_alma.moe import layer
from fairseq_alma.moe.dispatchers import LoopDispatcher
from fairseq_alma.moe.layer import SwitchFFN

DISPATCHERS: dict[str, Callable] = {
    **LAYOUTS,
    "loop": lambda x_SD, routing, capacity: LoopDispatcher(routing),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ONE_HOT_TOKENS = 16_384
"""Its two tensors of S^2 numbers take gigabytes with more."""
STEPS = 5
"""Passes between two looks at the clock, for which the host waits for the GPU."""


def device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished(work: Callable[[], Any], times: int) -> None:
    """Do `work` some times and wait for the GPU."""
    for _ in range(times):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cases(asked: Asked) -> Iterator[Case]:
    """Widths, token counts, numbers of experts and dtypes; the paper's base model first."""
    widths, tokens, experts = ((512, 768), (4_096, 16_384, 65_536), (4, 8, 16, 32))
    if asked.tiny:
        widths, tokens, experts = (16,), (64,), (4,)
    for dim in widths:
        for count in tokens:
            for number in experts:
                for name in DTYPES:
                    labels = {"D": dim, "S": count, "E": number, "dtype": name}
                    yield labels, partial(measure, dim, count, number, DTYPES[name], asked.repeats)


def measure(dim: int, tokens: int, experts: int, dtype: torch.dtype, repeats: int) -> Row:
    """Times of the dense layer, and of the others relative to it."""
    torch.manual_seed(0)
    to = {"device": device(), "dtype": dtype}
    x = torch.randn(min(512, tokens), max(1, tokens // 512), dim, requires_grad=True, **to)
    ours, one_hot = (switch(kind, dim, experts).to(**to) for kind in (SwitchFFN, OneHotFFN))
    one_hot.load_state_dict(ours.state_dict())
    kinds = {name: partial(dispatched, name, ours, x) for name in DISPATCHERS}
    row, works = errors_of(kinds, ours, x)
    works["dense"] = partial(step, dense(dim).to(**to), x)
    if tokens <= ONE_HOT_TOKENS:
        works["one-hot"] = partial(step, one_hot, x)
    finished(lambda: [work() for work in works.values()], 3)  # compiles kernels, fills the allocator
    measured = turns({name: partial(finished, work, STEPS) for name, work in works.items()}, repeats)
    row["dense, ms"] = [1000 * turn["dense"] / STEPS for turn in measured]
    flops = 3 * 2 * 2 * tokens * dim * 4 * dim
    row["dense, TFLOP/s"] = [flops * STEPS / turn["dense"] / 1e12 for turn in measured]
    for name in (*DISPATCHERS, "one-hot"):
        if name in works:
            row[f"{name} / dense"] = [turn[name] / turn["dense"] for turn in measured]
    return row


def dispatched(name: str, ffn: nn.Module, x: Tensor) -> None:
    """A pass with a dispatcher of DISPATCHERS."""
    with mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS[name]):
        step(ffn, x)


def errors_of(
    kinds: dict[str, Callable[[], None]], ffn: SwitchFFN, x: Tensor
) -> tuple[Row, dict[str, Callable[[], None]]]:
    """The worst error, and those of the `kinds` that this device and dtype can run."""
    works, error = {}, 0.0
    row: Row = {}
    with torch.no_grad(), mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS["loop"]):
        expected = copy.deepcopy(ffn).float()(x.float())[0]
    for name, work in kinds.items():
        try:
            work()
        except (RuntimeError, NotImplementedError) as failed:  # grouped products of this dtype
            row[f"{name} / dense"] = f"none: {failed}"[:40].splitlines()[0]
            continue
        works[name] = work
        with torch.no_grad(), mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS[name]):
            found = ffn(x)[0].float()
        error = max(error, ((found - expected).norm() / expected.norm()).item())
    return {"error": f"{error:.1e}"} | row, works
