"""State of runs: a line for each job on a cluster, and for each local run: `alma status`."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.help_texts import RUNS
from alma.records import Run
from alma.tables import as_text
from slurm.engine import queue
from slurm.engine.queue import JobStatus, SubmittedJob
from slurm.engine.terminal import say

HEADER = ["run", "job", "state", "job id", "node", "updates", "perplexity", "log"]
_ABOUT = (
    "Show the state of runs: a line for each job on a cluster, and for each run on this machine."
)
_STATES = """\
A job waits (for a job that it needs), is queued (for resources), requeued or running; then it is \
done, which
its marker shows, failed, cancelled (by a user, or a job it needs failed), lost (SLURM no longer \
knows it) or
was never submitted. A run on this machine is running, done, failed or stopped (killed, or Ctrl-C).

Exit code 0: every job is done or active (waiting to running); 1: one is not, or a run is left out \
because its
files are damaged.

examples:
  alma status runs
  alma status runs/gmoe runs/digits
"""
_LINE = re.compile(r".* \| (train_inner|valid) \| (\{.*\})$")


def table(seen: Sequence[JobStatus]) -> str:
    """A line for each job or local run."""
    rows = [HEADER]
    for status in seen:
        job = status.job
        log = status.log
        if status.state in ("running", "done"):
            log = log or job.own_log or job.log
        shown = min(str(log), os.path.relpath(log), key=len) if log else ""
        remark = ": ".join(filter(None, (shown, status.why)))
        cells = [str(job.run), job.name, status.state, job.job_id or "", status.node]
        rows.append([*cells, *_progress(status), remark])
    text = as_text(rows, left=(*range(HEADER.index("updates")), -1))
    return "\n".join(map(str.rstrip, text.splitlines()))


def _progress(status: JobStatus) -> tuple[str, str]:
    """Updates and perplexity of a job or local run; each empty if unknown."""
    job = status.job
    if job.kind == "train" and job.own_log:
        return _progress_of_training(job, _last_attempt(status, job.own_log))
    if job.kind == "run":
        last_rows = Run.read(job.run).rows[-1:]
        if last_rows and last_rows[0]["metric"] == "perplexity":
            return "", f"{last_rows[0]['value']:,.2f}"
        return "", ""
    try:
        measured = json.loads(job.marker.read_bytes())
        if job.kind == "late":
            return "", f"{measured['held_out'][-1]['value']:,.2f}"
        return "", f"{measured['perplexity']:,.2f}"
    except (OSError, ValueError, LookupError, TypeError):  # no result.json yet
        return "", ""


def _progress_of_training(job: SubmittedJob, text: str) -> tuple[str, str]:
    """Updates, and perplexity of validation or else of training, from a log of fairseq-train."""
    updates = ""
    train = ""
    valid = ""
    for line in filter(None, map(_LINE.match, text.splitlines())):
        # Lines of several processes may be mixed.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            stats = json.loads(line[2])
            if line[1] == "valid":
                valid = f"valid {float(stats['valid_ppl']):,.2f}"
            else:
                updates = f"{int(stats['num_updates'])}/{job.updates or '?'}"
                train = f"train {float(stats['ppl']):,.2f}"
    return updates, valid or train


def _last_attempt(status: JobStatus, log: Path) -> str:
    """The part of a training's log that its last attempt has written; "" if nothing yet."""
    early = status.root or status.state in ("waiting", "queued", "requeued", queue.NEVER)
    if status.state == "running" and status.job.log:
        with contextlib.suppress(OSError):  # a new attempt writes to its SLURM job's log first
            early = status.job.log.stat().st_mtime > log.stat().st_mtime
    return "" if early else queue.tail(log).rpartition("\n$ ")[2]


def parser() -> Parser:
    status_parser = Parser(
        prog="alma status", usage="%(prog)s RUN...", description=_ABOUT, epilog=_STATES
    )
    status_parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    return status_parser


@command
def main() -> None:
    options = parser().parse_args()
    from slurm.lm.local import state_of  # imports much, so the options are checked first

    runs = queue.find(options.runs)
    launched: list[Path] = []
    local: list[JobStatus] = []
    damaged: list[UserError] = []
    for run in runs:
        try:
            if queue.on_cluster(run):
                queue.read_jobs(run)
                launched.append(run)
            else:
                local.append(state_of(run))
        except UserError as error:
            damaged.append(error)
    if damaged and not launched and not local:
        raise damaged[0]
    seen = [*queue.look(launched), *local]
    print(f"{table(seen)}\n{queue.count(seen)}")
    for problem in damaged:
        say(f"left out: {problem}")
    failed = any(status.state in queue.BAD for status in seen)
    sys.exit(1 if failed or damaged else 0)
