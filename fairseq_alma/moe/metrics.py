"""Perplexity of a language model, and routing statistics and losses by expert of its Switch
layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.logging import metrics
from numpy.typing import NDArray
from torch import Tensor

from fairseq_alma.moe.layer import routings_of
from fairseq_alma.moe.router import Routing

_PREFIX = "moe_l"  # keys in a fairseq logging output are moe_l{layer}_{statistic}


@torch.no_grad()
def expert_losses(routing: Routing, nll_BT: Tensor) -> Tensor:
    """Loss summed over the tokens of each expert, (E,) float64: "cumulative loss" in the paper's
    App. A.
    """
    experts = routing.probs_SE.size(1)
    # The last element takes the loss of padding.
    sums = torch.zeros(experts + 1, dtype=torch.float64, device=nll_BT.device)
    sums.index_add_(0, routing.expert_S, nll_BT.reshape(-1).double())
    return sums[:-1]


@torch.no_grad()
def layer_stats(routings: Mapping[str, Routing], nll_BT: Tensor | None = None) -> dict[str, Tensor]:
    """Routing statistics of one batch, as entries of a fairseq logging output.

    Each entry is a sum over the routed tokens of a layer, so that batches can be added up; dividing
    by the layer's entry `tokens` gives the mean. All are scalars, except `load` (E,), the tokens of
    each expert, and, if `nll_BT` (nats) is given, `nll` (E,), the loss of each expert.
    """
    entries: dict[str, Tensor] = {}
    for layer, routing in routings.items():
        real_S = routing.expert_S < routing.probs_SE.size(1)
        tokens = routing.counts_E.sum()
        entropy_S = torch.special.entr(routing.probs_SE).sum(-1)
        stats = {
            "tokens": tokens,
            "dropped": tokens - routing.kept_E.sum(),
            "entropy": (entropy_S * real_S).sum(),
            "top1": (routing.probs_SE.amax(-1) * real_S).sum(),
            "balance": routing.balance_loss.detach() * tokens,
            "load": routing.counts_E,
        }
        if nll_BT is not None:
            stats["nll"] = expert_losses(routing, nll_BT)
        entries |= {f"{_PREFIX}{layer}_{name}": value for name, value in stats.items()}
    return entries


def log_layers(logging_outputs: Sequence[Mapping[str, Any]]) -> None:
    """Log the metrics of each layer from the entries of `layer_stats` of all processes and
    batches."""
    for layer, sums in sorted(_sums_by_layer(logging_outputs).items()):
        tokens = sums["tokens"][0]
        if tokens == 0:
            continue
        load = sums["load"]
        values = {
            "balance_loss": sums["balance"][0] / tokens,
            "dropped": sums["dropped"][0] / tokens,
            "max_load": max(load) / tokens * len(load),
            "dead_experts": load.count(0),
            "entropy": sums["entropy"][0] / tokens,
            "top1_prob": sums["top1"][0] / tokens,
        }
        for expert, count in enumerate(load):
            values[f"share{expert}"] = count / tokens
        for expert, (nll, count) in enumerate(zip(sums.get("nll", []), load, strict=False)):
            values[f"nll{expert}"] = nll / max(1, count)
        for name, value in values.items():
            metrics.log_scalar(f"{layer}_{name}", value, tokens, priority=2000, round=3)


def _sums_by_layer(
    logging_outputs: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, list[float]]]:
    """The entries of `layer_stats`, added up, by "l{layer}" and statistic; {} if there are none."""
    totals: dict[str, Any] = {}
    for log in logging_outputs:
        for key, value in log.items():
            if key.startswith(_PREFIX):
                totals[key] = totals.get(key, 0) + value
    if not totals:
        return {}
    # One transfer for all, so one sync. fairseq's meters take ten times as long with tensors.
    numbers = torch.cat([total.double().reshape(-1) for total in totals.values()]).tolist()
    layers: dict[str, dict[str, list[float]]] = {}
    start = 0
    for key, total in totals.items():
        layer, statistic = key.removeprefix("moe_").rsplit("_", 1)
        end = start + total.numel()
        layers.setdefault(layer, {})[statistic] = numbers[start:end]
        start = end
    return layers


@dataclass
class Evaluation:
    """Sums over a data set; nll in nats."""

    nll: float = 0.0
    tokens: int = 0
    expert_loss: dict[str, Tensor] = field(default_factory=dict)  # by layer: `expert_losses`, (E,)
    expert_tokens: dict[str, Tensor] = field(
        default_factory=dict
    )  # by layer: tokens per expert, (E,)


class LossesInOrder:
    """The loss of each token of a data set, collected from batches of its blocks in any order."""

    def __init__(self) -> None:
        self._losses: dict[int, NDArray[np.float32]] = {}  # by number of the block

    def add(self, blocks_B: Tensor, nll_BT: Tensor, is_token_BT: Tensor) -> None:
        """Add a batch: the number of each block, and the losses of its tokens among padding."""
        nll = nll_BT.cpu().numpy()
        is_token = is_token_BT.cpu().numpy()
        for row, block in enumerate(blocks_B.tolist()):
            self._losses[block] = nll[row][is_token[row]]

    def joined(self) -> NDArray[np.float32]:
        """(tokens,), in the order of the data."""
        return np.concatenate([self._losses[block] for block in sorted(self._losses)])


def token_nll(logits_BTV: Tensor, target_BT: Tensor, pad: int) -> Tensor:
    """Negative log-likelihood of each target token in nats, (B, T) fp32; 0 for padding."""
    logits = logits_BTV.reshape(-1, logits_BTV.size(-1)).float()
    nll = F.cross_entropy(logits, target_BT.reshape(-1), ignore_index=pad, reduction="none")
    return nll.view(target_BT.shape)


@torch.no_grad()
def evaluate(
    model, batches: Iterable, pad: int, in_order: LossesInOrder | None = None
) -> Evaluation:
    """Evaluate `model`, in eval mode, on fairseq's `batches` in one pass.

    Memory is bounded, but for `in_order`, to which the loss of each token is added.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    result = Evaluation()
    for sample in batches:
        if not sample:
            continue
        if device.type == "cuda":
            sample = utils.move_to_cuda(sample, device=device)
        output = model(**sample["net_input"])
        nll_BT = token_nll(output[0], sample["target"], pad)
        is_token_BT = sample["target"] != pad
        result.nll += nll_BT.double().sum().item()
        result.tokens += int(is_token_BT.sum())
        if in_order is not None:
            in_order.add(sample["id"], nll_BT, is_token_BT)
        for layer, routing in routings_of(output).items():
            loss_E = expert_losses(routing, nll_BT).cpu()
            counts_E = routing.counts_E.cpu()
            result.expert_loss[layer] = result.expert_loss.get(layer, 0) + loss_E
            result.expert_tokens[layer] = result.expert_tokens.get(layer, 0) + counts_E
    model.train(was_training)
    return result
