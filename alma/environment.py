"""Algorithm 1: mega-batches arrive, the learner waits or trains, the environment tests it and records a row.

Independent of any framework: the learner loads its own data, and the caller measures the test error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from alma.records import Row, Run
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


Test = Callable[[], tuple[float, float]]
"""Measures the current model: its test error (a fraction), and the FLOPs of the measurement."""


def play(
    run: Run,
    learner: StageLearner,
    schedule: Sequence[Stage],
    test: Test,
    stages_done: int = 0,
    seconds: float = 0.0,
) -> None:
    """Play the whole stream: append a row to `run` for every t = 0..B (section 3.1).

    The untrained model is tested at t = 0, and its error counts until the first stage is complete. Only a
    new model is tested. A resumed learner has completed `stages_done` stages, and spent `seconds` on the
    next one. Existing rows are kept: the checkpoint may be older than they are, and retraining repeats them.
    """
    known = {row["t"]: row for row in run.rows}
    completing = {stage.last: stage for stage in schedule}
    latest = schedule[stages_done - 1] if stages_done else None
    value = known[latest.last]["value"] if latest else None
    for t in range(latest.last + 1 if latest else 0, run.config["megabatches"] + 1):
        started = time.monotonic()
        flops: dict[str, float] = {}
        tested = 0.0
        if t in completing:
            latest = completing[t]
            flops |= learner.train(latest)
            started, seconds = started - seconds, 0.0
        if t in completing or value is None:
            value, tested = test()
        if t not in known:
            row: Row = {
                "t": t,
                "stage": latest.index if latest else None,
                "trained_on": list(latest.train_on) if latest else [],
                "metric": "error",
                "value": value,
                "parameters": learner.parameters,
                "train_flops": sum(spent for purpose, spent in flops.items() if purpose != "validation"),
                "eval_flops_per_example": learner.eval_flops_per_example,
                "seconds": time.monotonic() - started,
                "peak_memory_bytes": learner.peak_memory_bytes,
                "extra": {
                    **learner.details,
                    "valid": learner.valid and dict(learner.valid),
                    "flops": flops,
                    "test_flops": tested,
                },
            }
            run.append(row)
