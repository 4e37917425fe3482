"""The losses of 0324bce: the chunked one copies its logits to fp32, and adds up the weights'
gradient in a buffer of its own; the whole one is fairseq's. Shapes as in
`fairseq_alma.training.loss`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_alma.moe.dispatchers import as_autocast
from fairseq_alma.training.loss import ChunkedCrossEntropyCriterion, output_weights

Ids = Sequence[int]


def compute_loss(
    self: ChunkedCrossEntropyCriterion, model, net_output, sample, reduce: bool = True
) -> tuple[Tensor, Tensor]:
    """ChunkedCrossEntropyCriterion.compute_loss."""
    features = net_output[0]
    target = model.get_targets(sample, net_output)
    loss, nll = chunked_nll(
        features.reshape(-1, features.size(-1)),
        output_weights(model.decoder),
        target.reshape(-1),
        self.padding_idx,
        self.chunk,
        self.unused,
    )
    self.nll = nll.view(target.shape)
    if not reduce:
        loss = nll
    return loss, loss


def chunked_nll(
    features: Tensor, weights: Sequence[Tensor], target: Tensor, pad: int, chunk: int, unused: Ids
) -> tuple[Tensor, Tensor]:
    """The function of that name."""
    features, *weights = as_autocast(features, *weights)
    with torch.autocast(features.device.type, enabled=False):
        if torch.is_grad_enabled():
            return ChunkedNLL.apply(features, target, pad, chunk, unused, *weights)
        nll, _ = run(features, weights, target, pad, chunk, unused)
    return nll.sum(), nll


class ChunkedNLL(torch.autograd.Function):
    """Gradients in the forward pass; fp16 computes the logits twice."""

    @staticmethod
    def forward(
        ctx, features: Tensor, target: Tensor, pad: int, chunk: int, unused: Ids, *weights: Tensor
    ):
        ctx.pad = pad
        ctx.chunk = chunk
        ctx.unused = unused
        ctx.computes_in_backward = features.dtype == torch.float16
        if ctx.computes_in_backward:
            nll, _ = run(features, weights, target, pad, chunk, unused)
            ctx.save_for_backward(features, target, *weights)
        else:
            scale = torch.ones((), device=features.device)
            nll, gradients = run(features, weights, target, pad, chunk, unused, scale)
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(nll)
        return nll.sum(), nll

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        if ctx.computes_in_backward:
            features, target, *weights = ctx.saved_tensors
            _, gradients = run(features, weights, target, ctx.pad, ctx.chunk, ctx.unused, grad_loss)
        else:
            gradients = [gradient.mul_(grad_loss) for gradient in ctx.saved_tensors]
        by_features, *by_weights = gradients
        return by_features, None, None, None, None, *by_weights


def run(
    features: Tensor,
    weights: Sequence[Tensor],
    target: Tensor,
    pad: int,
    chunk: int,
    unused: Ids,
    scale: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of each token, (S,) fp32, and, with a `scale`, the scaled gradients of the sum."""
    nll = torch.zeros(len(target), device=target.device)
    logits_memory = features.new_empty(min(chunk, len(target)), len(weights[0]))
    by_features = torch.zeros_like(features)
    by_weights = []
    if scale is not None:
        by_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    widths = [weight.size(1) for weight in weights]
    chunks, may_be_padded = chunks_of(target, pad, chunk)
    for rows in chunks:
        parts = features[rows].split(widths, dim=1)
        ids = target[rows, None]
        logits = torch.mm(parts[0], weights[0].t(), out=logits_memory[: len(rows)])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            logits.addmm_(part, weight.t())
        if unused:
            logits.index_fill_(1, target.new_tensor(unused), -torch.inf)
        in_place = logits if logits.dtype == torch.float32 else None
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32, out=in_place)
        loss = -log_probs.gather(1, ids)
        if may_be_padded:
            loss.masked_fill_(ids == pad, 0.0)
        nll[rows] = loss.squeeze(1)
        if scale is not None:
            factor = scale * (ids != pad) if may_be_padded else scale
            by_logits = gradient(log_probs, ids, factor, features.dtype, may_be_padded)
            by_features[rows] = torch.cat([by_logits @ weight for weight in weights], dim=1)
            for total, part in zip(by_weights, parts, strict=True):
                if part.dtype == total.dtype:
                    total.addmm_(by_logits.t(), part)
                else:
                    total += by_logits.t() @ part
            del by_logits
        del log_probs, logits
    return nll, [by_features, *by_weights]


def gradient(
    log_probs: Tensor, ids: Tensor, factor: Tensor, dtype: torch.dtype, may_be_padded: bool
) -> Tensor:
    """The gradient of a chunk's summed loss by the logits, (K, V) in `dtype`."""
    by_logits = log_probs.exp_()
    by_logits.scatter_add_(1, ids, by_logits.new_full(ids.shape, -1))
    if dtype != torch.float32:
        in_half = torch.empty_like(by_logits, dtype=dtype)
        return torch.mul(by_logits, factor, out=in_half)
    if may_be_padded:
        by_logits.mul_(factor)
    return by_logits


def chunks_of(target: Tensor, pad: int, chunk: int) -> tuple[Sequence[Tensor], bool]:
    """The token indices of each chunk, and whether they may include padding."""
    if target.device.type == "cpu":
        return (target != pad).nonzero().squeeze(1).split(chunk), False
    return torch.arange(len(target), device=target.device).split(chunk), True
