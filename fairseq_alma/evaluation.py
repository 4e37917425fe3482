"""Perplexity of a language model and the loss of each expert, in one pass and bounded memory.

Shapes: B batch, T time, V vocabulary, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq import utils
from torch import Tensor

from fairseq_alma.moe.layer import routings_of
from fairseq_alma.moe.metrics import expert_losses


@dataclass
class Evaluation:
    """Sums over a data set; nll in nats."""

    nll: float = 0.0
    tokens: int = 0
    expert_loss: dict[str, Tensor] = field(default_factory=dict)  # by layer: `expert_losses`, (E,)
    expert_tokens: dict[str, Tensor] = field(default_factory=dict)  # by layer: tokens per expert, (E,)


def token_nll(logits_BTV: Tensor, target_BT: Tensor, pad: int) -> Tensor:
    """Negative log-likelihood of each target token in nats, (B, T) fp32; 0 for padding."""
    logits = logits_BTV.reshape(-1, logits_BTV.size(-1)).float()
    nll = F.cross_entropy(logits, target_BT.reshape(-1), ignore_index=pad, reduction="none")
    return nll.view(target_BT.shape)


@torch.no_grad()
def evaluate(model, batches: Iterable, pad: int) -> Evaluation:
    """Evaluate `model` on fairseq's `batches` in eval mode: no dropout and, by default, no dropped tokens."""
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
        result.nll += nll_BT.double().sum().item()
        result.tokens += int((sample["target"] != pad).sum())
        for layer, routing in routings_of(output).items():
            loss_E, counts_E = expert_losses(routing, nll_BT).cpu(), routing.counts_E.cpu()
            result.expert_loss[layer] = result.expert_loss.get(layer, 0) + loss_E
            result.expert_tokens[layer] = result.expert_tokens.get(layer, 0) + counts_E
    model.train(was_training)
    return result
