"""Run a sweep of image learners as one SLURM array, several runs in each job: `alma sweep`.

Flags after `--` are those of vision/run.py. Rerun the command to submit what is neither complete nor queued.
"""

import os
import signal
import sys
from collections.abc import Sequence

from alma.errors import Parser, UserError, command
from alma.files import make_directory, patiently_locked
from slurm.engine import children, resources, submission
from slurm.engine.resources import Resources
from slurm.vision.part import VISION, PartJob, parts

RUNS_PER_JOB = 20
USUAL = Resources(gpus_per_node=0, cpus_per_task=1)
_SET_HERE = ("--part", "--list", "--jobs", "--help", "-h")
_EXAMPLES = """\
examples:
  # the plan of 300 runs, in 15 jobs of 20; then the jobs, and their state
  alma sweep --cluster slurm --dry-run -- --learner sm,ens,gmoe --seeds 0-99 --out runs/digits
  alma sweep --cluster slurm -- --learner sm,ens,gmoe --seeds 0-99 --out runs/digits
  alma status runs/digits --watch
"""


def launch(sweep: Sequence[PartJob], wanted: Resources, wait: bool) -> None:
    """Submit the parts that are neither complete nor queued."""
    out = sweep[0].run
    folder = submission.log_folder(out)
    make_directory(folder.parent)
    with patiently_locked(folder.parent):  # else two launches could both find an empty queue
        busy = submission.in_queue([out])
        if foreign := [job for job in busy if job.marker not in {part.marker for part in sweep}]:
            raise UserError(
                f"{out}: {foreign[0].name} (job id {foreign[0].job_id}) of another launch is in the queue: "
                f"wait, or cancel it with: alma cancel {out}"
            )
        queued = {job.marker for job in busy}
        for part in sweep:
            if not part.done and part.marker not in queued:
                part.marker.unlink(missing_ok=True)  # of other runs, or of other flags
        submission.launch(sweep, wanted, folder, busy)
    if problems := submission.follow([out], wait):
        raise children.StageFailed("; ".join(map(str, problems)))


def parser() -> Parser:
    made = Parser(
        prog="python -m slurm.sweep",
        usage="%(prog)s [options] -- [flags of alma images]",
        description="Train a sweep of image learners as one SLURM array, several runs in each job. Rerun the "
        "command to submit what is neither complete nor queued. With --cluster local it is `alma images`.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        other="alma images",
    )
    group = made.add_argument_group("where to run")
    add = group.add_argument
    resources.add_cluster(group, "local", "slurm")
    each = f"runs of each job, at most; --cpus-per-task of them run at a time (default: {RUNS_PER_JOB})"
    add("--runs-per-job", type=int, metavar="N", help=each)
    add("--dry-run", action="store_true", help="print the input of sbatch; submit and write nothing")
    add("--wait", action="store_true", help=resources.WAIT)
    resources.add_flags(made, USUAL, "job of the array")
    return made


@command
@children.failures_in_one_line()
def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options, flags = parser().parse_args(words[:split]), words[split + 1 :]
    resources.check_cluster(options, slurm=("runs_per_job", "dry_run", "wait"))
    if options.cluster == "local":
        os.execv(sys.executable, [sys.executable, str(VISION), *flags])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs_per_job = RUNS_PER_JOB if options.runs_per_job is None else options.runs_per_job
    if runs_per_job < 1:
        raise UserError(f"--runs-per-job {runs_per_job}: give 1 or more")
    for flag in flags:
        if flag.partition("=")[0] in _SET_HERE:
            raise UserError(f"{flag}: not with --cluster slurm; --cpus-per-task runs go at a time")
    wanted = resources.read(options, USUAL)
    if wanted.nodes > 1 or wanted.tasks_per_node > 1:
        raise UserError("--nodes and --tasks-per-node: a part of a sweep is one task")
    sweep = parts(flags, runs_per_job, wanted.cpus_per_task or 1)
    if options.dry_run:
        texts, totals = submission.dry_run(sweep, wanted, submission.log_folder(sweep[0].run))
        print(*texts, totals, sep="\n")
    else:
        launch(sweep, wanted, options.wait)
    if options.wait:
        print(f"compare runs with: alma report {sweep[0].run}")


if __name__ == "__main__":
    main()
