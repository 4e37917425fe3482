"""The E expert FFNs of a Switch layer, stacked.

Shapes: D model, F hidden, E experts, R rows, W processes.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.moe.dispatchers import Dispatcher, as_autocast
from fairseq_alma.moe.expert_parallel import ExpertParallelGroup

STACKED = ("w1", "b1", "w2", "b2")
"""Names of the experts' parameters; dimension 0 is the expert."""


class Experts(nn.Module):
    """FFNs fc2(act(fc1(x))) with stacked parameters: w1 (E, F, D), b1 (E, F), w2 (E, D, F), b2 (E, D).

    One tensor for all experts is one tensor to grow and one gradient bucket. `SwitchFFN` is a subclass, not a
    parent module, so that the parameters' names in checkpoints have no further prefix.
    """

    def __init__(self, dim: int, hidden: int, experts: int, activation, activation_dropout: nn.Module):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b1 = nn.Parameter(torch.empty(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b2 = nn.Parameter(torch.empty(experts, dim))
        for weight, fan_in in ((self.w1, dim), (self.b1, dim), (self.w2, hidden), (self.b2, hidden)):
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)  # as nn.Linear does
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.ep_group: ExpertParallelGroup | None = None

    def apply_experts(self, x_RD: Tensor, dispatcher: Dispatcher) -> Tensor:
        """Each row through its expert, (R, D)."""
        w1_EFD, b1_EF, w2_EDF, b2_ED = as_autocast(self.w1, self.b1, self.w2, self.b2)
        h_RF = self.activation_dropout(self.activation(dispatcher.linear(x_RD, w1_EFD, b1_EF)))
        return dispatcher.linear(h_RF, w2_EDF, b2_ED)

    def parallelize(self, group: ExpertParallelGroup) -> None:
        """Keep the E / W experts of this process.

        state_dict() still has all experts on process 0. It gathers them, so every process must call it.
        """
        self.ep_group = group
        for name in STACKED:
            local = nn.Parameter(group.local(getattr(self, name).data))
            local.expert = True  # type: ignore[attr-defined]  # fairseq averages no gradient with this mark
            # The all-to-all already summed over processes; divide by W as DDP does.
            local.register_hook(lambda grad: grad / group.size)
            setattr(self, name, local)
        self._register_state_dict_hook(partial(_replace, group.gather))
        self.register_load_state_dict_pre_hook(partial(_replace, group.local))


def _replace(function, experts: Experts, state: dict[str, Any], prefix: str, *_) -> None:
    """Apply `function` to the experts' parameters in a state dict, in place."""
    for name in STACKED:
        state[prefix + name] = function(state[prefix + name])
