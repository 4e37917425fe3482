"""The schedule of Algorithm 1: which mega-batches arrive in which stage, and what each stage trains on."""

from collections.abc import Sequence
from dataclasses import dataclass

from alma.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One call of train. Mega-batches are numbered t = 1..B, stages from 0.

    `first`..`last` arrive in this stage, so it completes at t = `last`; `train_on` is what it
    trains on: the same mega-batches, or with replay everything seen so far, 1..`last`.
    """

    index: int
    first: int
    last: int
    train_on: tuple[int, ...]


def stages(megabatches: int, waiting_time: int = 1, replay: bool = False) -> list[Stage]:
    """Stages of a stream of B = `megabatches` for a learner that waits for w = `waiting_time` of them.

    There are ceil(B / w) stages and the last may be shorter: all data are trained on. (Algorithm 1
    of the paper loops while t < B, which would leave out the last mega-batch when w = 1.)
    UserError when B < 1, w < 1 or w > B.
    """
    if megabatches < 1:
        raise UserError(f"a stream needs at least 1 mega-batch, not {megabatches}")
    if waiting_time < 1:
        raise UserError(
            f"waiting time {waiting_time}: use 1 (train on each mega-batch as it arrives) or more"
        )
    if waiting_time > megabatches:
        raise UserError(
            f"waiting time {waiting_time} is longer than the stream of {megabatches} mega-batches: "
            f"use at most {megabatches} (train once, on all data) or a longer stream"
        )
    plan = []
    for index, first in enumerate(range(1, megabatches + 1, waiting_time)):
        last = min(first + waiting_time - 1, megabatches)
        plan.append(Stage(index, first, last, tuple(range(1 if replay else first, last + 1))))
    return plan


def stage_at(plan: Sequence[Stage], t: int) -> Stage | None:
    """The last stage completed once mega-batch `t` has arrived, or None while the learner is untrained."""
    return max((stage for stage in plan if stage.last <= t), key=lambda stage: stage.index, default=None)
