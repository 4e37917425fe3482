"""The Switch FFN by dispatcher, relative to the dense FFN with the same active parameters.

Forward and backward, load-balancing loss included, capacity factor 1. `difference` is the worst dispatcher's
output against that of the loop in fp32 with the same weights and inputs: the norm of the difference over the
norm. On a CPU: S = 4096 tokens, fp32, one thread. `cases` are those of `python -m benchmarks gpu`.

Shapes: B batch, T time, S = B * T tokens, D model, E experts.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.timing import Rows, device, finished, one_thread, spread, turns
from fairseq_alma.moe import layer
from fairseq_alma.moe.dispatchers import LoopDispatcher, PaddedDispatcher
from fairseq_alma.moe.layer import SwitchFFN

DISPATCHERS: dict[str, Callable] = {
    "padded": lambda x_SD, routing, capacity: PaddedDispatcher(routing, capacity),
    "loop": lambda x_SD, routing, capacity: LoopDispatcher(routing),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = [(512, 16_384, experts, dtype) for experts in (8, 32) for dtype in ("bf16", "fp16")]
SIZES += list(product((512, 768), (65_536, 4_096), (8, 32), ("bf16", "fp32")))
"""D, S, E, dtype on a GPU; the paper's base model first."""
STEPS, REPEATS = 5, 7
"""Passes between two looks at the clock, for which the host waits for the GPU."""


def step(ffn: nn.Module, x: Tensor, dispatcher: str = "") -> Tensor:
    """A forward and backward pass, with a dispatcher of DISPATCHERS; returns the output."""
    with mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS.get(dispatcher)):
        ffn.zero_grad()
        result = ffn(x)
        output, loss = (result, 0) if torch.is_tensor(result) else (result[0], result[1].balance_loss)
        (output.sum() + loss).backward()
        return output


def compare(dim: int, tokens: int, experts: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Times of the dense layer, and of the others relative to it in the same turn."""
    torch.manual_seed(0)
    to: dict[str, Any] = {"device": device(), "dtype": DTYPES[dtype]}
    x = torch.randn(max(1, tokens // 512), min(512, tokens), dim, requires_grad=True, **to)
    ours = SwitchFFN(dim, 4 * dim, experts, 1.0, F.gelu, nn.Identity()).to(**to)
    dense = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)).to(**to)
    works: dict[str, Callable] = {name: partial(step, ours, x, name) for name in DISPATCHERS}
    expected = step(copy.deepcopy(ours).float(), x.float(), "loop")
    differences = [((work().float() - expected).norm() / expected.norm()).item() for work in works.values()]
    works["dense"] = partial(step, dense, x)
    finished(lambda: [work() for work in works.values()], 3)  # compiles kernels, fills the allocator
    measured = turns({name: partial(finished, work, STEPS) for name, work in works.items()}, repeats)
    times = [turn["dense"] / STEPS for turn in measured]
    ratios = {f"{name} / dense": [turn[name] / turn["dense"] for turn in measured] for name in DISPATCHERS}
    return ratios | {
        "difference": f"{max(differences):.1e}",
        "dense, ms": [1000 * time for time in times],
        "dense, TFLOP/s": [3 * 2 * 2 * tokens * dim * 4 * dim / time / 1e12 for time in times],
    }


def cases(args: Any) -> Any:
    """Widths, token counts, numbers of experts and dtypes on a GPU: labels, and what measures them."""
    for dim, tokens, experts, dtype in [(16, 64, 4, name) for name in DTYPES] if args.tiny else SIZES:
        labels = {"D": dim, "S": tokens, "E": experts, "dtype": dtype}
        yield labels, partial(compare, dim, tokens, experts, dtype, 2 if args.tiny else REPEATS)


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each D and E."""
    rows = []
    for dim, experts in tqdm(list(product((512, 768), (4, 8, 12, 32))), disable=None, unit="layer"):
        row = compare(dim, 4096, experts, "fp32", repeats)
        times = {name: spread(value) if isinstance(value, list) else value for name, value in row.items()}
        rows.append({"D": dim, "E": experts} | times)
    return rows
