"""The schedule of Algorithm 1: which mega-batches each stage waits for and trains on."""

from collections.abc import Sequence
from dataclasses import dataclass

from alma.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One call of train. Mega-batches are numbered t = 1..B, stages from 0.

    Mega-batches `first`..`last` arrive during the stage, which completes at t = `last`. It trains on
    `train_on`: the same mega-batches, or all seen so far (1..`last`) with replay.
    """

    index: int
    first: int
    last: int
    train_on: tuple[int, ...]


REPLAY_FROM = ("all", "recent")
"""Where a replay by share comes from: all earlier mega-batches, or those of the stage before."""


def replayed(schedule: Sequence[Stage], index: int, source: str) -> tuple[int, ...]:
    """The mega-batches before stage `index` of a schedule without replay; `source`: one of REPLAY_FROM."""
    earlier = schedule[:index] if source == "all" else schedule[max(0, index - 1) : index]
    return tuple(t for stage in earlier for t in stage.train_on)


def check_share(share: float, replay: bool) -> None:
    """UserError: `share` is not that of a replay, or there is a replay of all mega-batches too."""
    if not 0 <= share < 1:
        raise UserError(f"--replay-share {share}: a share of each stage's training data, from 0 to below 1")
    if share and replay:
        raise UserError("--replay trains on all mega-batches so far: leave out --replay or --replay-share")


def stages(megabatches: int, waiting_time: int = 1, replay: bool = False) -> list[Stage]:
    """The ceil(B / w) stages of a stream of B = `megabatches` with waiting time w = `waiting_time`.

    The last stage may be shorter, so that all data are trained on. (Algorithm 1 of the paper loops while
    t < B, which skips the last mega-batch when w = 1.) UserError: B < 1, w < 1 or w > B.
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
