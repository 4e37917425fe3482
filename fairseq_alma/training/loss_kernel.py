"""Cross-entropy over rows of logits in one GPU kernel (Triton), without a copy in fp32.

PyTorch's log_softmax(dtype=float32) of bf16 logits first writes them in fp32, then the
log-probabilities, then their gradient, each as large as the logits or twice as large. The kernels
here read a row of logits once for its loss and once for its gradient, compute in fp32, and write
the gradient over the logits, as Liger Kernel does (arXiv 2410.10989).

`is_used` says where: on a GPU with Triton, which torch brings on Linux. Each operation is one of
torch.library, so that torch.compile and counts on the meta device see it as one.

Shapes: K rows (tokens), V vocabulary.
"""

import functools
import importlib.util
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_BLOCK = 8192
"""Logits of a row that a kernel has in registers at a time."""
_WARPS = 16


@functools.cache
def is_used(device_type: str) -> bool:
    """Whether the kernels run on this type of device; the log names the choice once."""
    is_gpu = device_type in ("cuda", "meta")  # meta: counts of what a GPU would do
    has_triton = importlib.util.find_spec("triton") is not None
    reason = "no GPU"
    if is_gpu:
        reason = _failure(device_type) if has_triton else "Triton is not installed"
    if reason:
        logger.info(f"loss: PyTorch's operators ({reason})")
        return False
    logger.info("loss: one Triton kernel for loss and gradient")
    return True


def _failure(device_type: str) -> str:
    """Why Triton cannot run a small kernel, or "": it needs a C compiler and a recent GPU."""
    logits = torch.zeros(1, 2, device=device_type)
    target = torch.zeros(1, dtype=torch.int64, device=device_type)
    factor = torch.ones((), device=device_type)
    try:
        losses_and_gradient_(logits, target, factor, -1)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"Triton fails: {lines[0]}"
    return ""


@torch.library.custom_op("alma::row_losses", mutates_args=())
def row_losses(logits: Tensor, target: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """The loss of each row in nats, (K,) fp32, and the log of its sum of exponentials, (K, 2) fp32.

    The log is the sum of two numbers, the largest logit and a rest: one number would round it.

    logits: (K, V), contiguous; target: (K,). A target `pad` has loss 0. Reads the logits once.
    """
    nll = _per_row(logits)
    log_sum = _per_row(logits, 2)
    _launch_losses(logits, target, nll, log_sum, None, pad)
    return nll, log_sum


@row_losses.register_fake
def _(logits: Tensor, target: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    return _per_row(logits), _per_row(logits, 2)


@torch.library.custom_op("alma::losses_and_gradient_", mutates_args=("logits",))
def losses_and_gradient_(logits: Tensor, target: Tensor, factor: Tensor, pad: int) -> Tensor:
    """The loss of each row in nats, (K,) fp32; the logits become the gradient of its sum times
    `factor`, a scalar in fp32.

    The second reading of a row comes from the cache, so memory is read once and written once.
    """
    nll = _per_row(logits)
    _launch_losses(logits, target, nll, None, factor, pad)
    return nll


@losses_and_gradient_.register_fake
def _(logits: Tensor, target: Tensor, factor: Tensor, pad: int) -> Tensor:
    return _per_row(logits)


@torch.library.custom_op("alma::logits_to_gradient_", mutates_args=("logits",))
def logits_to_gradient_(
    logits: Tensor, target: Tensor, log_sum: Tensor, factor: Tensor, pad: int
) -> None:
    """The logits become the gradient of the sum of the losses times `factor`, a scalar in fp32.

    log_sum: (K, 2), of `row_losses`. Reads and writes the logits once.
    """
    kernels = _kernels()
    kernels.gradient[(len(logits),)](
        logits,
        target,
        log_sum,
        factor,
        logits.size(1),
        pad,
        BLOCK=_block(logits),
        num_warps=_WARPS,
    )


@logits_to_gradient_.register_fake
def _(logits: Tensor, target: Tensor, log_sum: Tensor, factor: Tensor, pad: int) -> None:
    return None


def _per_row(logits: Tensor, *numbers: int) -> Tensor:
    return torch.empty(len(logits), *numbers, dtype=torch.float32, device=logits.device)


def _launch_losses(
    logits: Tensor,
    target: Tensor,
    nll: Tensor,
    log_sum: Tensor | None,
    factor: Tensor | None,
    pad: int,
) -> None:
    kernels = _kernels()
    kernels.losses[(len(logits),)](
        logits,
        target,
        nll,
        log_sum,
        factor,
        logits.size(1),
        pad,
        HAS_LOG_SUM=log_sum is not None,
        HAS_GRADIENT=factor is not None,
        BLOCK=_block(logits),
        num_warps=_WARPS,
    )


def _block(logits: Tensor) -> int:
    """The logits of a row at a time, a power of two."""
    of_row = 1 << max(4, (logits.size(1) - 1).bit_length())
    return min(_BLOCK, of_row)


@functools.cache
def _kernels():
    """The module of the kernels, whose import needs Triton."""
    from fairseq_alma.training import loss_triton

    return loss_triton


class WholeLoss(torch.autograd.Function):
    """The summed loss of all logits (K, V) and that of each token, (K,), in nats, fp32.

    The backward pass writes the gradient over the logits, so it runs once. It knows the loss scale
    there, with which fp16's gradients do not underflow.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, pad: int) -> tuple[Tensor, Tensor]:
        nll, log_sum = row_losses(logits, target, pad)
        ctx.pad = pad
        ctx.save_for_backward(logits, target, log_sum)
        ctx.mark_non_differentiable(nll)
        return nll.sum(), nll

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        logits, target, log_sum = ctx.saved_tensors
        gradient = logits.detach()  # the same memory
        logits_to_gradient_(gradient, target, log_sum, grad_loss.float(), ctx.pad)
        return gradient, None, None
