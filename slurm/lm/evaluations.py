"""Command lines that evaluate the untrained model, a stage, or a model on held-out parts alone."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alma import averages
from alma.options import flag_words
from slurm.lm.planned import by_trainer
from slurm.lm.run_options import ENCODER, EVALUATION_FLAGS

if TYPE_CHECKING:
    from slurm.lm.plan import Request

_EVALUATE = (sys.executable, "-m", "fairseq_alma.evaluate")


def of_untrained(
    request: "Request", seeds: Sequence[int], arguments: Sequence[str]
) -> tuple[str, ...]:
    """Command line that evaluates the untrained model; `arguments`: of the first training."""
    if request.trainer:
        return by_trainer(request.trainer, request.out, "untrained")
    words = [*_untrained_words(request, seeds), "--valid"]
    words += ["--out", str(request.out / "untrained.json"), *arguments]
    return (*words, *tensorboard(request, 0))


def of_stage(request: "Request", index: int, result: Path) -> tuple[str, ...]:
    """The command line that evaluates a stage, without --path."""
    if request.trainer:
        return by_trainer(request.trainer, result.parent, "evaluate")
    words = [*_stage_words(request, index), "--gen-subset", "test", "--valid"]
    words += ["--out", str(result), "--item-losses", str(request.out)]
    return (*words, *_flags(request), *tensorboard(request, index))


def of_untrained_on(
    request: "Request", seeds: Sequence[int], arguments: Sequence[str], parts: Sequence[int]
) -> tuple[str, ...]:
    """As `of_untrained`, without --out: on the held-out parts of the mega-batches `parts` alone."""
    return (*_untrained_words(request, seeds), *_held_out(parts), *arguments)


def of_stage_on(request: "Request", index: int, parts: Sequence[int]) -> tuple[str, ...]:
    """As `of_stage`, without --out: on the held-out parts of the mega-batches `parts` alone."""
    words = [*_stage_words(request, index), *_held_out(parts)]
    return (*words, "--item-losses", str(request.out), *_flags(request))


def tensorboard(request: "Request", index: int, member: int | None = None) -> list[str]:
    """Words for the TensorBoard folder of a model over all its stages, or of evaluations (None)."""
    folder = request.settings.get("--tensorboard-logdir")
    if not folder:
        return []
    path = Path(folder, request.out.name)
    if request.renews:
        path /= f"stage_{index:02d}"
    if member is not None and request.learner_spec.separate:
        path /= f"member_{member}"
    return flag_words("--tensorboard-logdir", path)


def _untrained_words(request: "Request", seeds: Sequence[int]) -> list[str]:
    words = [*_EVALUATE, "--untrained", "--seeds", ",".join(map(str, seeds))]
    if request.context_window:
        words += ["--context-window", str(request.context_window)]
    return words


def _stage_words(request: "Request", index: int) -> list[str]:
    words = [*_EVALUATE, request.stream, "--task", "alma_lm"]
    return [*words, "--stage", str(index), "--waiting-time", str(request.waiting_time)]


def _held_out(parts: Sequence[int]) -> list[str]:
    return ["--held-out", ",".join(map(str, parts))]


def _flags(request: "Request") -> list[str]:
    """The flags of an evaluation that follow from the request: weights, batches, number format."""
    words = []
    if request.context_window:
        words += ["--context-window", str(request.context_window)]
    if averages.last_of(request.average):
        words += ["--weights", str(request.average)]
    elif request.average:
        words += ["--weights", "average"]
    return [*words, *request.chosen(EVALUATION_FLAGS), *request.flags.get(ENCODER, ())]
