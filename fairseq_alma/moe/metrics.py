"""Metrics of the Switch layers: routing statistics, losses by expert, and fairseq's log.

Shapes: B batch, T time, S = B * T tokens, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fairseq.logging import metrics
from torch import Tensor

from fairseq_alma.moe.router import Routing

_PREFIX = "moe_l"
"""Of the keys in a fairseq logging output: moe_l{layer}_{statistic}."""


@torch.no_grad()
def routing_stats(routing: Routing) -> dict[str, Tensor]:
    """Sums over the routed tokens; divide by `tokens` after adding them up over batches.

    tokens, dropped, entropy, top1, balance: scalars; load: (E,).
    """
    real_S = routing.expert_S < routing.probs_SE.size(1)
    tokens = routing.counts_E.sum()
    entropy_S = torch.special.entr(routing.probs_SE).sum(-1)
    top1_S = routing.probs_SE.amax(-1)
    return {
        "tokens": tokens,
        "dropped": tokens - routing.kept_E.sum(),
        "entropy": (entropy_S * real_S).sum(),
        "top1": (top1_S * real_S).sum(),
        "balance": routing.balance_loss.detach() * tokens,
        "load": routing.counts_E,
    }


@torch.no_grad()
def expert_losses(routing: Routing, nll_BT: Tensor) -> Tensor:
    """Loss summed over the tokens of each expert, (E,) float64: "cumulative loss" in the paper's App. A."""
    experts = routing.probs_SE.size(1)
    sums = torch.zeros(experts + 1, dtype=torch.float64, device=nll_BT.device)  # the last is of padding
    sums.index_add_(0, routing.expert_S, nll_BT.reshape(-1).double())
    return sums[:-1]


def layer_stats(routings: Mapping[str, Routing], nll_BT: Tensor | None = None) -> dict[str, Tensor]:
    """Entries of a fairseq logging output: statistics of each layer and, with `nll_BT`, losses by expert."""
    found: dict[str, Tensor] = {}
    for layer, routing in routings.items():
        stats = routing_stats(routing)
        if nll_BT is not None:
            stats["nll"] = expert_losses(routing, nll_BT)
        found.update({f"{_PREFIX}{layer}_{name}": value for name, value in stats.items()})
    return found


def log_layers(logging_outputs: Sequence[Mapping[str, Any]]) -> None:
    """Add up the entries of `layer_stats` over processes and batches, and log the metrics of each layer."""
    totals: dict[str, dict[str, Any]] = {}
    for log in logging_outputs:
        for key, value in log.items():
            if key.startswith(_PREFIX):
                layer, name = key.rsplit("_", 1)
                total = totals.setdefault(layer.removeprefix("moe_"), {})
                total[name] = total.get(name, 0) + value
    for layer in sorted(totals):
        if float(totals[layer]["tokens"]) > 0:
            _log(layer, totals[layer])


def _log(layer: str, total: Mapping[str, Any]) -> None:
    tokens, load_E = total["tokens"], total["load"]
    share_E = load_E / tokens
    nll_E = total["nll"] / load_E.clamp(min=1) if "nll" in total else ()
    for name, value in (
        ("balance_loss", total["balance"] / tokens),
        ("dropped", total["dropped"] / tokens),
        ("max_load", share_E.max() * len(share_E)),
        ("dead_experts", (load_E == 0).sum()),
        ("entropy", total["entropy"] / tokens),
        ("top1_prob", total["top1"] / tokens),
        *((f"share{expert}", share) for expert, share in enumerate(share_E)),
        *((f"nll{expert}", nll) for expert, nll in enumerate(nll_E)),
    ):
        metrics.log_scalar(f"{layer}_{name}", value, tokens, priority=2000, round=3)
