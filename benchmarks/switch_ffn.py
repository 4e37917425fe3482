"""The Switch FFN against the dense FFN with the same active parameters, and against a one-hot dispatch.

The one-hot reference is the (S, E, C) einsum of Mesh TensorFlow and of fairseq's moe branch.
S = 4096 tokens, capacity factor 1, fp32, one thread.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.timing import spread
from fairseq_alma.moe.layer import SwitchFFN

TOKENS = 4096
SHAPES = ((512, (4, 8, 12, 32), 8), (768, (4, 8, 12, 32), 8))  # D, its E's, and the one of the one-hot layer


class OneHotFFN(SwitchFFN):
    """The same layer and parameters with one-hot dispatch and combine tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """As SwitchFFN's, without padding; `x` (T, B, D)."""
        tokens = x.transpose(0, 1).reshape(-1, x.size(-1))
        routing = self.router(tokens)
        chosen = F.one_hot(routing.expert, self.experts)
        slot = chosen.cumsum(0) * chosen - 1
        places = torch.arange(self.capacity(len(tokens)) or len(tokens))
        dispatch = (slot[:, :, None] == places).to(tokens.dtype)  # (S, E, C)
        combine = dispatch * routing.gate[:, None, None]
        inputs = torch.einsum("sec,sd->ecd", dispatch, tokens)
        hidden = self.activation(torch.baddbmm(self.b1[:, None], inputs, self.w1.transpose(1, 2)))
        outputs = torch.baddbmm(self.b2[:, None], hidden, self.w2.transpose(1, 2))
        return torch.einsum("sec,ecd->sd", combine, outputs).view(x.size(1), x.size(0), -1).transpose(0, 1)


def dense(dim: int) -> nn.Module:
    """fairseq's FFN of the same active size."""
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def switch(kind: type[SwitchFFN], dim: int, experts: int) -> SwitchFFN:
    """Capacity factor 1."""
    return kind(dim, 4 * dim, experts, 1.0, -1.0, F.gelu, nn.Identity())


def seconds(layer: nn.Module, x: Tensor) -> float:
    """One forward and backward pass."""
    layer.zero_grad()
    started = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - started


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each D and E. A repeat runs the dense layer, then all others; the first is a warm-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    progress = tqdm(total=len(SHAPES) * (repeats + 1), disable=None, unit="repeat")
    for dim, counts, one_hot_experts in SHAPES:
        x = torch.randn(512, TOKENS // 512, dim, requires_grad=True)
        kinds: dict[tuple[str, int], Any] = {("dense", 0): dense(dim)} | {
            ("Switch", e): switch(SwitchFFN, dim, e) for e in counts
        }
        one_hot = kinds["one-hot", one_hot_experts] = switch(OneHotFFN, dim, one_hot_experts)
        one_hot.load_state_dict(kinds["Switch", one_hot_experts].state_dict())
        torch.testing.assert_close(kinds["Switch", one_hot_experts](x), one_hot(x), atol=1e-4, rtol=1e-4)
        times = []
        for _ in range(repeats + 1):
            times.append({name: seconds(layer, x) for name, layer in kinds.items()})
            progress.update()
        for experts in counts:
            ours = ("Switch", experts)
            row = {
                "D": dim,
                "E": experts,
                "Switch / dense": spread([time[ours] / time["dense", 0] for time in times[1:]]),
                "one-hot / Switch": "",
                "dropped": f"{1 - kinds[ours].kept.sum().item() / TOKENS:.0%}",
            }
            if experts == one_hot_experts:
                ratios = [time["one-hot", experts] / time[ours] for time in times[1:]]
                row["one-hot / Switch"] = spread(ratios)
            rows.append(row)
    torch.set_num_threads(threads)
    return rows
