"""CER, Mem and Comp (section 3.1), transfer on streams that drift, and measures of language models.

Values over the stream are mappings t -> value; t = 0 is before any data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


def cumulative_error_rate(errors: Mapping[int, float]) -> float:
    """CER, eq. 1: the sum over t = 1..B of the error (a fraction) or perplexity after mega-batch t.

    Thus CER / B is the mean error. Earlier versions of the paper sum from t = 0. With w > 1 the sum
    includes w - 1 errors of the untrained model. To leave them out, pass the errors since the first
    stage only; that sum has fewer terms, so compare it at equal w.
    """
    return math.fsum(error for t, error in errors.items() if t >= 1)


def cumulative_memory(parameters: Mapping[int, int]) -> int:
    """Mem, eq. 2: the sum over t = 0..B of free parameters."""
    return sum(parameters.values())


def cumulative_compute(flops: Mapping[int, float]) -> float:
    """Comp, eq. 2: the sum over t = 0..B of training FLOPs (0 while waiting)."""
    return math.fsum(flops.values())


def average(values: Mapping[int, float]) -> float:
    """Mean over t = 1..B of error or perplexity, as in Figure 5; NaN without any t >= 1."""
    counted = [value for t, value in values.items() if t >= 1]
    return math.fsum(counted) / len(counted) if counted else math.nan


class Transfer(NamedTuple):
    """The numbers of `transfer`, in the unit of the metric; None if the matrix has no such cell."""

    in_distribution: float | None
    backward_transfer: float | None
    forward_transfer: float | None
    average_seen: float | None


def transfer(matrix: Mapping[int, Sequence[float]], logarithmic: bool = False) -> Transfer:
    """Means over the evaluation matrix of a stream that drifts; lower is better.

    matrix[t] is R[t, 1], ..., R[t, B]: the error or perplexity after mega-batch t on the held-out
    part of mega-batch j. t = 0 does not count, so that a run of B mega-batches has B * B cells:

        in-distribution    mean of R[t, j] over j = t (the diagonal)
        backward transfer  mean of R[t, j] over all j < t (the past)
        forward transfer   mean of R[t, j] over all j > t (the future)
        average seen       mean over t of the mean of R[t, j] over j <= t

    The first three are those of TiC-LM (Li et al., ACL 2025, arXiv 2504.02107), without its oracle,
    after TiC-CLIP (Garg et al., ICLR 2024, arXiv 2310.16226). With `logarithmic`, means are exp of
    the mean log, as in TiC-LM: the hardest part would dominate an arithmetic mean of perplexities.
    A cell of 0 or less is NaN. Cells that are NaN do not count.
    """

    rows = {}
    for t, row in matrix.items():
        if t > 0:
            rows[t] = [_cell(value, logarithmic) for value in row]
    diagonal: list[float | None] = []
    past: list[float | None] = []
    future: list[float | None] = []
    seen: list[float | None] = []
    for t, cells in rows.items():
        diagonal += cells[t - 1 : t]
        past += cells[: t - 1]
        future += cells[t:]
        seen.append(_mean(cells[:t]))
    means = [_mean(values) for values in (diagonal, past, future, seen)]
    if logarithmic:
        means = [None if mean is None else perplexity(mean) for mean in means]
    return Transfer(*means)


def _cell(value: float, logarithmic: bool) -> float | None:
    """A cell of the matrix, or its logarithm (NaN of 0 or less); None if it does not count."""
    if math.isnan(value):
        return None
    if not logarithmic:
        return value
    return math.log(value) if value > 0 else math.nan


def _mean(values: Sequence[float | None]) -> float | None:
    counted = [value for value in values if value is not None]
    return math.fsum(counted) / len(counted) if counted else None


def perplexity(nll_nats: float) -> float:
    """exp of the mean negative log-likelihood (nats) per token or word; inf on overflow."""
    try:
        return math.exp(nll_nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nll_nats: float, data_bytes: int) -> float:
    """Bits per byte of a text of `data_bytes` bytes, from its *summed* negative log-likelihood."""
    return nll_nats / (math.log(2) * data_bytes)
