"""Submit a sweep of image runs as one SLURM array, several in each job: `alma images --cluster
slurm`."""

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, command, count, interrupt, require_extra
from alma.files import make_directory, patiently_locked
from slurm.engine import children, resources, submission
from slurm.engine.resources import Resources
from slurm.vision.part import PartJob, parts

USUAL = Resources(gpus_per_node=0, cpus_per_task=1)
_SET_HERE = ("--part", "--list", "--list-periods", "--jobs")
_EXAMPLES = """\
examples:
  # the plan of 300 runs, in 15 jobs of 20; then the jobs, and their state
  alma images --learner sm,ens,gmoe --seeds 0-99 --out runs/digits --cluster slurm --dry-run
  alma images --learner sm,ens,gmoe --seeds 0-99 --out runs/digits --cluster slurm
  alma status runs/digits
"""


def parser() -> Parser:
    """Flags of `alma images` with --cluster slurm only; the others are those of vision/run.py."""
    cluster_parser = Parser(
        prog="alma images --cluster slurm",
        usage="alma images [EXPERIMENT.yaml] [flags of alma images] --cluster slurm [options]",
        description="Train image learners as one SLURM array, several runs in each job. Rerun the "
        "command to submit what is neither complete nor queued, with --append after a stream by "
        "date has grown. `alma images --help` describes the other flags.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    group = cluster_parser.add_argument_group("where to run")
    group.add_argument("--cluster", choices=("slurm",), default="slurm", help="as SLURM jobs")
    runs = "runs of each job, at most; --cpus-per-task of them run at a time (default: 20)"
    group.add_argument("--runs-per-job", type=count, default=20, metavar="N", help=runs)
    dry = "print the input of sbatch; submit and write nothing"
    group.add_argument("--dry-run", action="store_true", help=dry)
    group.add_argument("--wait", action="store_true", help=resources.WAIT)
    resources.add_flags(cluster_parser, USUAL, "job of the array")
    return cluster_parser


@command
@children.failures_in_one_line()
def main() -> None:
    signal.signal(signal.SIGTERM, interrupt)
    options, flags = parser().parse_known_args()
    resources.check_cluster(options)
    require_extra("images", "alma images")
    for flag in flags:
        if flag.partition("=")[0] == "--write":
            raise UserError(f"{flag}: on this machine only: leave out --cluster slurm")
        if flag.partition("=")[0] in _SET_HERE:
            raise UserError(f"{flag}: not with --cluster slurm; --cpus-per-task runs go at a time")
    job_resources = resources.read(options, USUAL)
    if job_resources.nodes > 1 or job_resources.tasks_per_node > 1:
        raise UserError("--nodes and --tasks-per-node: a part of a sweep is one task")
    sweep = parts(flags, options.runs_per_job, job_resources.cpus_per_task or 1)
    out = sweep[0].run
    folder = submission.log_folder(out)
    if options.dry_run:
        texts, totals = submission.dry_run(sweep, job_resources, folder)
        print(*texts, totals, sep="\n")
        return
    submission.check_job("sweep", job_resources)
    make_directory(folder.parent)
    submission.submit_all(lambda: _submit(sweep, job_resources, out), [out], options.wait)
    problems = submission.follow([out], options.wait)
    if problems:
        raise children.StageFailed("; ".join(map(str, problems)))
    if options.wait:
        print("compare runs with:", shlex.join(["alma", "report", str(out)]))


def _submit(sweep: Sequence[PartJob], job_resources: Resources, out: Path) -> None:
    """Submit the parts of a sweep that are neither complete nor queued. UserError: SLURM refuses,
    or the queue has jobs of another launch."""
    folder = submission.log_folder(out)
    with patiently_locked(folder.parent):  # two launches could both find an empty queue
        busy = submission.in_queue([out])
        markers = {part.marker for part in sweep}
        foreign = [job for job in busy if job.marker not in markers]
        if foreign:
            problem = f"{foreign[0].name} (job id {foreign[0].job_id}) of another launch"
            remedy = f"wait, or cancel it with: alma cancel {shlex.quote(str(out))}"
            raise UserError(f"{out}: {problem} is in the queue: {remedy}")
        queued = {job.marker for job in busy}
        for part in sweep:
            if part.marker not in queued:
                part.remove_stale_marker()
        submission.launch(sweep, job_resources, folder, busy)


if __name__ == "__main__":
    main()
