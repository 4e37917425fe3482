"""`alma test` of image runs by date: test their models on the periods that have arrived.

Nothing is trained.
"""

import argparse
import importlib
import shlex
from collections.abc import Sequence
from dataclasses import replace

from alma.errors import UserError, require_extra
from alma.evaluations import LateEvaluation, table_of
from alma.records import Run
from vision.local import run_all
from vision.run import exit_with, parser, record_arrivals
from vision.sections import read_sections
from vision.sweep import SweepRun, check_data, jobs_of


def test(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Test the models of `runs` on the periods that have arrived, and print the new cells of their
    evaluation matrices.

    `options` are those of `alma test`.

    UserError: a run is none by date, its command is not recorded, or past periods have changed.
    """
    require_extra("images", "a test of images")
    jobs = [job_of(run, options) for run in runs]
    for line in check_data(jobs):
        print(line, flush=True)
    if options.dry_run:
        from vision.late_cost import lines

        print(*lines(jobs), sep="\n")
    before = [len(run.late_evaluations) for run in runs]
    failed: list[Exception] = []
    if options.cluster == "slurm":
        _start_on_cluster(jobs, options)
    elif not options.dry_run:
        record_arrivals(jobs)
        failed = run_all(jobs, options.jobs)
    is_tested = options.cluster != "slurm" or options.wait
    if options.dry_run or not is_tested:
        return
    for run, old in zip(runs, before, strict=True):
        new = Run.read(run.directory).late_evaluations[old:]
        print(table(Run.read(run.directory), new))
    if failed:
        exit_with(failed, len(jobs))


def _start_on_cluster(jobs: Sequence[SweepRun], options: argparse.Namespace) -> None:
    """Submit a job for each run. slurm.vision is found by its name, as in `vision.run`."""
    launcher = importlib.import_module("slurm.vision.arrivals")
    launcher.launch([job.out for job in jobs], options)


def job_of(run: Run, options: argparse.Namespace) -> SweepRun:
    """The job that tests a run, by the command in its run.json. UserError: it is none by date."""
    words = shlex.split(run.info.get("command") or "")
    if words[:2] != ["alma", "images"]:
        how = "test it from Python: vision.run(stream, ..., only_test=True)"
        raise UserError(f"{run.directory}: its command is not in run.json: {how}")
    words = words[2:]
    if "periods" not in run.config:
        raise UserError(f"{run.directory}: its images have no dates: no period arrives")
    if options.data_root:
        words += ["--data-root", str(options.data_root)]
    words += ["--out", str(run.directory)]
    if options.test_past is not None:
        words += ["--test-past", str(options.test_past)]
    if options.device:
        words += ["--device", options.device]
    (job,) = jobs_of(*read_sections(parser(), words))
    return replace(job, options=job.options | {"only_test": True})


def table(run: Run, cells: Sequence[LateEvaluation]) -> str:
    """The error of each model on each period where it is new."""
    if not cells:
        return f"{run.directory}: no model to test on new periods"
    errors = table_of(cells, lambda stage: _trained_until(run, stage), "{:.1%}".format)
    return f"{run.directory}: error on what has arrived\n{errors}"


def _trained_until(run: Run, stage: int) -> str:
    """The last period that the model of a stage was trained on."""
    trained_on = [row["trained_on"] for row in run.rows_as_written if row["stage"] == stage]
    return run.config["periods"][max(trained_on[0]) - 1]
