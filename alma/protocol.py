"""Options of a run on a stream: of every run, and of language models.

Each option is declared here, once. From the declarations follow the flags of the launcher and of
`alma images`, the types that run records check, the settings that labels of reports may show, and
the options of the task `alma_lm` of fairseq-train (those that are `passed`).
"""

import contextlib
import re
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

from alma import averages
from alma.errors import number_list
from alma.learners import DEFAULT_GROWTH
from alma.options import CHANGED, option

_if_changed = partial(option, record=CHANGED)
SCHEDULES = ("stage", "continuous")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of every run: the learner, when it trains, and on which mega-batches."""

    learner: str = option(None, "learner")
    waiting_time: int = option(
        1, "mega-batches before each stage", at_least=1, metavar="W", passed=True
    )
    replay: bool = option(
        False, "train on all mega-batches so far, not only on the new ones", passed=True
    )
    replay_share: float = _if_changed(
        0.0,
        "share of each stage's data from earlier mega-batches, such as .5",
        metavar="S",
        passed=True,
    )
    replay_from: str = _if_changed(
        "all",
        "with --replay-share: all earlier mega-batches evenly, or the recent ones, of the stage "
        "before",
        choices=("all", "recent"),
        passed=True,
    )
    seed: int = option(0, "seed of the initial weights and of the data order", metavar="S")


def _growth(value: Any) -> list[int]:
    """Parse a value of --grow-experts; raises ValueError."""
    numbers = value if isinstance(value, list) else number_list(value, repeats=True)
    if 0 in numbers:
        raise ValueError(
            f"{value}: give a number of 1 or more, or one for each growth, such as 2 or 2,2,4"
        )
    return numbers


def _budget(text: str) -> str:
    """Check a value of --budget; raises ValueError."""
    if not re.fullmatch(r"(updates|tokens|seconds)=[1-9]\d{0,17}", text):
        raise ValueError(f"{text}: give updates=N, tokens=N or seconds=N, such as updates=400")
    return text


def _cutoff(text: str) -> str:
    """Check a value of --cutoff; raises ValueError."""
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"\d{4}(-\d\d){0,2}", text) and date.fromisoformat(f"{text}-01-01"[:10]):
            return text
    raise ValueError(f"{text}: give a year, month or day, such as 2023, 2023-05 or 2023-05-31")


@dataclass(frozen=True, kw_only=True)
class TextOptions(StreamOptions):
    """Options of a run of language models: training in each stage, and the weights to evaluate."""

    members: int | None = option(None, "models of the ensemble", at_least=1)
    new_members: int | None = option(
        None, "gens: models that each stage adds, trained apart (default: 1)", at_least=1
    )
    grow_experts: list[int] | None = option(
        None,
        "experts to add: one number, or one for each growth, such as 2,2,4 (default: "
        f"{DEFAULT_GROWTH})",
        read=_growth,
        metavar="LIST",
    )
    grow_router: str | None = option(
        None,
        "preserve: correct the router so that the function stays the same, except for "
        "fairseq-train's --grow-noise; copy: copy the row of the router, as in the paper; tree: "
        "add a gate for each split (default: preserve)",
        choices=("preserve", "copy", "tree"),
        passed=True,
    )
    grow_optimizer: str | None = option(
        None,
        "optimizer state after growth: reset, or copy from the split expert (default: reset)",
        choices=("reset", "copy"),
        passed=True,
    )
    from_scratch: bool = _if_changed(
        False, "train a new model in each stage, not that of the stage before"
    )
    init: str | None = _if_changed(
        None,
        "start stage 0, with --from-scratch every stage, from this model, which t = 0 then is: a "
        "folder of Hugging Face, or a checkpoint (docs/trainers.md)",
        metavar="MODEL",
        passed=True,
    )
    engine: str | None = _if_changed(
        None,
        "what trains: fairseq, or transformers' Trainer, whose flags then follow the -- (default: "
        "fairseq; transformers if --init is a folder of Hugging Face with another model than "
        "GPT-2)",
        choices=("fairseq", "transformers"),
    )
    cutoff: str | None = _if_changed(
        None,
        "of the newest text that the model of --init has seen, such as 2023-05: averages leave "
        "out the periods that begin until then",
        read=_cutoff,
        metavar="DATE",
    )
    schedule: str = _if_changed(
        SCHEDULES[0],
        "stage: optimizer and learning rate start anew with every stage, as in the paper; "
        "continuous: they go on over the stages, with one warm-up and then a constant rate",
        choices=SCHEDULES,
        passed=True,
    )
    average: float | str = _if_changed(
        0.0,
        "evaluate an average of the weights; training continues from the raw weights. DECAY: "
        "exponential over updates, such as .999 (0: off); poly:ETA: polynomial, with a memory "
        "that grows with the training, such as poly:8; last:K: mean of the last K checkpoints",
        read=partial(averages.read, last=True),
        metavar="AVERAGE",
    )
    no_tf32: bool = _if_changed(
        False,
        "compute products of fp32 trainings in full; without it, in TF32 on GPUs that have it "
        "(Ampere and later)",
        passed=True,
    )
    update_multiplier: int = _if_changed(
        1, "X times --max-update in each stage", at_least=1, metavar="X"
    )
    context_window: int = _if_changed(
        0, "evaluate tokens with at least N tokens of context, if there are"
    )
    trainer: str | None = _if_changed(
        None,
        "train and evaluate with your own program instead of fairseq: it gets the path of a "
        "stage.json as its last argument, and writes trained.json (docs/trainers.md)",
        metavar="COMMAND",
    )
    budget: str | None = _if_changed(
        None,
        "with --trainer: of each training: updates=N, tokens=N or seconds=N (default: the "
        "trainer decides)",
        read=_budget,
        metavar="AMOUNT",
    )
    name: str | None = _if_changed(None, "label of the run in reports", metavar="TEXT")
