"""Moving averages of weights: their command line syntax and their formulas.

The k-th update is average += share * (weights - average), with this share:

DECAY      exponential: max(1 - DECAY, 1 / k); the first ones are a plain mean.
poly:ETA   polynomial (Shamir and Zhang 2013): (ETA + 1) / (k + ETA). The mean age of the averaged
           weights is near k / (ETA + 2) updates: the same share of the training at any k.

last:K is the mean of the last K checkpoints, for language models only; it has no updates.
"""

import argparse
import re

WEIGHTS_HELP = (
    "weights to use: trained; average, their moving average kept by --store-ema; or last:K, the "
    "mean of the last K checkpoints in the folder of the given one (default: trained)"
)
"""Help of --weights of commands that read a checkpoint."""


def read(text: object, last: bool = False) -> float | str:
    """Parse an average: a decay (returned as a number; 0: no average) or "poly:ETA".

    With `last`, "last:K" is accepted too. Raises ValueError for anything else.
    """
    if re.fullmatch(r"poly:\d+(\.\d+)?", str(text)) or (last and last_of(text)):
        return str(text)
    try:
        decay = float(str(text))
    except ValueError:
        decay = -1.0
    if not 0 <= decay < 1:
        choices = "a decay below 1 such as .95, or poly:ETA such as poly:8"
        if last:
            choices += ", or last:K such as last:8"
        raise ValueError(f"{text} is no average: give {choices}")
    return decay


def eta_of(average: float | str) -> float | None:
    """ETA of `poly:ETA`; None for a decay."""
    return float(average.removeprefix("poly:")) if isinstance(average, str) else None


def last_of(average: object) -> int:
    """K of `last:K`; 0 for another value."""
    match = re.fullmatch(r"last:([1-9]\d*)", str(average))
    return int(match[1]) if match else 0


def training_flags(average: float | str) -> list[str]:
    """Flags of fairseq-train that keep what an average needs; [] for none."""
    checkpoints = last_of(average)
    if checkpoints:
        return ["--keep-interval-updates", str(checkpoints)]
    if not average:
        return []
    kind = "--ema-decay" if eta_of(average) is None else "--ema-poly"
    return ["--store-ema", kind, str(average).removeprefix("poly:")]


def weights(text: str) -> str:
    """An argparse type: a value of --weights."""
    if text in ("trained", "average") or last_of(text):
        return text
    raise argparse.ArgumentTypeError(f"{text}: give trained, average, or last:K such as last:8")


def share(k: int, decay: float = 0.0, eta: float | None = None) -> float:
    """The share of update k = 1, 2, ..., see above; polynomial if `eta` is given."""
    return max(1 - decay, 1 / k) if eta is None else (eta + 1) / (k + eta)
