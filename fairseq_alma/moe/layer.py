"""The Switch layer (Fedus et al., 2021): a router sends each token to one of E expert FFNs.

Shapes: B batch, T time, S = B * T tokens, D model, E experts, C capacity, R rows.
"""

import math

from torch import Tensor, nn

from fairseq_alma.moe.dispatchers import Dispatcher, as_autocast, fastest_dispatcher
from fairseq_alma.moe.expert_parallel import ExpertParallelDispatcher
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.router import Router, Routing


class SwitchFFN(Experts):
    """Router, dispatcher and experts: the output is gate * expert(x), or 0 for a dropped token.

    Args:
        dim, hidden, experts: D, F, and E over all processes.
        capacity_factor: in training, each expert takes at most C = ceil(capacity_factor * S / E) tokens of a
            batch; 0 for no limit.
        eval_capacity: C in evaluation as a fraction of S; negative for no limit, so that perplexity does not
            depend on the batch.
        activation, activation_dropout: as in the dense FFN.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        capacity_factor: float,
        eval_capacity: float,
        activation,
        activation_dropout: nn.Module,
    ):
        router = Router(dim, experts)  # before the experts: initial weights depend on the order of draws
        super().__init__(dim, hidden, experts, activation, activation_dropout)
        self.router = router
        self.experts = experts
        self.capacity_factor = capacity_factor
        self.eval_capacity = eval_capacity

    def capacity(self, tokens: int) -> int | None:
        """C for a batch of `tokens`; None for no limit."""
        if self.training:
            return math.ceil(self.capacity_factor * tokens / self.experts) if self.capacity_factor else None
        return math.ceil(self.eval_capacity * tokens) if self.eval_capacity >= 0 else None

    def forward(
        self, x_TBD: Tensor, padding_BT: Tensor | None = None, largest_batch: int = 0
    ) -> tuple[Tensor, Routing]:
        """Output (T, B, D), 0 for padding, and the routing of the tokens.

        `largest_batch` is the largest S of all processes; only expert parallelism needs it.
        """
        time, batch, dim = x_TBD.shape
        # Batch-major: what exceeds the capacity are the last sequences, not the end of each.
        x_SD = x_TBD.transpose(0, 1).reshape(-1, dim)
        padding_S = None if padding_BT is None else padding_BT.reshape(-1)
        # The capacity counts padding too: it must not depend on the content of later sequences.
        capacity = self.capacity(batch * time)
        routing = self.router(x_SD, padding_S, capacity)
        (x_SD,) = as_autocast(x_SD)
        dispatcher: Dispatcher
        if self.ep_group is None:
            dispatcher = fastest_dispatcher(x_SD, routing, capacity)
        else:
            rows = self.capacity(largest_batch)
            if rows is None:
                rows = self.ep_group.largest(routing.counts_E.max())
            dispatcher = ExpertParallelDispatcher(routing, rows, self.ep_group)
        y_RD = self.apply_experts(dispatcher.to_rows(x_SD), dispatcher)
        y_SD = dispatcher.to_tokens(y_RD, routing.gate_S)
        return y_SD.view(batch, time, dim).transpose(0, 1), routing


def switch_layers(model: nn.Module) -> dict[str, SwitchFFN]:
    """The model's Switch layers in order, by the number of their decoder block (from 0).

    In an ensemble the member's number precedes it: "1.3" is block 3 of member 1.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, SwitchFFN):
            found[".".join(part for part in name.split(".") if part.isdigit())] = module
    return found


def routings_of(output: tuple) -> dict[str, Routing]:
    """The routings in a fairseq decoder's output, by layer as in `switch_layers`; {} for other models."""
    extra = output[1]
    return extra.get("routings", {}) if isinstance(extra, dict) else {}
