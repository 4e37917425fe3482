"""Algorithm 1: mega-batches arrive, the learner waits or trains, the environment tests it and takes notes.

Free of any framework: what a stage trains on and how a test error is found are the caller's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from alma.records import Row, Run
from alma.stages import Stage


class Learner(Protocol):
    """What the environment asks of a learner. FLOPs count a multiplication and an addition as two."""

    def train(self, stage: Stage) -> Mapping[str, float]:
        """Train on one stage; returns the FLOPs spent on it by purpose, all of which count in Comp but those
        of "validation"."""

    @property
    def parameters(self) -> int:
        """Free parameters now."""

    @property
    def eval_flops_per_example(self) -> float:
        """FLOPs of one prediction now."""

    @property
    def peak_memory_bytes(self) -> int:
        """Most memory in use so far."""

    @property
    def valid(self) -> Mapping[str, float] | None:
        """Mean loss and error on the validation data of the last stage; None before the first."""

    @property
    def details(self) -> Mapping[str, Any]:
        """Further results for the record's `extra`, such as members or experts."""


Test = Callable[[], tuple[float, float]]
"""Test error (a fraction) of the learner as it is now, and the FLOPs that finding it took."""


def play(
    run: Run,
    learner: Learner,
    schedule: Sequence[Stage],
    test: Test,
    stages_done: int = 0,
    seconds: float = 0.0,
) -> None:
    """Let the stream pass by: one row of `run` for every t = 0..B (section 3.1).

    The untrained model is tested at t = 0 and is what counts until the first stage is complete; a model
    that has not changed is not tested again. `stages_done` stages are already in the learner (it was
    resumed), and `seconds` were spent on the next one. Rows that are on disk stay as they are: training goes
    on from a checkpoint that may be older, and repeats their numbers.
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
