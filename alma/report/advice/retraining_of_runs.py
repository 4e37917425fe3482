"""How often to retrain a configuration of run records, or what its record lacks for an answer."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from alma.errors import UserError
from alma.report.advice.candidates import Candidate
from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining, TrainingCost
from alma.report.advice.shortage import Shortage, shortage_of
from alma.report.advice.staleness import known_at
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.losses import Losses
from alma.report.metric import BY_UNIT
from alma.report.periods import arrived, dated_names


def retraining_beside_twin(
    choice: Candidate, candidates: Sequence[Candidate], options: dict[str, Any], now: int | None
) -> Retraining | None:
    """How often to retrain the choice, compared with its twin if there is one.

    The twin is the candidate that differs from it only in `--from-scratch`.
    """
    twin = _twin_of(choice, candidates)
    if twin:
        price_ratio = (_cost_of(twin).flops or 1) / (_cost_of(choice).flops or 1)
        price = options.get("price", math.nan) * price_ratio
        options = options | {"twin": _retraining_of(twin, options | {"price": price}, now)}
    return _retraining_of(choice, options, now)


def _twin_of(choice: Candidate, candidates: Sequence[Candidate]) -> Candidate | None:
    """The first candidate that differs from the choice in `--from-scratch` alone."""
    ignored = {"from_scratch": None, "seed": None}
    settings = choice.result.config | ignored
    for candidate in candidates:
        if candidate is not choice and candidate.result.config | ignored == settings:
            return candidate
    return None


def _cost_of(candidate: Candidate) -> TrainingCost:
    """The cost of the candidate's last training, mean over seeds."""
    last = candidate.ends[-1]
    rows = [repeat[last] for repeat in candidate.result.repeats]
    info = candidate.result.runs[0].info
    devices = info.get("gpus") or info.get("processes") or 1
    return TrainingCost(
        flops=fmean(row["train_flops"] for row in rows) / 1e12,
        hours=fmean(row["seconds"] for row in rows) / 3600 * devices,
        machine="GPU-hours" if info.get("gpus") else "core-hours",
    )


def _measured_losses(candidate: Candidate, now: int | None) -> Losses | None:
    """The losses of a candidate on the held-out parts that have arrived, or up to `now`."""
    losses = losses_of(candidate.result)
    if not losses:
        return None
    last = arrived(candidate.result) if now is None else candidate.now
    return known_at(losses, last)


def _retraining_of(
    candidate: Candidate, options: dict[str, Any], now: int | None
) -> Retraining | None:
    """How often to retrain a candidate; None without an evaluation matrix, or of too few models."""
    losses = _measured_losses(candidate, now)
    if not losses:
        return None
    names = dated_names(candidate.result)
    newest = int(losses.periods[-1])
    try:
        return Retraining(
            losses=losses,
            metric=BY_UNIT[unit(candidate.result)],
            period=Period.of(names),
            cost=_cost_of(candidate),
            counted_from=names[newest - 1] if 0 < newest <= len(names) else "",
            periods_to_come=candidate.result.megabatches - int(losses.periods[-1]),
            **options,
        )
    except UserError:  # too few models or cells
        return None


def shortage_of_choice(choice: Candidate, now: int | None) -> Shortage | None:
    """What the choice lacks for an answer; None without an evaluation matrix."""
    losses = _measured_losses(choice, now)
    return shortage_of(losses, str(choice.result.runs[0].directory)) if losses else None
