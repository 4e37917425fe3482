"""`alma test --cluster slurm` for image runs: one job for each run."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.files import make_directory, patiently_locked
from slurm.engine import children, resources, submission
from slurm.engine.resources import Resources
from slurm.engine.submission import LOGS
from slurm.vision.part import CommandJob

MARKER = "test.json"
USUAL = Resources(gpus_per_node=0, cpus_per_task=1)


@dataclass(frozen=True, kw_only=True)
class TestJob(CommandJob):
    """Test the models of a run on the periods that have arrived."""

    words: tuple[str, ...]  # of `alma test`

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "alma", "test", *self.words]

    @property
    def about(self) -> dict[str, Any]:
        return {"words": self.words}


@children.failures_in_one_line()
def launch(runs: Sequence[Path], options: argparse.Namespace) -> None:
    """Submit the tests of `runs`, or print the input of sbatch with `options.dry_run`.

    A job that finds nothing new ends at once. UserError: no SLURM, or it refuses.
    """
    job_resources = resources.read(options, USUAL)
    jobs = [_job(run.resolve(), options, job_resources.cpus_per_task or 1) for run in runs]
    folder = submission.log_folder(jobs[0].run)
    if options.dry_run:
        texts, totals = submission.dry_run(jobs, job_resources, folder)
        print(*texts, totals, sep="\n")
        return
    places = [job.run for job in jobs]
    submission.check_job("test", job_resources)
    make_directory(folder.parent)
    cleared: set[Path] = set()  # markers of earlier tests that are removed
    submission.submit_all(lambda: _submit(jobs, job_resources, cleared), places, options.wait)
    problems = submission.follow(places, options.wait)
    if problems:
        raise children.StageFailed("; ".join(map(str, problems)))


def _submit(jobs: Sequence[TestJob], job_resources: Resources, cleared: set[Path]) -> None:
    """Submit the jobs that are neither queued nor complete since `cleared` has their markers.

    UserError: SLURM refuses.
    """
    folder = submission.log_folder(jobs[0].run)
    with patiently_locked(folder.parent):  # two launches could both find an empty queue
        busy = submission.in_queue([job.run for job in jobs])
        queued = {job.marker for job in busy}
        for job in jobs:
            if job.marker not in queued and job.marker not in cleared:
                job.marker.unlink(missing_ok=True)
                cleared.add(job.marker)
        submission.launch(jobs, job_resources, folder, busy)


def _job(run: Path, options: argparse.Namespace, cpus: int) -> TestJob:
    """The job that tests a run."""
    words = [str(run), "--jobs", str(cpus)]
    if options.test_past is not None:
        words += ["--test-past", str(options.test_past)]
    if options.device:
        words += ["--device", options.device]
    if options.data_root:
        words += ["--data-root", str(options.data_root)]
    return TestJob(
        run=run,
        name=f"test of {run.name}",
        array="alma-test",
        directory=run,
        marker=run / LOGS / MARKER,
        words=tuple(words),
        cpus=cpus,
    )
