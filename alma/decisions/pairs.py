"""What a model gains over another one on the same documents or images, with a 90% interval.

Documents: the gain in nats a token is a ratio of sums, so documents are resampled and the ratio is
computed anew, studentised, with symmetric quantiles (Hall, 1988). A few long documents may hold
most tokens. The interval is therefore no narrower than that of the jackknife, by Student's t with
as many degrees of freedom as there are effective documents (sum n)^2 / sum n^2 (Kish, 1965), less
1.

Images: the interval of Bonett and Price (2012), which adds one image to each way in which the two
models can disagree, wider by one image at both ends (Edwards, 1948): counts move in steps.

Several held-out parts count alike, whatever their size; each is resampled by itself.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.report.losses import MeanOverSeeds

Array = np.ndarray[Any, np.dtype[np.float64]]
_RESAMPLES = 1999
_MOST_GROUPS = 1000  # of all parts; more documents are joined with their neighbours
_LEAST_GROUPS = 30  # of one part
_NORMAL_95 = 1.6448536269514722


class Pair(NamedTuple):
    """Losses of two models on the items of one held-out part, in the same order."""

    deployed: Array
    """(items, 2), see `alma.evaluations.write_item_losses`."""
    newest: Array

    def counted(self) -> "Pair":
        """Without the items that do not count for one of the models."""
        counts_twice = (self.deployed[:, 1] > 0) & (self.newest[:, 1] > 0)
        return Pair(self.deployed[counts_twice], self.newest[counts_twice])


class _Ratio(NamedTuple):
    """A ratio of sums over documents, and its bootstrap replications."""

    value: float
    variance: float
    jackknife: float  # variance by the jackknife
    effective: float  # number of documents, weighed by their tokens
    values: Array  # (resamples,)
    variances: Array  # (resamples,)


def document_gain(pairs: Sequence[Pair]) -> MeanOverSeeds:
    """Nats a token that the newest model gains, mean over held-out parts; ends may be infinite.

    Raises ValueError if a part has fewer than two documents.
    """
    random = np.random.default_rng(0)
    groups = max(_LEAST_GROUPS, _MOST_GROUPS // len(pairs))
    ratios = [_ratio(pair, groups, random) for pair in pairs]
    count = len(ratios)
    value = math.fsum(ratio.value for ratio in ratios) / count
    error = math.sqrt(math.fsum(ratio.variance for ratio in ratios)) / count
    values = np.mean([ratio.values for ratio in ratios], axis=0)
    errors = np.sqrt(np.sum([ratio.variances for ratio in ratios], axis=0)) / count
    quantile = _quantile_of(values - value, errors)
    half = max(_product(quantile, error), _jackknife_half(ratios))
    return MeanOverSeeds(value, value - half, value + half)


def _ratio(pair: Pair, groups: int, random: np.random.Generator) -> _Ratio:
    """The gain on one part."""
    gains = _joined(pair.deployed[:, 0] - pair.newest[:, 0], groups)
    tokens = _joined(pair.newest[:, 1], groups)
    count = len(tokens)
    if count < 2:
        raise ValueError("fewer than two documents")
    total = tokens.sum()
    value = float(gains.sum() / total)
    residuals = gains - value * tokens
    shares = tokens / total
    remaining = 1 - shares
    resampled = random.integers(0, count, (_RESAMPLES, count))
    drawn_gains = gains[resampled]
    drawn_tokens = tokens[resampled]
    totals = drawn_tokens.sum(1)
    values = drawn_gains.sum(1) / totals
    drawn_residuals = drawn_gains - values[:, None] * drawn_tokens
    return _Ratio(
        value,
        float(residuals @ residuals) / total**2,
        float(((residuals / remaining) ** 2).sum()) / total**2,
        1 / float(shares @ shares),
        values,
        (drawn_residuals**2).sum(1) / totals**2,
    )


def _joined(values: Array, groups: int) -> Array:
    """Sums over at most so many groups of neighbours."""
    if len(values) <= groups:
        return values
    starts = np.linspace(0, len(values), groups, endpoint=False).astype(int)
    return np.asarray(np.add.reduceat(values, starts))


def _quantile_of(distances: Array, errors: Array) -> float:
    """The 90% quantile of distances in standard errors; infinite where an error is 0."""
    moved = np.abs(distances) > 0
    ratios = np.zeros_like(distances)
    np.divide(np.abs(distances), errors, out=ratios, where=errors > 0)
    ratios[moved & (errors == 0)] = math.inf
    return float(np.quantile(ratios, 0.9, method="higher"))


def _product(quantile: float, error: float) -> float:
    """Half an interval: 0 if nothing varies."""
    return quantile * error if error else 0.0


def _jackknife_half(ratios: Sequence[_Ratio]) -> float:
    """Half the interval of the jackknife; degrees of freedom by Welch and Satterthwaite."""
    from scipy.special import stdtrit

    variances = [ratio.jackknife for ratio in ratios]
    total = math.fsum(variances)
    if not total:
        return 0.0
    terms = []
    for ratio in ratios:
        terms.append(ratio.jackknife**2 / max(ratio.effective - 1, 1))
    freedom = total**2 / math.fsum(terms)
    return float(stdtrit(freedom, 0.95)) * math.sqrt(total) / len(ratios)


def image_gain(pairs: Sequence[Pair]) -> MeanOverSeeds:
    """Percentage points of error that the newest model gains, mean over held-out parts.

    Raises ValueError if a part has no images.
    """
    count = len(pairs)
    values = []
    centres = []
    variances = []
    steps = []
    for deployed, newest in pairs:
        images = len(newest)
        if not images:
            raise ValueError("no images")
        wrong_before = deployed[:, 0] > 0
        wrong_now = newest[:, 0] > 0
        gained = int((wrong_before & ~wrong_now).sum())
        lost = int((wrong_now & ~wrong_before).sum())
        values.append((gained - lost) / images)
        share_gained = (gained + 1) / (images + 2)
        share_lost = (lost + 1) / (images + 2)
        centre = share_gained - share_lost
        centres.append(centre)
        variances.append((share_gained + share_lost - centre**2) / (images + 2))
        steps.append(1 / images)
    centre = 100 * math.fsum(centres) / count
    half = 100 * (_NORMAL_95 * math.sqrt(math.fsum(variances)) + math.fsum(steps)) / count
    low = max(-100.0, centre - half)
    high = min(100.0, centre + half)
    return MeanOverSeeds(100 * math.fsum(values) / count, low, high)
