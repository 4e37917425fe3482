"""The Switch layer (Fedus et al., 2021): a router sends each token to one of E expert FFNs."""

import math
from functools import partial
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from torch import Tensor, nn

from alma.errors import UserError
from fairseq_alma.moe.dispatchers import Dispatcher, as_autocast, fastest_dispatcher
from fairseq_alma.moe.expert_parallel import ExpertParallelDispatcher, ExpertParallelGroup
from fairseq_alma.moe.router import Router, Routing

STACKED = ("w1", "b1", "w2", "b2")  # names of the experts' parameters; dimension 0 is the expert


class SwitchFFN(nn.Module):
    """Router, dispatcher and experts: the output is gate * expert(x), or 0 for a dropped token.

    The experts' FFNs fc2(act(fc1(x))) are stacked, w1 (E, F, D), b1 (E, F), w2 (E, D, F), b2 (E,
    D): one tensor to grow and one gradient bucket.

    Args:
        dim, hidden, experts: D, F, and E over all processes. capacity_factor: in training, each
        expert takes at most C = ceil(capacity_factor * S / E) tokens of a batch; 0 for no limit.
        There is none in evaluation: perplexity does not depend on the batch. activation,
        activation_dropout: as in the dense FFN.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        capacity_factor: float,
        activation,
        activation_dropout,
    ):
        super().__init__()
        # Built first: the initial weights depend on the order of the random draws.
        router = Router(dim, experts)
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b1 = nn.Parameter(torch.empty(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b2 = nn.Parameter(torch.empty(experts, dim))
        fan_ins = ((self.w1, dim), (self.b1, dim), (self.w2, hidden), (self.b2, hidden))
        for weight, fan_in in fan_ins:
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)  # as nn.Linear does
        self.activation = activation
        self.activation_dropout = activation_dropout
        # Registered after the experts, because checkpoints have the parameters in this order.
        self.router = router
        self.experts = experts
        self.capacity_factor = capacity_factor
        self.ep_group: ExpertParallelGroup | None = None

    def capacity(self, tokens: int) -> int | None:
        """C for a batch of `tokens`; None for no limit."""
        if not self.training or not self.capacity_factor:
            return None
        return math.ceil(self.capacity_factor * tokens / self.experts)

    def forward(
        self, x_BTD: Tensor, padding_BT: Tensor | None = None, largest_batch: int = 0
    ) -> tuple[Tensor, Routing]:
        """Output (B, T, D), 0 for padding, and the routing of the tokens.

        `largest_batch` is the largest S of all processes; only expert parallelism needs it.
        """
        # Batch-major, so that the capacity drops tokens of the last sequences, not the end of each
        # sequence.
        x_SD = x_BTD.reshape(-1, x_BTD.size(-1))
        padding_S = None if padding_BT is None else padding_BT.reshape(-1)
        # The capacity counts padding too: it must not depend on the content of later sequences.
        capacity = self.capacity(len(x_SD))
        routing = self.router(x_SD, padding_S, capacity)
        x_SD, w1_EFD, b1_EF, w2_EDF, b2_ED = as_autocast(x_SD, self.w1, self.b1, self.w2, self.b2)
        dispatcher: Dispatcher
        if self.ep_group is None:
            dispatcher = fastest_dispatcher(x_SD, routing, capacity)
        else:
            rows = self.capacity(largest_batch)
            if rows is None:
                rows = self.ep_group.largest(routing.counts_E.max())
            dispatcher = ExpertParallelDispatcher(routing, rows, self.ep_group)
        h_RF = self.activation(dispatcher.linear(dispatcher.to_rows(x_SD), w1_EFD, b1_EF))
        y_RD = dispatcher.linear(self.activation_dropout(h_RF), w2_EDF, b2_ED)
        y_SD = dispatcher.to_tokens(y_RD, routing.gate_S)
        return y_SD.view(x_BTD.shape), routing

    def parallelize(self, group: ExpertParallelGroup) -> None:
        """Keep the E / W experts of this process.

        state_dict() then gathers all experts on process 0, so it is a collective.
        """
        self.ep_group = group
        for name in STACKED:
            local = nn.Parameter(group.local(getattr(self, name).data))
            # fairseq does not average gradients of parameters with this attribute.
            local.expert = True  # type: ignore[attr-defined]
            # The all-to-all already summed over processes; divide by W as DDP does.
            local.register_hook(lambda grad: grad / group.size)
            setattr(self, name, local)
        self._register_state_dict_hook(partial(_replace, group.gather))
        self.register_load_state_dict_pre_hook(partial(_replace, group.local))


def _replace(function, layer: SwitchFFN, state: dict[str, Any], prefix: str, *_) -> None:
    """Apply `function` to the experts' parameters in a state dict, in place."""
    for name in STACKED:
        state[prefix + name] = function(state[prefix + name])


def switch_layers(model: nn.Module) -> dict[str, SwitchFFN]:
    """The model's Switch layers by decoder block, from 0; in an ensemble "1.3" is block 3 of member
    1."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, SwitchFFN):
            numbers = [part for part in name.split(".") if part.isdigit()]
            layers[".".join(numbers)] = module
    return layers


def divide_experts(model: nn.Module, experts: int) -> None:
    """Keep this process's share of the experts, if there are several processes.

    UserError: the experts cannot be divided among them.
    """
    processes = distributed_utils.get_data_parallel_world_size()
    if processes == 1:
        return
    if experts % processes:
        problem = f"{experts} experts cannot be divided among {processes} processes"
        remedy = "use a multiple as --moe-expert-count, or drop the flag"
        raise UserError(f"--moe-expert-parallel: {problem}; {remedy}")
    group = ExpertParallelGroup(distributed_utils.get_data_parallel_group())
    for layer in switch_layers(model).values():
        layer.parallelize(group)


def routings_of(output: tuple) -> dict[str, Routing]:
    """The routings in a fairseq decoder's output, by layer as in `switch_layers`.

    {} for models without Switch layers.
    """
    extra = output[1]
    if not isinstance(extra, dict):
        return {}
    return extra.get("routings", {})
