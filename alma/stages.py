"""The schedule of Algorithm 1: which mega-batches each stage waits for and trains on.

Replay, where N are the new training examples of a stage (blocks of tokens, or images) and O those
of all earlier mega-batches. Text adds old blocks to an epoch, images replace new ones:

                    an epoch of text              an epoch of images
no replay           N new                         N new
--replay            N new, O old                  N new, O old
--replay-share S    N new, N S / (1 - S) old      N (1 - S) new, N S old

A share takes equally many examples, up to one, of each earlier mega-batch, with `--replay-from
recent` of each one of the stage before. Text draws its old blocks once for each stage, images
draw anew for each epoch. The first stage has nothing to replay. Updates follow from the size of the
epoch unless --max-update sets them. docs/concepts.md explains this to users.
"""

from dataclasses import dataclass
from pathlib import Path

from alma.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One training of Algorithm 1. Mega-batches are numbered t = 1..B, stages from 0.

    The learner waits for the mega-batches `first`..`last` and trains at t = `last`. It trains on
    `train_on`: these mega-batches and, with replay, earlier ones.
    """

    index: int
    first: int
    last: int
    train_on: tuple[int, ...]

    @property
    def earlier(self) -> tuple[int, ...]:
        """The earlier mega-batches on which it trains."""
        return tuple(t for t in self.train_on if t < self.first)


def stage_folder(run: Path, index: int) -> Path:
    """The folder of a stage in the run directory of a language model."""
    return run / f"stage_{index:02d}"


def check_share(share: float, replay: bool, source: str = "all") -> None:
    """Raise a UserError if the options of replay contradict one another.

    `share` (--replay-share) must be in [0, 1); it excludes `replay` (--replay), which trains on all
    earlier mega-batches; and `source` (--replay-from) needs a share.
    """
    if not 0 <= share < 1:
        raise UserError(
            f"--replay-share {share}: a share of each stage's training data, from 0 to below 1"
        )
    if share and replay:
        raise UserError(
            "--replay trains on all mega-batches so far: leave out --replay or --replay-share"
        )
    if source != "all" and not share:
        raise UserError(f"--replay-from {source} needs --replay-share, such as .5")


def check_growth(out: object, before: int, now: int, waiting_time: int) -> None:
    """Raise a UserError if the run `out` cannot continue on a stream that has grown.

    The stream had `before` mega-batches when the run was trained, and has `now`. If the last stage
    was cut short by the end of the stream, it would now be longer.
    """
    index = (before - 1) // waiting_time
    last = min((index + 1) * waiting_time, now)
    if before < last:
        problem = f"stage {index} was trained when the stream ended with mega-batch {before}"
        raise UserError(
            f"{out}: {problem}; now it would wait for mega-batch {last}: choose another --out"
        )


def stages(
    megabatches: int, waiting_time: int = 1, replay: bool = False, replay_from: str | None = None
) -> list[Stage]:
    """The ceil(B / w) stages of a stream of B = `megabatches` with waiting time w = `waiting_time`.

    The last stage may be shorter, so that all data are trained on, unlike in Algorithm 1. With
    `replay`, a stage also trains on all earlier mega-batches; with `replay_from`, on those from
    which --replay-share samples. Raises UserError if B < 1, w < 1 or w > B.
    """
    if megabatches < 1:
        raise UserError(f"a stream needs at least 1 mega-batch, not {megabatches}")
    if waiting_time < 1:
        raise UserError(f"waiting time {waiting_time}: use 1 (train on each mega-batch) or more")
    if waiting_time > megabatches:
        raise UserError(
            f"waiting time {waiting_time} is longer than the stream of {megabatches} mega-batches: "
            f"use at most {megabatches} (train once, on all data) or a longer stream"
        )
    plan = []
    for index, first in enumerate(range(1, megabatches + 1, waiting_time)):
        last = min(first + waiting_time - 1, megabatches)
        if replay or replay_from == "all":
            oldest = 1
        elif replay_from == "recent":
            oldest = max(1, first - waiting_time)
        else:
            oldest = first
        plan.append(Stage(index, first, last, tuple(range(oldest, last + 1))))
    return plan
