"""The questions that advice answers, and the side of each that a configuration stands for."""

from alma.report.labels import replay
from alma.report.lm.entries import model_size
from alma.report.results import Result


def _members(result: Result) -> list[int]:
    """Models that are deployed together, by t."""
    rows = result.repeats[0].values()
    return [row["extra"].get("members") or result.config.get("members") or 1 for row in rows]


def _grows(result: Result) -> bool:
    """Whether the size of a model grows over the stream; an ensemble that gains members does not count."""
    sizes = zip(result.repeats[0].values(), _members(result), strict=True)
    trained = [row["parameters"] / members for row, members in sizes if row["stage"] is not None]
    return bool(trained) and max(trained) > 1.01 * trained[0]


QUESTIONS = {
    "train now or wait?": lambda result: (
        f"wait for {result.waiting_time} mega-batches" if result.waiting_time > 1 else "train now"
    ),
    "grow the model?": lambda result: "grow" if _grows(result) else "keep the size",
    "one model or several?": lambda result: "several models" if max(_members(result)) > 1 else "one model",
    "average the weights?": lambda result: (
        "averaged weights" if "average" in result.config else "raw weights"
    ),
    "replay?": lambda result: f"replay {replay(result.config)}".replace("replay no", "no replay"),
    "last weights or anew?": lambda result: "anew" if result.config.get("from_scratch") else "last weights",
    "one schedule?": lambda result: f"schedule: {result.config.get('schedule', 'each stage')}",
    "which size?": lambda result: f"size {model_size(result)}",
}
"""Decisions, and the side of each that a result stands for."""
NO_EVIDENCE = "no evidence either way"
_OF_THE_LEARNER = ("grow the model?", "one model or several?")
LEARNER = "learner"  # beside the questions in `Candidate.sides`


def differ_in(question: str, one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two configurations answer this question differently and no other one; the learner is the same,
    unless the question is about it."""
    differences = {each for each, side in one.items() if side != other[each]}
    return differences - ({LEARNER} if question in _OF_THE_LEARNER else set()) == {question}
