"""fairseq's cross_entropy without its logits: they are computed for a chunk of tokens at a time.

With 50k units the logits, their log-softmax and its gradient are most of the memory that a small model's
update takes. Here a chunk's gradient is taken while its logits are there, in the forward pass, as in Liger
Kernel (arXiv 2410.10989): backward has nothing to do but scale it.

Shapes: B sequences, T tokens, S = B * T, K tokens of a chunk, D features, V the dictionary. UMix has several
members, whose features lie side by side: D is then the sum of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from torch import Tensor, nn

from alma.errors import UserError
from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.dispatch import as_autocast


@dataclass
class ChunkedCrossEntropyConfig(CrossEntropyCriterionConfig):
    """fairseq's cross_entropy and the size of a chunk."""

    loss_chunk_tokens: int = field(
        default=1024,
        metadata={"help": "compute the logits of this many tokens at a time; fewer take less memory"},
    )


@register_criterion("chunked_cross_entropy", dataclass=ChunkedCrossEntropyConfig)
class ChunkedCrossEntropyCriterion(CrossEntropyCriterion):
    """fairseq's cross_entropy, in training and in validation, for decoders that end in a linear layer.

    After a forward pass `nll` (B, T) fp32 is the loss of each token in nats, 0 for padding.

    The output weights are used outside the model's forward pass, as by fairseq's adaptive_loss: under
    pytorch_ddp, --find-unused-parameters goes only with weights that are tied to the embedding.
    """

    def __init__(self, task, sentence_avg: bool, loss_chunk_tokens: int):
        super().__init__(task, sentence_avg)
        if loss_chunk_tokens < 1:
            raise UserError("--loss-chunk-tokens must be 1 or more")
        self.chunk = loss_chunk_tokens
        self.nll: Tensor

    def forward(self, model, sample, reduce: bool = True):
        """As fairseq's. UserError: a decoder without a linear output layer."""
        output_weights(model.decoder)  # refuse before the model does, with a traceback
        net_input = {**sample["net_input"], "features_only": True}
        return super().forward(model, {**sample, "net_input": net_input}, reduce)

    def compute_loss(self, model, net_output, sample, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Loss from the features (B, T, D) in `net_output`; only the sum (`reduce`) has a gradient."""
        features, target = net_output[0], model.get_targets(sample, net_output)
        loss, nll = chunked_nll(
            features.reshape(-1, features.size(-1)),
            output_weights(model.decoder),
            target.reshape(-1),
            self.padding_idx,
            self.chunk,
        )
        self.nll = nll.view(target.shape)
        loss = loss if reduce else nll
        return loss, loss


def output_weights(decoder: nn.Module) -> list[Tensor]:
    """The (V, D) matrices that turn a decoder's features into logits, one for each member of UMix.

    UserError: there is no such matrix (adaptive softmax, a mean of probabilities, not a Transformer).
    """
    if isinstance(decoder, EnsembleDecoder) and decoder.average == "logits":
        return [weight for member in decoder.members for weight in output_weights(member)]
    layer = getattr(decoder, "output_projection", None)
    # With an adaptive softmax fairseq's decoder has None there.
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        raise UserError(
            "--criterion chunked_cross_entropy needs logits that are a linear function of the features (no "
            f"adaptive softmax, no mean of probabilities), {type(decoder).__name__} has others: use another"
        )
    return [layer.weight]


def chunked_nll(
    features: Tensor, weights: Sequence[Tensor], target: Tensor, pad: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of `target` (S,) in nats, fp32: its sum, and of each token without gradient.

    Features (S, D) times weights (V, D) are the logits; several weights have a part of D each, and their
    logits are summed. At most `chunk` tokens' logits are there at a time, and none for padding.
    """
    device = features.device.type
    features, *weights = as_autocast(features, *weights)  # inside it would choose for each operation anew
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            return _ChunkedNLL.apply(features, target, pad, chunk, *weights)
        nll, _ = _run(features, weights, target, pad, chunk)
    return nll.sum(), nll


class _ChunkedNLL(torch.autograd.Function):
    """Takes the gradient in forward, where the logits are; in fp16 in backward, where the loss scale is.

    Most of the gradient by the logits is below fp16's range: the loss scale has to multiply it before it is
    cast. That costs the logits once more.
    """

    @staticmethod
    def forward(ctx, features: Tensor, target: Tensor, pad: int, chunk: int, *weights: Tensor):
        ctx.pad, ctx.chunk, ctx.later = pad, chunk, features.dtype == torch.float16
        scale = None if ctx.later else torch.ones((), device=features.device)
        nll, grads = _run(features, weights, target, pad, chunk, scale)
        ctx.save_for_backward(*((features, target, *weights) if ctx.later else grads))
        ctx.mark_non_differentiable(nll)
        return nll.sum(), nll

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        if ctx.later:
            features, target, *weights = ctx.saved_tensors
            _, grads = _run(features, weights, target, ctx.pad, ctx.chunk, grad_loss)
        else:
            grads = [grad.mul_(grad_loss) for grad in ctx.saved_tensors]  # a second backward would raise
        by_features, *by_weights = grads  # of the weights in fp32: autograd casts them
        return by_features, None, None, None, *by_weights


def _run(
    features: Tensor,
    weights: Sequence[Tensor],
    target: Tensor,
    pad: int,
    chunk: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of each token (S,) fp32 and, with a `scale`, that times the gradients of their sum.

    These are by features (S, D), in their dtype, and by each of the weights (V, D), in fp32.
    """
    nll = torch.zeros(len(target), device=target.device)
    memory = features.new_empty(min(chunk, len(target)), len(weights[0]))  # of every chunk's logits
    by_features, by_weights = torch.zeros_like(features), []
    if scale is not None:
        by_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    sizes = [weight.size(1) for weight in weights]
    for rows in (target != pad).nonzero().squeeze(1).split(chunk):
        parts, wanted = features[rows].split(sizes, dim=1), target[rows, None]
        log_probs = _log_probs(parts, weights, memory[: len(rows)])
        nll[rows] = -log_probs.gather(1, wanted).squeeze(1)
        if scale is not None:
            by_logits = _by_logits(log_probs, wanted, scale, features.dtype)
            by_features[rows] = torch.cat([by_logits @ weight for weight in weights], dim=1)
            for total, part in zip(by_weights, parts, strict=True):
                _add_product(total, by_logits.t(), part)
            del by_logits
        del log_probs  # before the next chunk's, in half precision
    return nll, [by_features, *by_weights]


def _log_probs(parts: Sequence[Tensor], weights: Sequence[Tensor], logits: Tensor) -> Tensor:
    """Of the members' features (K, D of each): (K, V) fp32; `logits` (K, V) is overwritten."""
    torch.mm(parts[0], weights[0].t(), out=logits)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        logits.addmm_(part, weight.t())
    if logits.dtype == torch.float32:
        return torch.log_softmax(logits, dim=-1, out=logits)
    return F.log_softmax(logits, dim=-1, dtype=torch.float32)


def _by_logits(log_probs: Tensor, wanted: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the summed loss, (K, V), in place of the `log_probs`; times `scale` unless it is fp32."""
    grad = log_probs.exp_()
    grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1))
    if dtype == torch.float32:
        return grad  # nothing can underflow, and backward's scaling is of far fewer numbers
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with `total` in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
