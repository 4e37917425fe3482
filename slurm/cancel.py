"""Cancel the incomplete jobs of runs on a cluster: `alma cancel`.

A training that runs share is a job of one of them; the others' jobs wait for it.
"""

import contextlib
from collections.abc import Mapping

from alma.errors import Parser, UserError, command
from alma.help_texts import RUNS
from slurm.engine.queue import find, live_jobs, on_cluster, read_jobs
from slurm.engine.squeue import JobState, followers, own, reached, scancel
from slurm.engine.submission import LOGS

_EXAMPLES = """\
examples:
  alma cancel runs/gmoe --dry-run
  alma cancel runs/gmoe
  alma cancel runs/gmoe --with-dependents
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m slurm.cancel",
        usage="%(prog)s RUN... [--dry-run] [--with-dependents]",
        description="Cancel the incomplete SLURM jobs of runs, and no other jobs. Trainings that other runs "
        "share and wait for are left. To resume a cancelled run, rerun the command that launched it.",
        epilog=_EXAMPLES,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    made.add_argument("--dry-run", action="store_true", help="print the jobs without cancelling them")
    dependents = "cancel shared trainings too, and the jobs of other runs that wait for them"
    made.add_argument("--with-dependents", action="store_true", help=dependents)
    return made


@command
def main() -> None:
    options = parser().parse_args()
    runs = [run for run in find(options.runs) if on_cluster(run)]
    if not runs:
        where = ", ".join(options.runs)
        raise UserError(f"{where}: not launched on a cluster (no jobs.json): end a local run by Ctrl-C")
    jobs = {str(job.job_id): f"{job.run}: {job.name}" for job in live_jobs(runs)}
    states = own() if jobs else {}
    others = reached(jobs, followers(states)) - jobs.keys()
    needed = reached(others, {job_id: state.waits_for for job_id, state in states.items()}) & jobs.keys()
    ending = [job_id for job_id in jobs if job_id not in needed]
    if options.with_dependents:
        ending = [*jobs, *sorted(others)]
    if ending and not options.dry_run:
        scancel(ending)
    names = jobs | _names({job_id: states[job_id] for job_id in others})
    for job_id in ending:
        print(f"{names[job_id]} (job id {job_id})")
    done = "would cancel" if options.dry_run else "cancelled"
    print(f"{done} {len(ending)} jobs" if ending else "nothing to cancel")
    if others and not options.with_dependents:
        print(f"left {len(needed)} jobs because {len(others)} jobs of other runs wait for them:")
        for job_id in [*(job for job in jobs if job in needed), *sorted(others)]:
            print(f"  {names[job_id]} (job id {job_id})")
        print("--with-dependents cancels all of these")


def _names(states: Mapping[str, JobState]) -> dict[str, str]:
    """Run and name of other jobs, as far as jobs.json files beside their logs have them."""
    places = {state.output.partition(f"/{LOGS}/")[0] for state in states.values() if LOGS in state.output}
    names: dict[str | None, str] = {}
    with contextlib.suppress(UserError):  # moved since
        for run in filter(on_cluster, find(sorted(places))):
            names |= {job.job_id: f"{job.run}: {job.name}" for job in read_jobs(run)}
    return {job_id: names.get(job_id, state.output) for job_id, state in states.items()}


if __name__ == "__main__":
    main()
