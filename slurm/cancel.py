"""Cancel what is not done of runs on a cluster; no other job is touched.

python -m slurm.cancel RUN... [--dry-run]

The command that launched a run goes on with it later, where it was cancelled.
"""

from alma.errors import Parser, UserError, command
from slurm.engine.queue import find, live_units, on_cluster, scancel


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m slurm.cancel", description="Cancel what is not done of runs on a cluster.")
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder that holds some")
    made.add_argument("--dry-run", action="store_true", help="say what would be cancelled, and leave it")
    return made


@command
def main() -> None:
    """Entry point of `python -m slurm.cancel`."""
    options = parser().parse_args()
    runs = [run for run in find(options.runs) if on_cluster(run)]
    if not runs:
        where = ", ".join(options.runs)
        raise UserError(f"{where}: not launched on a cluster (no jobs.json): end a local run by Ctrl-C")
    units = live_units(runs)
    if units and not options.dry_run:
        scancel([unit.job for unit in units if unit.job])
    for unit in units:
        print(f"{unit.run}: {unit.name} (job {unit.job})")
    done = "would cancel" if options.dry_run else "cancelled"
    print(f"{done} {len(units)} units" if units else "nothing to cancel")


if __name__ == "__main__":
    main()
