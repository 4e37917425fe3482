"""Algorithm 1: mega-batches arrive, the learner waits or trains, the environment tests it and records a row.

Independent of any framework: the learner loads its own data, and the caller measures the test
error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from alma.records import Run
from alma.stages import Stage


class StageLearner(Protocol):
    """The interface of a learner to the environment. A multiply-add counts as two FLOPs."""

    def train(self, stage: Stage) -> Mapping[str, float]:
        """Train on one stage; returns its FLOPs by purpose. All but those of "validation" count in Comp."""

    @property
    def parameters(self) -> int:
        """Current number of free parameters."""

    @property
    def eval_flops_per_example(self) -> float:
        """FLOPs of one prediction with the current model."""

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory so far."""

    @property
    def valid(self) -> Mapping[str, float] | None:
        """Mean loss and error on the validation data of the last stage; None before the first stage."""

    @property
    def details(self) -> Mapping[str, Any]:
        """Further results for `extra` of the row, such as members or experts."""


Measured = dict[str, Any]  # the fields of a row, but for `t`, `stage` and `trained_on`


def append_rows(
    run: Run,
    schedule: Sequence[Stage],
    measure: Callable[[Stage | None], Measured],
    waiting: Callable[[Mapping[str, Any]], Measured],
    stages_done: int = 0,
    before_last: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> None:
    """Play the stream up to the end of the schedule: append a row to `run` for every t from 0 (section 3.1).

    `measure` trains on a stage, or takes the untrained model at t = 0, and returns the measured
    fields of the row. While the learner waits, they follow from the row before by `waiting`.
    `before_last` gets the last row first. Existing rows are kept: the checkpoint after
    `stages_done` stages may be older than they are.
    """
    known = {row["t"]: row for row in run.rows}
    completing = {stage.last: stage for stage in schedule}
    stage = schedule[stages_done - 1] if stages_done else None
    row: Mapping[str, Any] = known[stage.last] if stage else {}
    end = schedule[-1].last if schedule else 0
    for t in range(stage.last + 1 if stage else 0, end + 1):
        stage = completing.get(t, stage)
        measured = measure(stage) if t in completing or not t else waiting(row)
        place: dict[str, Any] = {"t": t, "stage": stage.index if stage else None}
        place["trained_on"] = list(stage.train_on) if stage else []
        row = place | measured | place
        if t == end:
            before_last(row)
        if t not in known:
            run.append(row)


def play(
    run: Run,
    learner: StageLearner,
    schedule: Sequence[Stage],
    test: Callable[[], tuple[float, float]],
    stages_done: int = 0,
    seconds: float = 0.0,
    before_last: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> None:
    """Train and test `learner` on the whole stream; see `append_rows`.

    `test` measures the current model: its error (a fraction), and the FLOPs of the measurement. A
    resumed learner has completed `stages_done` stages, and spent `seconds` on the next one.
    """

    def measure(stage: Stage | None) -> Measured:
        nonlocal seconds
        started = time.monotonic()
        flops: dict[str, float] = {}
        if stage:
            flops |= learner.train(stage)
            started, seconds = started - seconds, 0.0
        value, tested = test()
        valid = learner.valid and dict(learner.valid)
        return {
            "metric": "error",
            "value": value,
            "parameters": learner.parameters,
            "train_flops": sum(
                spent for purpose, spent in flops.items() if purpose != "validation"
            ),
            "eval_flops_per_example": learner.eval_flops_per_example,
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": learner.peak_memory_bytes,
            "extra": {**learner.details, "valid": valid, "flops": flops, "test_flops": tested},
        }

    def waiting(row: Mapping[str, Any]) -> Measured:
        extra = row["extra"] | dict(learner.details) | {"flops": {}, "test_flops": 0.0}
        return {**row, "train_flops": 0, "seconds": 0.0, "extra": extra}

    append_rows(run, schedule, measure, waiting, stages_done, before_last)
