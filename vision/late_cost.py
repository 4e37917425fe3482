"""Cost of late evaluations before their start, for `alma images --dry-run` and `alma test`."""

from collections.abc import Sequence
from dataclasses import dataclass

from alma.records import Run
from vision.estimate import timed_seconds, untrained
from vision.late import stages_with_files, to_test
from vision.periods import listed
from vision.sweep import SweepRun


@dataclass
class _Cost:
    """Cost of the late evaluations of a run."""

    models: int = 0
    images: int = 0  # summed over models
    flops: float = 0.0
    seconds: float = 0.0


def lines(jobs: Sequence[SweepRun]) -> list[str]:
    """A line for each run whose earlier models are to be tested on periods that have arrived."""
    timed: dict = {}
    texts = []
    for job in jobs:
        if job.source and (job.out / "run.json").exists():
            cost = _cost(job, timed)
            counts = f"{cost.models} earlier models to test on what has arrived"
            work = f"{cost.images:,} images x models, {cost.flops / 1e12:.3g} TFLOPs"
            texts.append(f"{job.out}: {counts}: {work}, {cost.seconds / 60:.2g} minutes")
    return texts


def _cost(job: SweepRun, timed: dict) -> _Cost:
    """The cost of a run; that of a grown model by its FLOPs, which rows have."""
    run = Run.read(job.out)
    assert job.source
    periods, _ = listed(job.source)
    missing = to_test(run, len(periods), job.options["test_past"])
    flops_of = {row["stage"]: row["eval_flops_per_example"] for row in run.rows_as_written}
    cost = _Cost()
    for untested in stages_with_files(run, missing):
        images = sum(len(periods[t - 1].splits["test"]) for t in untested.megabatches)
        if getattr(job.settings, "average", None):
            images *= 2  # the weights before averaging, too
        cost.models += 1
        cost.images += images
        cost.flops += images * flops_of[untested.stage]
    if cost.images:
        learner = untrained(job)
        seconds = timed_seconds(learner, job.options["learner"], timed)
        cost.seconds = cost.flops * seconds.evaluation / learner.model.flops.inference
    return cost
