"""fairseq's cross_entropy, computed in chunks of tokens to save memory.

The tensor of all logits takes the most memory of a training, so it never exists. The forward pass
computes the gradient of each chunk while its logits exist, and the backward pass only scales it, as
in Liger Kernel (arXiv 2410.10989).

Shapes: B batch, T time, S = B * T tokens, K tokens of a chunk, D features (of UMix: of all
members), V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.models import FairseqDecoder
from torch import Tensor, nn

from alma.errors import UserError
from fairseq_alma.defaults import flag
from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.initial import unused
from fairseq_alma.moe.dispatchers import as_autocast
from fairseq_alma.training import loss_kernel

Ids = Sequence[int]
_addmm: Any = torch.addmm  # torch's types lack `out_dtype`


@dataclass
class ChunkedCrossEntropyConfig(CrossEntropyCriterionConfig):
    """Options of fairseq's cross_entropy, and the chunk size."""

    loss_chunk_tokens: int = flag(
        1024, "tokens whose logits exist at a time; fewer use less memory"
    )


@register_criterion("chunked_cross_entropy", dataclass=ChunkedCrossEntropyConfig)
class ChunkedCrossEntropyCriterion(CrossEntropyCriterion):
    """fairseq's cross_entropy for decoders with a linear output layer.

    After a forward pass `nll` (B, T) fp32 holds the loss of each token in nats, 0 for padding. The
    loss reads the output weights outside the model's forward pass, so with untied weights
    --find-unused-parameters would take them for unused.
    """

    def __init__(self, task, sentence_avg: bool, loss_chunk_tokens: int):
        super().__init__(task, sentence_avg)
        if loss_chunk_tokens < 1:
            raise UserError("--loss-chunk-tokens must be 1 or more")
        self.chunk = loss_chunk_tokens
        self.unused = unused(getattr(task.args, "end_token", -1))
        self.nll: Tensor

    def forward(self, model, sample, reduce: bool = True):
        """As fairseq's. UserError: a decoder without a linear output layer."""
        output_weights(model.decoder)  # raise before the forward pass
        net_input = {**sample["net_input"], "features_only": True}
        return super().forward(model, {**sample, "net_input": net_input}, reduce)

    def compute_loss(self, model, net_output, sample, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Loss of the features (B, T, D) in `net_output`.

        Only the sum over tokens (`reduce`) is differentiable.
        """
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


def output_weights(decoder: nn.Module) -> list[Tensor]:
    """The output weights (V, D) of a decoder, one matrix for each member of UMix.

    UserError: the decoder has no linear output layer.
    """
    if isinstance(decoder, EnsembleDecoder) and decoder.average == "logits":
        return [weight for member in decoder.members for weight in output_weights(member)]
    # An adaptive softmax, or a mean of probabilities, has no output projection.
    layer = getattr(decoder, "output_projection", None)
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        problem = f"needs a linear output layer, which {type(decoder).__name__} lacks"
        raise UserError(
            f"--criterion chunked_cross_entropy {problem}: use --criterion cross_entropy"
        )
    return [layer.weight]


def chunked_nll(
    features: Tensor,
    weights: Sequence[Tensor],
    target: Tensor,
    pad: int,
    chunk: int,
    unused: Ids = (),
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of `target` (S,) in nats, fp32: the sum, and per token.

    The logits are features (S, D) times the transpose of the weights (V, D). With several weights
    (members of UMix), the columns of the features are split among them in order, and the members'
    logits are added up. Logits exist for at most `chunk` tokens at a time. `unused` ids get no
    probability; targets `pad` have loss 0. Only the sum has a gradient.
    """
    features, *weights = as_autocast(features, *weights)  # once, not in every operation
    with torch.autocast(features.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _ChunkedNLL.apply(features, target, pad, chunk, unused, *weights)
        nll, _ = _run(features, weights, target, pad, chunk, unused)
    return nll.sum(), nll


class _ChunkedNLL(torch.autograd.Function):
    """Computes the gradients in forward, where the logits exist, except in fp16.

    In fp16 most of the logits' gradient would underflow unless the loss scale multiplies it before
    the cast. The scale is known in backward only, so fp16 computes the logits twice.
    """

    @staticmethod
    def forward(
        ctx, features: Tensor, target: Tensor, pad: int, chunk: int, unused: Ids, *weights: Tensor
    ):
        ctx.pad = pad
        ctx.chunk = chunk
        ctx.unused = unused
        ctx.computes_in_backward = features.dtype == torch.float16
        if ctx.computes_in_backward:
            nll, _ = _run(features, weights, target, pad, chunk, unused)
            ctx.save_for_backward(features, target, *weights)
        else:
            scale = torch.ones((), device=features.device)
            nll, gradients = _run(features, weights, target, pad, chunk, unused, scale)
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(nll)
        return nll.sum(), nll

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        if ctx.computes_in_backward:
            features, target, *weights = ctx.saved_tensors
            _, gradients = _run(
                features, weights, target, ctx.pad, ctx.chunk, ctx.unused, grad_loss
            )
        else:
            # In place: backward runs once.
            gradients = [gradient.mul_(grad_loss) for gradient in ctx.saved_tensors]
        by_features, *by_weights = gradients  # fp32 for the weights; autograd casts them
        return by_features, None, None, None, None, *by_weights


def _run(
    features: Tensor,
    weights: Sequence[Tensor],
    target: Tensor,
    pad: int,
    chunk: int,
    unused: Ids,
    scale: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of each token, (S,) fp32, and, with a `scale`, the scaled gradients of the sum.

    The first gradient is by the features (S, D), in their dtype; the others by the weights (V, D),
    in fp32.
    """
    nll = torch.zeros(len(target), device=target.device)
    logits_memory = features.new_empty(min(chunk, len(target)), len(weights[0]))  # of each chunk
    by_features = torch.zeros_like(features)
    by_weights = []
    if scale is not None:
        by_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    widths = [weight.size(1) for weight in weights]
    unused_ids = target.new_tensor(unused)  # a copy to the device, once
    chunks, may_be_padded = _chunks(target, pad, chunk)
    for rows in chunks:
        parts = features[rows].split(widths, dim=1)
        logits = torch.mm(parts[0], weights[0].t(), out=logits_memory[: len(rows)])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            logits.addmm_(part, weight.t())
        if unused:
            logits.index_fill_(1, unused_ids, -torch.inf)
        loss, by_logits = loss_and_gradient(logits, target[rows], pad, may_be_padded, scale)
        nll[rows] = loss
        if by_logits is not None:
            by_features[rows] = torch.cat([by_logits @ weight for weight in weights], dim=1)
            for total, part in zip(by_weights, parts, strict=True):
                _add_product(total, by_logits.t(), part)
        del by_logits, logits  # in half precision: free them before the next chunk's
    return nll, [by_features, *by_weights]


def loss_and_gradient(
    logits: Tensor, target: Tensor, pad: int, may_be_padded: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token of a chunk, (K,) fp32; with a `scale`, the scaled gradient of the sum
    by the logits (K, V), in their dtype.

    Overwrites the logits. `may_be_padded`: whether targets (K,) may be `pad`. The scale is 1 in
    fp32, because nothing underflows and backward scales the much smaller results instead.
    """
    if loss_kernel.is_used(logits.device.type):
        if scale is None:
            return loss_kernel.row_losses(logits, target, pad)[0], None
        return loss_kernel.losses_and_gradient_(logits, target, scale, pad), logits
    ids = target[:, None]
    in_place = logits if logits.dtype == torch.float32 else None
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32, out=in_place)
    loss = -log_probs.gather(1, ids)
    if may_be_padded:
        loss.masked_fill_(ids == pad, 0.0)
    if scale is None:
        return loss.squeeze(1), None
    factor = scale * (ids != pad) if may_be_padded else scale
    by_logits = _logits_gradient(log_probs, ids, factor, logits.dtype, may_be_padded)
    return loss.squeeze(1), by_logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (V, D) fp32 += left (V, K) times right (K, D), of any one dtype."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    elif _adds_in_fp32(total.device.type, right.dtype):
        _addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@functools.cache
def _adds_in_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of half-precision matrices to an fp32 sum without a copy: from
    2.8 on, on GPUs that it was built for. Tried once with a small matrix."""
    if device_type != "cuda":
        return False
    ones = torch.ones(16, 16, device=device_type, dtype=dtype)
    total = torch.ones(16, 16, device=device_type)
    try:
        _addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool(total.eq(17).all())


def _logits_gradient(
    log_probs: Tensor, ids: Tensor, factor: Tensor, dtype: torch.dtype, may_be_padded: bool
) -> Tensor:
    """The gradient of a chunk's summed loss with respect to its logits, (K, V) in `dtype`.

    `ids` (K, 1) are the targets. Overwrites `log_probs` (K, V) fp32. `factor` (K, 1) is the loss
    scale, and 0 for padding; in fp32 the scale is 1, because nothing underflows and backward scales
    the much smaller results instead. `may_be_padded`: whether `factor` may have zeros.
    """
    by_logits = log_probs.exp_()
    by_logits.scatter_add_(1, ids, by_logits.new_full(ids.shape, -1))
    if dtype != torch.float32:
        in_half = torch.empty_like(by_logits, dtype=dtype)
        return torch.mul(by_logits, factor, out=in_half)
    if may_be_padded:
        by_logits.mul_(factor)
    return by_logits


def _chunks(target: Tensor, pad: int, chunk: int) -> tuple[Sequence[Tensor], bool]:
    """The token indices of each chunk, and whether they may include padding.

    On a CPU padding is left out. On a GPU it is kept: finding it needs a host sync.
    """
    if target.device.type == "cpu":
        return (target != pad).nonzero().squeeze(1).split(chunk), False
    return torch.arange(len(target), device=target.device).split(chunk), True


def whole_loss(
    original, criterion, model, net_output, sample, reduce: bool = True
) -> tuple[Tensor, Tensor]:
    """CrossEntropyCriterion.compute_loss, `original`, by `loss_kernel` where that runs.

    It needs a decoder whose output is plain logits. The backward pass overwrites them.
    """
    logits = net_output[0]
    uses_kernel = reduce and _is_plain(model) and loss_kernel.is_used(logits.device.type)
    if not uses_kernel:
        return original(criterion, model, net_output, sample, reduce)
    target = model.get_targets(sample, net_output).reshape(-1)
    rows = logits.reshape(-1, logits.size(-1)).contiguous()
    loss, _ = loss_kernel.WholeLoss.apply(rows, target, criterion.padding_idx)
    return loss, loss


def _is_plain(model: Any) -> bool:
    """Whether a model's probabilities are the softmax of its decoder's output."""
    while not hasattr(model, "decoder"):  # fairseq's distributed wrappers
        model = model.module
    decoder = model.decoder
    inherited = type(decoder).get_normalized_probs is FairseqDecoder.get_normalized_probs
    return inherited and getattr(decoder, "adaptive_softmax", None) is None
