"""The Switch FFN and fairscale's MOELayer, relative to the dense FFN of the same active size.

Forward and backward, load-balancing loss included. Our two dispatchers and "MOELayer top-1" compute
the same function with capacity factor 1 and the same weights. "MOELayer Top2Gate" sends each token
to two experts, of capacity 2 * S / E. `difference` is the worst output, Top2Gate's apart, against
that of the loop in fp32: the norm of the difference over the norm. MB is the peak of memory of the
pass, gradients included, weights and input not, nor what a kernel takes and frees within itself.
On a CPU: S = 4096 tokens, fp32, one thread. `cases` are those of `python -m benchmarks gpu`.

Shapes: B batch, T time, S = B * T tokens, D model, E experts.
"""

import contextlib
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

from benchmarks.fairscale_moe import one_process, with_top1_gate, with_top2_gate
from benchmarks.storages import LiveStorages
from benchmarks.timing import Rows, device, finished, one_thread, spread, turns
from fairseq_alma.moe import layer
from fairseq_alma.moe.dispatchers import LoopDispatcher, PaddedDispatcher
from fairseq_alma.moe.layer import SwitchFFN

DISPATCHERS: dict[str, Callable] = {
    "padded": lambda x_SD, routing, capacity: PaddedDispatcher(routing, capacity),
    "loop": lambda x_SD, routing, capacity: LoopDispatcher(routing),
}
TOP_1 = "MOELayer top-1"
TOP_2 = "MOELayer Top2Gate"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = [(512, 16_384, experts, dtype) for experts in (8, 32) for dtype in ("bf16", "fp16")]
SIZES += list(product((512, 768), (65_536, 4_096), (8, 32), ("bf16", "fp32")))
"""D, S, E, dtype on a GPU; the paper's base model first."""
STEPS = {"cuda": 5, "cpu": 1}
"""Passes between two looks at the clock, for which the host waits for the GPU."""
REPEATS = 7
MOST_TOKENS = 4096
"""Of fairscale's layer, whose one-hot tensors have S * S elements: 17 GB each at 65,536."""


def step(ffn: nn.Module, x: Tensor, dispatcher: str = "") -> Tensor:
    """A forward and backward pass, with a dispatcher of DISPATCHERS; returns the output."""
    with mock.patch.object(layer, "fastest_dispatcher", DISPATCHERS.get(dispatcher)):
        ffn.zero_grad()
        result = ffn(x)
        output, loss = (
            (result, 0) if torch.is_tensor(result) else (result[0], result[1].balance_loss)
        )
        (output.sum() + loss).backward()
        return output


def layers_of(dim: int, experts: int, to: dict[str, Any], peers: bool) -> dict[str, nn.Module]:
    """The layers to compare, of the device and dtype in `to`; those of fairscale if `peers`."""
    ours = SwitchFFN(dim, 4 * dim, experts, 1.0, F.gelu, nn.Identity()).to(**to)
    dense = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)).to(**to)
    layers: dict[str, nn.Module] = {"dense": dense, "padded": ours, "loop": ours}
    if peers:
        layers |= {TOP_1: with_top1_gate(ours), TOP_2: with_top2_gate(ours)}
    return layers


def peak(memory: LiveStorages, ffn: nn.Module, x: Tensor, name: str) -> float:
    """MB that a forward and backward pass takes at its most; `memory` has counted `ffn` and `x`."""
    ffn.zero_grad()
    x.grad = None
    before = memory.bytes
    peaks: dict[str, int] = {}
    with memory, memory.phase(peaks, name):
        step(ffn, x, name)
    return (peaks[name] - before) / 1e6


def compare(dim: int, tokens: int, experts: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Times of the dense layer, and of the others relative to it in the same turn; peaks of
    memory."""
    torch.manual_seed(0)
    to: dict[str, Any] = {"device": device(), "dtype": DTYPES[dtype]}
    memory = LiveStorages(device().type)
    peers = dtype == "fp32" and tokens <= MOST_TOKENS and tokens % experts == 0
    with one_process() if peers else contextlib.nullcontext():
        with memory:
            x = torch.randn(max(1, tokens // 512), min(512, tokens), dim, requires_grad=True, **to)
            layers = layers_of(dim, experts, to, peers)
        peaks = {f"{name}, MB": peak(memory, ffn, x, name) for name, ffn in layers.items()}
        works = {name: partial(step, ffn, x, name) for name, ffn in layers.items()}
        expected = step(copy.deepcopy(layers["loop"]).float(), x.float(), "loop")
        outputs = [works[name]().float() for name in works.keys() - {"dense", TOP_2}]
        differences = [((y - expected).norm() / expected.norm()).item() for y in outputs]
        # Compiles kernels, fills the allocator.
        finished(lambda: [work() for work in works.values()], 3)
        steps = STEPS[device().type]
        kinds = {name: partial(finished, work, steps) for name, work in works.items()}
        measured = turns(kinds, repeats)
    ratios = {}
    for name in works:
        if name != "dense":
            ratios[f"{name} / dense"] = [turn[name] / turn["dense"] for turn in measured]
    times = [turn["dense"] / steps for turn in measured]
    flops = 3 * 2 * 2 * tokens * dim * 4 * dim
    return {
        **ratios,
        "difference": f"{max(differences):.1e}",
        **peaks,
        "dense, ms": [1000 * time for time in times],
        "dense, TFLOP/s": [flops / time / 1e12 for time in times],
    }


def cases(args: Any) -> Any:
    """Widths, token counts, numbers of experts and dtypes on a GPU: labels, and what measures
    them."""
    for dim, tokens, experts, dtype in (
        [(16, 64, 4, name) for name in DTYPES] if args.tiny else SIZES
    ):
        labels = {"D": dim, "S": tokens, "E": experts, "dtype": dtype}
        yield labels, partial(compare, dim, tokens, experts, dtype, 2 if args.tiny else REPEATS)


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each D and E."""
    rows: Rows = []
    for dim, experts in tqdm(list(product((512, 768), (4, 8, 12, 32))), disable=None, unit="layer"):
        row = {"D": dim, "E": experts} | compare(dim, 4096, experts, "fp32", repeats)
        header = rows[0] if rows else row
        rows.append({name: shown(row.get(name, "-")) for name in header})
    return rows


def shown(value: Any) -> Any:
    """A cell of the table: the spread of repeated measurements."""
    if isinstance(value, list):
        return spread(value)
    return f"{value:.0f}" if isinstance(value, float) else value
