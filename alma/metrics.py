"""The three areas under curves of section 3.1, and the units of language models.

Per-mega-batch values come as a mapping t -> value. t = 0 is before any data has arrived.
"""

import math
from collections.abc import Mapping


def cumulative_error_rate(errors: Mapping[int, float]) -> float:
    """CER, eq. 1: the sum over t = 1..B of the test error (a fraction) after mega-batch t.

    So CER <= B, and CER / B is the mean error. Eq. 1 of the final version sums from t = 1; earlier versions
    sum from t = 0. A learner with w > 1 is tested untrained until its first stage, and these w - 1 errors
    count. They are not one constant for all learners: MNIST with one seed gave .85 to .96, by the luck of
    the initial weights. With w = B they are all terms but one. Give `errors` of the t since the first stage
    alone for the sum without them; it has fewer terms, so compare it at equal w.
    """
    return math.fsum(error for t, error in errors.items() if t >= 1)


def cumulative_memory(parameters: Mapping[int, int]) -> int:
    """Mem, eq. 2: the sum over t = 0..B of the number of free parameters."""
    return sum(parameters.values())


def cumulative_compute(flops: Mapping[int, float]) -> float:
    """Comp, eq. 2: the sum over t = 0..B of the FLOPs spent on training at t (0 while waiting)."""
    return math.fsum(flops.values())


def cumulative_perplexity(perplexities: Mapping[int, float]) -> float:
    """Eq. 1 for language models: the sum over t = 1..B of test perplexity, untrained ones included."""
    return cumulative_error_rate(perplexities)


def average(values: Mapping[int, float]) -> float:
    """Mean over t = 1..B of error or perplexity, as Figure 5 reports it; NaN when there is only t = 0."""
    counted = [value for t, value in values.items() if t >= 1]
    return math.fsum(counted) / len(counted) if counted else math.nan


def perplexity(nll_nats: float) -> float:
    """exp of the mean negative log-likelihood (nats) per token or word; infinite where it overflows."""
    try:
        return math.exp(nll_nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nll_nats: float, data_bytes: int) -> float:
    """Bits per byte of text from the *summed* negative log-likelihood in nats of `data_bytes` bytes."""
    return nll_nats / (math.log(2) * data_bytes)
