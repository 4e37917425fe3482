"""Cancel the incomplete jobs of runs on a cluster, and no others: `alma cancel`."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.escape import terminal
from alma.help_texts import RUNS
from slurm.engine.queue import find, live_jobs, on_cluster, strangers
from slurm.engine.squeue import ask, scancel

_EXAMPLES = """\
examples:
  alma cancel runs/gmoe --dry-run
  alma cancel runs/gmoe
"""


def parser() -> Parser:
    cancel_parser = Parser(
        prog="alma cancel",
        usage="%(prog)s RUN... [--dry-run]",
        description="Cancel the incomplete SLURM jobs of runs, and no other jobs: each must be "
        "yours and submitted for the run. Trainings that other runs share and wait for are left, "
        "unless these runs are given too. To resume a cancelled run, rerun the command that "
        "launched it.",
        epilog=_EXAMPLES,
    )
    add = cancel_parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=RUNS)
    add("--dry-run", action="store_true", help="print the jobs without cancelling them")
    return cancel_parser


@command
def main() -> None:
    options = parser().parse_args()
    runs = [run for run in find(options.runs) if on_cluster(run)]
    if not runs:
        places = ", ".join(options.runs)
        remedy = "end a local run by Ctrl-C"
        raise UserError(f"{places}: not launched on a cluster (no jobs.json): {remedy}")
    jobs = _live(runs)
    dependents, needed = _ties(jobs)
    ending = [job_id for job_id in jobs if job_id not in needed]
    left = [job_id for job_id in [*jobs, *dependents] if job_id in needed]
    if ending and not options.dry_run:
        scancel(ending)
    for job_id in ending:
        print(terminal(f"{jobs[job_id]} (job id {job_id})"))
    done = "would cancel" if options.dry_run else "cancelled"
    print(f"{done} {len(ending)} jobs" if ending else "nothing to cancel")
    for job_id, state in strangers(runs).items():
        name = terminal(f"{state.name} of {state.user}")
        reason = "not submitted for these runs, whatever jobs.json says"
        print(f"left: job id {job_id} ({name}): {reason}")
    if left:
        _print_left(left, runs, jobs)


def _ties(jobs: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Ids of jobs of other runs that wait for `jobs`, and ids of all jobs that these need."""
    waits: dict[str, frozenset[str]] = {}
    if jobs:
        waits = {job_id: state.waits_for for job_id, state in ask().items() if state.live}
    affected = set(jobs)
    while new := {job_id for job_id in waits if waits[job_id] & affected} - affected:
        affected |= new
    dependents = sorted(affected - jobs.keys())
    needed = set(dependents)
    while new := _needs_of(needed, waits) - needed:
        needed |= new
    return dependents, needed


def _needs_of(job_ids: set[str], waits: Mapping[str, frozenset[str]]) -> set[str]:
    return {need for job_id in job_ids & waits.keys() for need in waits[job_id]}


def _print_left(left: Sequence[str], runs: Sequence[Path], jobs: Mapping[str, str]) -> None:
    """Print the jobs in `left`, which are not cancelled because other runs wait for them."""
    print("left are these, because other runs wait for them; give these runs too to cancel all:")
    names = dict(jobs)
    with contextlib.suppress(UserError):  # jobs.json of another run may be damaged
        beside = {file.parent for run in runs for file in run.resolve().parent.glob("*/jobs.json")}
        names = _live(sorted(beside)) | names
    for job_id in left:
        print(terminal(f"  {names.get(job_id, 'another job')} (job id {job_id})"))


def _live(runs: Sequence[Path]) -> dict[str, str]:
    """Run and name of the incomplete jobs in the queue."""
    return {str(job.job_id): f"{job.run}: {job.name}" for job in live_jobs(runs)}
