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
from fairseq_alma.switch_layer import SwitchFFN

TOKENS = 4096
SHAPES = ((512, (4, 8, 12, 32)), (768, (4, 8, 12, 32)))  # D, and E for each


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


def seconds(layer: nn.Module, x: Tensor) -> float:
    """One forward and backward pass."""
    layer.zero_grad()
    started = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - started


def paired(ours: nn.Module, peer: nn.Module, x: Tensor, repeats: int) -> list[float]:
    """Ratios peer / ours of interleaved runs; the first pair, a warm-up, is left out."""
    return [seconds(peer, x) / seconds(ours, x) for _ in range(repeats + 1)][1:]


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each D and E."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for dim, experts in tqdm([(d, e) for d, all_e in SHAPES for e in all_e], disable=None, unit="layer"):
        x = torch.randn(512, TOKENS // 512, dim, requires_grad=True)
        ours, one_hot = (
            kind(dim, 4 * dim, experts, 1.0, -1.0, F.gelu, nn.Identity()) for kind in (SwitchFFN, OneHotFFN)
        )
        one_hot.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x), one_hot(x), atol=1e-4, rtol=1e-4)
        rows.append(
            {
                "D": dim,
                "E": experts,
                "Switch / dense": spread(paired(ours, dense(dim), x, repeats), lambda ratio: 1 / ratio),
                "one-hot / Switch": spread(paired(ours, one_hot, x, max(3, repeats // 3))),
                "dropped": f"{1 - ours.kept.sum().item() / TOKENS:.0%}",
            }
        )
    torch.set_num_threads(threads)
    return rows
