"""What a profile of some updates says: where the GPU's time goes, and where the host's.

`GPU idle` is the time without a kernel or copy, `host waits` the calls that wait for the GPU. The
profiler itself takes time on the host, so both are upper bounds.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.process import Row

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""CUDA's calls that return when the GPU is done; cudaMemcpyAsync, which may not wait, is not
one."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Beginnings of the names of CUDA's calls that start kernels."""
TOP = 4
LONGEST = 25
NAME_LENGTH = 90
"""Of a kernel whose parameters say what it does."""
KINDS = (
    ("compiled", r"^triton_"),
    ("dispatch", r"softmax_warp"),  # the router's, over few experts
    ("attention", r"flash|fmha|attention|sdpa"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitK"),
    ("loss", r"softmax|nll|cross_entropy|loss|^gradient"),
    ("gelu", r"gelu"),
    ("layer norm", r"layer_?norm|GammaBeta"),
    ("optimizer", r"multi_tensor|adam|lpnorm"),
    ("dispatch", r"index|gather|scatter|sort|radix|scan|cumsum"),
    ("copies", r"copy|memcpy|memset|fill"),
    ("reductions", r"reduce"),
    ("elementwise", r"elementwise"),
)
"""Kinds of kernels, and what is in their names; the first that fits."""


def shares(events: Iterable[Any], wall: float, inside: float, updates: int) -> Row:
    """The row of `wall` seconds of `updates`, of which `inside` were in updates, from
    torch.profiler's events. Milliseconds are of one update."""
    events = list(events)
    gpu = [event for event in events if str(event.device_type).endswith("CUDA")]
    # annotations are names of blocks of kernels
    on_gpu = [event for event in gpu if not event.is_user_annotation]
    waits = [event for event in events if event.name in WAITS]
    launches = [event for event in events if event.name.startswith(LAUNCHES)]
    waited = sum(event.time_range.elapsed_us() for event in waits)
    row = {
        "update, ms": 1000 * wall / updates,
        "outside updates": 1 - inside / wall,
        "host waits": waited / 1e6 / wall,
        "waits / update": len(waits) / updates,
        "GPU idle": 1 - busy(on_gpu) / 1e6 / wall,
        "kernels / update": len(on_gpu) / updates,
        "launches / update": len(launches) / updates,
    }
    if launches:
        in_calls = sum(event.time_range.elapsed_us() for event in launches)
        row["launch, us"] = in_calls / len(launches)
        row["host / launch, us"] = (1e6 * inside - waited) / len(launches)
    by_short_name: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in on_gpu:
        duration = event.time_range.elapsed_us()
        by_short_name[short(event.name)[:40]] += duration
        by_kind[kind_of(event.name)] += duration / 1000 / updates
        by_name[clean(event.name)[:NAME_LENGTH]] += duration / 1000 / updates
    row["longest kernels"] = "; ".join(
        f"{name} {microseconds / 1e6 / wall:.0%}"
        for name, microseconds in by_short_name.most_common(TOP)
    )
    row["ms by kind"] = dict(by_kind.most_common())
    row["ms by kernel"] = dict(by_name.most_common(LONGEST))
    return row


def busy(on_gpu: Iterable[Any]) -> float:
    """Microseconds with at least one kernel; they overlap."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in on_gpu):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def clean(name: str) -> str:
    """The name of a kernel without what all have."""
    return re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)


def short(name: str) -> str:
    """The name of a kernel without its parameters."""
    return re.sub(r"<.*", "", clean(name))


def kind_of(name: str) -> str:
    """The kind of a kernel, `other` if its name does not say."""
    for kind, pattern in KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"
