"""Perplexity of a language model and the loss of each expert, in one pass in bounded memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq import utils
from torch import Tensor

from fairseq_alma.moe.layer import expert_losses, switch_layers


@dataclass
class Evaluation:
    """Sums over a data set; nll in nats."""

    nll: float = 0.0
    tokens: int = 0
    expert_loss: dict[str, Tensor] = field(default_factory=dict)
    """By layer, (E,) float64: summed nll of the tokens that chose each expert."""
    expert_tokens: dict[str, Tensor] = field(default_factory=dict)
    """By layer, (E,): how many did."""


def token_nll(logits: Tensor, target: Tensor, pad: int) -> Tensor:
    """Negative log-likelihood of each target token in nats, (B, T) fp32; 0 for padding."""
    flat = F.cross_entropy(
        logits.reshape(-1, logits.size(-1)).float(), target.reshape(-1), ignore_index=pad, reduction="none"
    )
    return flat.view(target.shape)


@torch.no_grad()
def evaluate(model, batches: Iterable, pad: int) -> Evaluation:
    """Evaluate `model` in eval mode (no dropout, by default no dropped tokens) on fairseq's `batches`."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    layers = switch_layers(model)
    result = Evaluation()
    for sample in batches:
        if not sample:
            continue
        if device.type == "cuda":
            sample = utils.move_to_cuda(sample, device=device)
        logits = model(**sample["net_input"])[0]
        nll = token_nll(logits, sample["target"], pad)
        result.nll += nll.double().sum().item()
        result.tokens += int((sample["target"] != pad).sum())
        for name, layer in layers.items():
            loss, load = expert_losses(layer, nll).cpu(), layer.routing.counts.cpu()
            result.expert_loss[name] = result.expert_loss.get(name, 0) + loss
            result.expert_tokens[name] = result.expert_tokens.get(name, 0) + load
    model.train(was_training)
    return result
