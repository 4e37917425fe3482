"""The Triton kernels of `loss_kernel`, one program for each row of logits (K, V).

All sums and exponentials are in fp32. A row is read in blocks; the largest logit and the sum of
exponentials are kept up block by block, so that no exponential overflows. The size of the
vocabulary is a constant of compilation: Triton then knows the alignment of each row, and reads
several logits at a time.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.0e38)  # finite: -inf minus -inf would be NaN


@triton.jit
def _write_gradient(
    row, vocabulary: tl.constexpr, target_id, largest, log_total, factor, BLOCK: tl.constexpr
):
    """Overwrite the logits at `row` by (softmax - 1 at the target) * factor."""
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_id = ids < vocabulary
        x = tl.load(row + ids, mask=is_id, other=-float("inf")).to(tl.float32)
        by_logit = tl.exp((x - largest) - log_total)
        by_logit = tl.where(ids == target_id, by_logit - 1.0, by_logit) * factor
        tl.store(row + ids, by_logit.to(row.dtype.element_ty), mask=is_id)


@triton.jit
def losses(
    logits,
    target,
    nll,
    log_sums,
    factors,
    vocabulary: tl.constexpr,
    pad,
    HAS_LOG_SUM: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of a row; with HAS_LOG_SUM also `log_sums` of `row_losses`, with
    HAS_GRADIENT its gradient times the scalar `factors`, in place of the logits."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * vocabulary
    target_id = tl.load(target + number)
    is_token = target_id != pad
    largest = _LOWEST
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
        now_largest = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - now_largest) + tl.sum(tl.exp(x - now_largest), axis=0)
        largest = now_largest
    log_total = tl.log(total)
    loss = log_total - (tl.load(row + target_id).to(tl.float32) - largest)
    tl.store(nll + number, tl.where(is_token, loss, 0.0))
    if HAS_LOG_SUM:
        tl.store(log_sums + 2 * number, largest)
        tl.store(log_sums + 2 * number + 1, log_total)
    if HAS_GRADIENT:
        tl.debug_barrier()  # all threads have read the target's logit
        factor = tl.where(is_token, tl.load(factors), 0.0)
        _write_gradient(row, vocabulary, target_id, largest, log_total, factor, BLOCK)


@triton.jit
def gradient(logits, target, log_sums, factors, vocabulary: tl.constexpr, pad, BLOCK: tl.constexpr):
    """Overwrite a row of logits by the gradient of its loss times the scalar `factors`."""
    number = tl.program_id(0).to(tl.int64)
    target_id = tl.load(target + number)
    factor = tl.where(target_id != pad, tl.load(factors), 0.0)
    largest = tl.load(log_sums + 2 * number)
    log_total = tl.load(log_sums + 2 * number + 1)
    _write_gradient(
        logits + number * vocabulary, vocabulary, target_id, largest, log_total, factor, BLOCK
    )
