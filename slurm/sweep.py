"""A sweep of image runs as one array job: each element does a part of the runs, several in one job.

python -m slurm.sweep --cluster slurm --runs-per-job 20 -- --learner sm,ens --seeds 0-99 --out runs/digits

What follows `--` are flags of vision/run.py. The same command submits what is neither complete nor queued.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from slurm.engine import children as child
from slurm.engine import queue, resources
from slurm.engine import submission as submit
from slurm.engine.jobs import patiently_locked
from slurm.engine.resources import Resources
from slurm.lm.progress import say
from slurm.vision.part import VISION, Part, parts

RUNS_PER_JOB = 20
USUAL = Resources(gpus_per_node=0, cpus_per_task=1)
_OWN = ("--part", "--list", "--jobs", "--help", "-h")  # the array's business


def launch(sweep: Sequence[Part], wanted: Resources, dry: bool, wait: bool) -> None:
    """Submit the parts that are not complete, and not in the queue; `dry`: print what sbatch would get."""
    out = sweep[0].out
    folder = submit.log_folder_in(out)
    missing = [part for part in sweep if not part.done]
    if dry:
        paper = submit.Paper()
        if missing:
            submit.to_paper(folder, paper)("alma-sweep", missing, wanted, None)
        print("\n".join([*paper.texts, str(paper)]))
        return
    make_directory(folder.parent)
    jobs: dict[Path, tuple[str, str]] = {}  # of each part: its job, and that job's log
    with patiently_locked(folder.parent):  # two launches at a time would both find nothing in the queue
        busy = queue.live_units([out]) if queue.on_cluster(out) else []
        jobs |= {unit.marker: (unit.job, str(unit.log)) for unit in busy if unit.job}
        if foreign := [unit for unit in busy if unit.marker not in {part.marker for part in sweep}]:
            raise UserError(
                f"{out}: {foreign[0].name} (job {foreign[0].job}) of another launch is in the queue: wait, "
                f"or cancel it with: python -m slurm.cancel {out}"
            )
        if busy:
            say(f"{len(busy)} parts are in the queue already, {busy[0].name} among them")
        missing = [part for part in missing if part.marker not in jobs]
        for part in missing:
            part.marker.unlink(missing_ok=True)  # of other runs, or of other flags
        if missing:
            ids = submit.to_slurm(folder)("alma-sweep", missing, wanted, None)
            for part, job in zip(missing, ids, strict=True):
                jobs[part.marker] = (job, submit.job_log(folder, job))
        _record(sweep, jobs)
    runs = sum(len(part.runs) for part in missing)
    say(f"{len(missing)} parts with {runs} runs submitted" + (f"; their logs: {folder}" if missing else ""))
    if not wait:
        print(f"watch them with: python -m slurm.status --watch {out}")
        return
    problems = queue.wait([out])
    if problems:
        raise child.StageFailed("; ".join(str(problem) for problem in problems))


def _record(sweep: Sequence[Part], jobs: dict[Path, tuple[str, str]]) -> None:
    """Write the sweep's jobs.json, which slurm.status and slurm.cancel read."""
    entries: list[dict[str, Any]] = []
    for part in sweep:
        job, log = jobs.get(part.marker, (None, None))
        entries.append(
            {
                "name": part.name,
                "kind": "sweep",
                "stage": None,
                "directory": ".",
                "marker": os.path.relpath(part.marker, part.out),
                "updates": None,
                "job": job,
                "log": log,
                "needs": [],
            }
        )
    queue.write_units(sweep[0].out, entries)


def parser() -> Parser:
    """The command line, as far as the `--`."""
    made = Parser(
        prog="python -m slurm.sweep",
        usage="%(prog)s [options] -- [flags of vision/run.py]",
        description="Run a sweep of image runs as one array job, several runs in each element. After an "
        "interruption the same command goes on where it stopped.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--cluster", choices=("local", "slurm"), default="local", help="where the runs run (default: here)"
    )
    made.add_argument(
        "--runs-per-job",
        type=int,
        metavar="N",
        help=f"with --cluster slurm: at most N (default: {RUNS_PER_JOB})",
    )
    made.add_argument(
        "--dry-run", action="store_true", help="with --cluster slurm: print what sbatch would get"
    )
    made.add_argument(
        "--wait", action="store_true", help="with --cluster slurm: wait for the end, and fail if a job did"
    )
    resources.add_flags(made, USUAL, "element of the array")
    return made


@command
def main() -> None:
    """Entry point of `python -m slurm.sweep`."""
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
        if flag.partition("=")[0] in _OWN:
            raise UserError(f"{flag} is not for --cluster slurm, where --cpus-per-task runs go at a time")
    wanted = resources.read(options, USUAL)
    if wanted.nodes > 1 or wanted.tasks_per_node > 1:
        raise UserError("--nodes and --tasks-per-node: a part of a sweep is one task")
    try:
        sweep = parts(flags, runs_per_job, wanted.cpus_per_task or 1)
        launch(sweep, wanted, options.dry_run, options.wait)
    except child.StageFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)
    if options.wait:
        print(f"compare runs with: python -m alma.report {sweep[0].out}")


if __name__ == "__main__":
    main()
