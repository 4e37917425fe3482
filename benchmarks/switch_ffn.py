"""The Switch FFN relative to the dense FFN with the same active parameters, and to a one-hot dispatch.

The one-hot reference is the (S, E, C) einsum of Mesh TensorFlow and of fairseq's moe branch. S = 4096 tokens,
capacity factor 1, fp32, one thread; forward and backward, load-balancing loss included.

Shapes: T time, B batch, S = B * T tokens, D model, E experts, C capacity.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.timing import Rows, one_thread, ratios, turns
from fairseq_alma.moe.layer import SwitchFFN
from fairseq_alma.moe.router import Routing

TOKENS = 4096
SHAPES = ((512, (4, 8, 12, 32), 8), (768, (4, 8, 12, 32), 8))  # D, all E, and the E of the one-hot layer


class OneHotFFN(SwitchFFN):
    """The same layer and parameters with one-hot dispatch and combine tensors."""

    def forward(self, x_TBD: Tensor, *_) -> tuple[Tensor, Routing]:
        """As SwitchFFN's, without padding."""
        time, batch, dim = x_TBD.shape
        x_SD = x_TBD.transpose(0, 1).reshape(-1, dim)
        routing = self.router(x_SD)
        chosen_SE = F.one_hot(routing.expert_S, self.experts)
        slot_SE = chosen_SE.cumsum(0) * chosen_SE - 1
        slots_C = torch.arange(self.capacity(len(x_SD)) or len(x_SD), device=x_TBD.device)
        dispatch_SEC = (slot_SE[:, :, None] == slots_C).to(x_SD.dtype)
        combine_SEC = dispatch_SEC * routing.gate_S[:, None, None].to(x_SD.dtype)
        x_ECD = torch.einsum("sec,sd->ecd", dispatch_SEC, x_SD)
        h_ECF = self.activation(torch.baddbmm(self.b1[:, None], x_ECD, self.w1.transpose(1, 2)))
        y_ECD = torch.baddbmm(self.b2[:, None], h_ECF, self.w2.transpose(1, 2))
        y_SD = torch.einsum("sec,ecd->sd", combine_SEC, y_ECD)
        return y_SD.view(batch, time, dim).transpose(0, 1), routing


def dense(dim: int) -> nn.Module:
    """fairseq's FFN with the same active parameters."""
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def switch(kind: type[SwitchFFN], dim: int, experts: int) -> SwitchFFN:
    """A layer with capacity factor 1."""
    return kind(dim, 4 * dim, experts, 1.0, -1.0, F.gelu, nn.Identity())


def step(layer: nn.Module, x: Tensor) -> Tensor:
    """A forward and backward pass; returns the output."""
    layer.zero_grad()
    found = layer(x)
    output = found if torch.is_tensor(found) else found[0]
    (output.sum() if torch.is_tensor(found) else output.sum() + found[1].balance_loss).backward()
    return output


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each D and E; the outputs of one-hot and Switch layers are compared first."""
    torch.manual_seed(0)
    rows = []
    for dim, counts, one_hot_experts in tqdm(SHAPES, disable=None, unit="width"):
        x = torch.randn(512, TOKENS // 512, dim, requires_grad=True)
        switches = {experts: switch(SwitchFFN, dim, experts) for experts in counts}
        one_hot = switch(OneHotFFN, dim, one_hot_experts)
        one_hot.load_state_dict(switches[one_hot_experts].state_dict())
        expected, _ = one_hot(x)
        torch.testing.assert_close(switches[one_hot_experts](x)[0], expected, atol=1e-4, rtol=1e-4)
        layers = {"dense": dense(dim), "one-hot": one_hot, **switches}
        measured = turns({name: partial(step, layer, x) for name, layer in layers.items()}, repeats)
        for experts, layer in switches.items():
            kept = layer(x)[1].kept_E.sum().item()
            row = {"D": dim, "E": experts, "Switch / dense": ratios(measured, experts, "dense")}
            row["one-hot / Switch"] = (
                ratios(measured, "one-hot", experts) if experts == one_hot_experts else ""
            )
            rows.append(row | {"dropped": f"{1 - kept / TOKENS:.0%}"})
    return rows
