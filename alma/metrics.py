"""CER, Mem and Comp (section 3.1), and measures of language models.

Values over the stream are mappings t -> value; t = 0 is before any data.
"""

import math
from collections.abc import Mapping


def cumulative_error_rate(errors: Mapping[int, float]) -> float:
    """CER, eq. 1: the sum over t = 1..B of the test error (a fraction) or perplexity after mega-batch t.

    Thus CER / B is the mean error. Eq. 1 of the paper's final version sums from t = 1, earlier versions from
    t = 0. With w > 1 the sum includes w - 1 errors of the untrained model, which vary with the initial
    weights (.85 to .96 for learners on MNIST with one seed). To leave them out, pass the errors since the
    first stage only; that sum has fewer terms, so compare it at equal w.
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


def perplexity(nll_nats: float) -> float:
    """exp of the mean negative log-likelihood (nats) per token or word; inf on overflow."""
    try:
        return math.exp(nll_nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nll_nats: float, data_bytes: int) -> float:
    """Bits per byte, from the *summed* negative log-likelihood (nats) of a text of `data_bytes` bytes."""
    return nll_nats / (math.log(2) * data_bytes)
