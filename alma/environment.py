"""Algorithm 1: mega-batches arrive, the learner waits or trains, and each t gets a row.

Independent of any framework: the learner loads its own data, and the caller measures the error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from alma.records import Run
from alma.stages import Stage


class StageLearner(Protocol):
    """The interface of a learner to the environment. A multiply-add counts as two FLOPs."""

    def train(self, stage: Stage) -> Mapping[str, float]:
        """Train on one stage; return its FLOPs by purpose.

        All purposes but "validation" count in Comp (eq. 2).
        """

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
        """Mean loss and error on the last stage's validation data; None before the first stage."""

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
    """Play the stream: append a row to `run` for each t from 0 to the last stage (section 3.1).

    `measure` trains on a stage (None: measures the untrained model) and returns the measured fields
    of a row. For a t at which the learner waits, `waiting` derives them from the previous row.
    `before_last` is called with the last row before it is appended. A resumed learner has completed
    `stages_done` stages. The run may already have rows of later stages, if it was killed between a
    row and the next checkpoint; these stages are computed again, and the existing rows are kept.
    """
    recorded = {row["t"]: row for row in run.rows_as_written}
    completed_at = {stage.last: stage for stage in schedule}
    end = schedule[-1].last if schedule else 0
    stage: Stage | None = None
    row: Mapping[str, Any] = {}
    start = 0
    if stages_done:
        stage = schedule[stages_done - 1]
        row = recorded[stage.last]
        start = stage.last + 1
    for t in range(start, end + 1):
        if t in completed_at:
            stage = completed_at[t]
            measured = measure(stage)
        elif t == 0:
            measured = measure(None)
        else:
            measured = waiting(row)
        place = {
            "t": t,
            "stage": stage.index if stage else None,
            "trained_on": list(stage.train_on) if stage else [],
        }
        # `place` comes first in the order of fields, and overrides what `waiting` has copied.
        row = place | measured | place
        if t == end:
            before_last(row)
        if t not in recorded:
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
            started -= seconds
            seconds = 0.0
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
