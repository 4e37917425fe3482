"""The questions that advice answers, and the side of each that a configuration takes."""

from collections.abc import Callable

from alma.report.labels import replay
from alma.report.lm.entries import model_size
from alma.report.results import Result

NO_EVIDENCE = "no evidence either way"
LEARNER = "learner"  # key of the learner in `Candidate.sides`, beside the questions
_OF_THE_LEARNER = ("grow the model?", "one model or several?")
_GROWN = 1.01  # a model counts as grown if its size increases by this factor


def _members(result: Result) -> list[int]:
    """The number of models that are deployed together, at each t."""
    members = []
    for row in result.repeats[0].values():
        members.append(row["extra"].get("members") or result.config.get("members") or 1)
    return members


def _grows(result: Result) -> bool:
    """Whether a model grows over the stream; an ensemble that only gains members does not."""
    sizes = []
    for row, members in zip(result.repeats[0].values(), _members(result), strict=True):
        if row["stage"] is not None:
            sizes.append(row["parameters"] / members)
    return bool(sizes) and max(sizes) > _GROWN * sizes[0]


def _waiting(result: Result) -> str:
    wait = result.waiting_time
    return f"wait for {wait} mega-batches" if wait > 1 else "train now"


def _growth(result: Result) -> str:
    return "grow" if _grows(result) else "keep the size"


def _several(result: Result) -> str:
    return "several models" if max(_members(result)) > 1 else "one model"


def _average(result: Result) -> str:
    return "averaged weights" if "average" in result.config else "raw weights"


def _first_weights(result: Result) -> str:
    return "anew" if result.config.get("from_scratch") else "last weights"


def _replay(result: Result) -> str:
    return f"replay {replay(result.config)}".replace("replay no", "no replay")


QUESTIONS: dict[str, Callable[[Result], str]] = {
    "train now or wait?": _waiting,
    "grow the model?": _growth,
    "one model or several?": _several,
    "average the weights?": _average,
    "replay?": _replay,
    "last weights or anew?": _first_weights,
    "one schedule?": lambda result: f"schedule: {result.config.get('schedule', 'each stage')}",
    "which size?": lambda result: f"size {model_size(result)}",
}
"""The questions (decisions such as waiting or replay), each with a function from a result to its
side."""


def differ_in(question: str, sides: dict[str, str], rival_sides: dict[str, str]) -> bool:
    """Whether two configurations answer this question differently and all others alike.

    They have the same learner, too, unless the question is about it. `sides`: of `Candidate`.
    """
    differences = {name for name, side in sides.items() if side != rival_sides[name]}
    if question in _OF_THE_LEARNER:
        differences.discard(LEARNER)
    return differences == {question}
