"""Runs as SLURM jobs."""

import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from alma.errors import UserError
from alma.files import make_directory, patiently_locked
from alma.records import Run
from slurm.engine import children, queue, submission
from slurm.engine.queue import SubmittedJob
from slurm.engine.resources import Resources
from slurm.lm.plan import Plan
from slurm.lm.record import collect, open_run, run_config
from slurm.lm.stage import in_submission_order, jobs_of


def launch_on_slurm(plans: Sequence[Plan], job_resources: Resources, wait: bool) -> None:
    """Submit all jobs that are neither complete nor queued.

    With `wait`, wait for their end; raise StageFailed if one fails.
    """
    outs = [plan.out for plan in plans]
    submission.submit_all(lambda: _submit(plans, job_resources), outs, wait)
    problems = submission.follow(outs, wait)
    if not wait:
        return
    for plan in plans:
        with patiently_locked(plan.out):  # the last job may still be appending its rows
            collect(plan, open_run(plan))
    if problems:
        raise children.StageFailed("; ".join(map(str, problems)))


def _submit(plans: Sequence[Plan], job_resources: Resources) -> None:
    """Submit all jobs that are neither complete nor queued."""
    folder = submission.log_folder(common_folder(plans))
    outs = [plan.out for plan in plans]
    with ExitStack() as stack:  # lock all runs: two launches could both find an empty queue
        for out in outs:
            make_directory(out)
            stack.enter_context(patiently_locked(out))
        busy = submission.in_queue(outs)
        taken = {job.run for job in busy}
        for plan in plans:
            if plan.out in taken and not Run.check(plan.out, *run_config(plan)):
                raise _in_the_queue(plan, busy, "wait for them")
            collect(plan, open_run(plan))
        jobs = [job for plan in plans for job in jobs_of(plan)]
        submission.launch(in_submission_order(jobs), job_resources, folder, busy)


def common_folder(plans: Sequence[Plan]) -> Path:
    """The deepest folder that contains all runs; that of a single run is its own."""
    return Path(os.path.commonpath([plan.out.resolve() for plan in plans]))


def show_jobs(plans: Sequence[Plan], job_resources: Resources, verbose: bool) -> None:
    """Print which jobs would be submitted; `verbose`: with the input of sbatch."""
    folder = submission.log_folder(common_folder(plans))
    jobs = in_submission_order([job for plan in plans for job in jobs_of(plan)])
    texts, totals = submission.dry_run(jobs, job_resources, folder)
    if not verbose:
        texts = [text.partition("\n")[0] for text in texts]
    print(*texts, totals, sep="\n")


def check_queue(plan: Plan) -> None:
    """Raise UserError if SLURM has jobs of the run, which would train the same stages."""
    if not queue.on_cluster(plan.out) or not shutil.which("squeue"):
        return
    busy = queue.live_jobs([plan.out])
    if busy:
        raise _in_the_queue(plan, busy, "give --cluster slurm")


def _in_the_queue(plan: Plan, busy: Sequence[SubmittedJob], instead: str) -> UserError:
    ids = ", ".join(dict.fromkeys(str(job.job_id) for job in busy if job.run == plan.out))
    problem = f"jobs of this run are in SLURM's queue (job ids {ids})"
    cancel = f"cancel them with: alma cancel {shlex.quote(str(plan.out))}"
    return UserError(f"{plan.out}: {problem}: {instead}, or {cancel}")
