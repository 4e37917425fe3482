"""Cancel the incomplete jobs of runs on a cluster, and no others: `alma cancel`."""

from alma.errors import Parser, UserError, command
from alma.help_texts import RUNS
from slurm.engine.queue import find, live_jobs, on_cluster
from slurm.engine.squeue import scancel

_EXAMPLES = """\
examples:
  alma cancel runs/gmoe --dry-run
  alma cancel runs/gmoe
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m slurm.cancel",
        usage="%(prog)s RUN... [--dry-run]",
        description="Cancel the incomplete SLURM jobs of runs, and no other jobs. To resume a cancelled run, "
        "rerun the command that launched it.",
        epilog=_EXAMPLES,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    made.add_argument("--dry-run", action="store_true", help="print the jobs without cancelling them")
    return made


@command
def main() -> None:
    options = parser().parse_args()
    runs = [run for run in find(options.runs) if on_cluster(run)]
    if not runs:
        where = ", ".join(options.runs)
        raise UserError(f"{where}: not launched on a cluster (no jobs.json): end a local run by Ctrl-C")
    jobs = live_jobs(runs)
    if jobs and not options.dry_run:
        scancel([job.job_id for job in jobs if job.job_id])
    for job in jobs:
        print(f"{job.run}: {job.name} (job id {job.job_id})")
    done = "would cancel" if options.dry_run else "cancelled"
    print(f"{done} {len(jobs)} jobs" if jobs else "nothing to cancel")


if __name__ == "__main__":
    main()
