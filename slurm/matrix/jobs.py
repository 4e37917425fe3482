"""The tests of all models: one after another here, or each as a job of SLURM."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from alma.files import make_directory, write_json_atomic
from slurm.engine import children, submission
from slurm.engine.jobs import Job
from slurm.engine.resources import Resources
from slurm.engine.terminal import say
from slurm.matrix.measure import ModelTest


def run_here(tests: Sequence[ModelTest]) -> None:
    """Test the models one after another, with a line for each. Raises as `ModelTest.run`."""
    total = sum(len(test.data.periods) for test in tests)
    missing = sum(len(test.missing) for test in tests)
    with tqdm(
        desc="matrix", total=total, initial=total - missing, unit=" cells", disable=None
    ) as bar:

        def measured() -> None:
            bar.n = total - sum(len(test.missing) for test in tests)
            bar.refresh()

        for test in tests:
            before = len(test.data.periods) - len(test.missing)
            if test.missing:
                test.run(measured)
            say(line_of(test, before))


def line_of(test: ModelTest, before: int) -> str:
    """What was measured of a model; `before`: the number of cells of earlier calls."""
    row = test.row
    counted = "tokens" if test.program.in_bits else "examples"
    model = test.model
    text = f"{model.name}: trained until {model.cutoff.period} ({model.cutoff.source})"
    text += f", {len(row.cells)} periods, {sum(cell.count for cell in row.cells):,} {counted}"
    text += f", {sum(cell.seconds for cell in row.cells):.1f} s"
    if before:
        text += f"; {before} periods were measured before"
    return text


@dataclass(frozen=True, kw_only=True)
class MatrixJob(Job):
    """The test of one model, as a job."""

    kind: str = "sweep"
    array: str = "alma-matrix"
    alone: bool = True
    test: ModelTest

    @property
    def done(self) -> bool:
        """Whether its marker is there, and all its cells: they may have been removed."""
        return self.marker.exists() and not self.test.missing

    def work(self) -> None:
        """Measure what is missing."""
        self.test.check_unchanged()
        self.test.run()
        write_json_atomic(self.marker, {"periods": [p.name for p in self.test.data.periods]})


def run_on_slurm(tests: Sequence[ModelTest], job_resources: Resources, wait: bool) -> None:
    """Submit a job for each model with missing cells; with `wait`, wait for their end.

    UserError: SLURM refuses. StageFailed: a job failed.
    """
    jobs = [_job_of(test) for test in tests if test.missing]
    if not jobs:
        return
    folder = jobs[0].run
    logs = submission.log_folder(folder)
    submission.check_job("test of a model", job_resources.alone())
    make_directory(logs.parent)
    for job in jobs:
        job.marker.unlink(missing_ok=True)

    def submit() -> None:
        submission.launch(jobs, job_resources, logs, submission.in_queue([folder]))

    submission.submit_all(submit, [folder], wait)
    problems = submission.follow([folder], wait)
    if problems:
        raise children.StageFailed("; ".join(map(str, problems)))
    if wait:
        for test in tests:
            say(line_of(test, 0))


def _job_of(test: ModelTest) -> MatrixJob:
    """The job that tests a model."""
    store = test.store.folder.resolve()
    periods = "".join(period.sha256 for period in test.data.periods)
    digest = hashlib.sha256(periods.encode()).hexdigest()[:12]
    return MatrixJob(
        run=test.folder.resolve(),
        name=test.model.name,
        directory=store,
        marker=store / f"tested-{digest}.json",
        test=test,
    )
