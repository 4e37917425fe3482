"""State of runs: a line for each job on a cluster, and for each local run: `alma status`."""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from alma.errors import Parser, command
from alma.help_texts import RUNS
from alma.records import Run
from alma.tables import as_text
from slurm.engine import queue
from slurm.engine.queue import JobStatus, SubmittedJob

SECONDS = 10.0
"""Default interval of --watch."""
HEADER = ["run", "job", "state", "job id", "node", "updates", "perplexity", "ETA", "log"]
_ABOUT = "Show the state of runs: a line for each job on a cluster, and for each run on this machine."
_STATES = """\
state            a job on a cluster                       a run on this machine
done             its marker exists                        all requested stages have rows
running          running in SLURM                         a process holds its lock
queued           waits for resources                      -
waiting          waits for a job that it needs            -
requeued         ran before, is queued again              -
failed           its SLURM job ended without its marker   its last log ends with an error
stopped          -                                        none of the others: killed, or Ctrl-C
cancelled        by a user, or a job it needs failed      -
lost             SLURM no longer knows its job id         -
never submitted  it has no job id                         -

Exit code 0: every job is done or active (running to requeued); 1: one is not.

examples:
  alma status runs
  alma status runs/gmoe --watch 60
"""
_LINE = re.compile(r".* \| (train_inner|valid) \| (\{.*\})$")


@dataclass(frozen=True)
class LoggedProgress:
    """Progress of a training, from the end of its log."""

    updates: int | None = None
    speed: float = 0.0
    perplexity: str = ""
    """Of the last validation, else of the last training batches."""

    @classmethod
    def read(cls, log: Path) -> "LoggedProgress":
        """Read a log of fairseq-train; empty if there is none."""
        updates, speed, trained, valid = None, 0.0, "", ""
        for line in queue.tail(log).splitlines():
            found = _LINE.match(line)
            try:
                stats = json.loads(found[2]) if found else {}
                if found and found[1] == "valid":
                    valid = f"valid {float(stats['valid_ppl']):,.2f}"
                elif found:
                    updates, speed = int(stats["num_updates"]), float(stats.get("ups", 0))
                    trained = f"train {float(stats['ppl']):,.2f}"
            except (ValueError, KeyError, TypeError):  # mixed lines of several processes
                continue
        return cls(updates, speed, valid or trained)

    def eta(self, total: int | None) -> str:
        """Time until `total` updates are done; empty if unknown."""
        if self.updates is None or total is None or not 0 < self.speed < math.inf:
            return ""
        return tqdm.format_interval(max(0, total - self.updates) / self.speed)


def table(seen: Sequence[JobStatus]) -> str:
    rows = [HEADER]
    for status in seen:
        job = status.job
        training = job.kind == "train" and status.state != "waiting"
        progress = LoggedProgress.read(job.own_log) if training and job.own_log else LoggedProgress()
        updates = "" if progress.updates is None else f"{progress.updates}/{job.updates or '?'}"
        eta = progress.eta(job.updates) if status.state == "running" else ""
        perplexity = progress.perplexity if training else _result(job)
        cells = [str(job.run), job.name, status.state, job.job_id or "", status.node]
        rows.append([*cells, updates, perplexity, eta, _remark(status)])
    text = as_text(rows, left=(*range(HEADER.index("updates")), -1))
    return "\n".join(map(str.rstrip, text.splitlines()))


def parser() -> Parser:
    usage = "%(prog)s RUN... [--watch [SECONDS]]"
    made = Parser(prog="python -m slurm.status", usage=usage, description=_ABOUT, epilog=_STATES)
    made.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    watch = (
        "show the state again and again until everything is done or nothing is active; SECONDS between two "
        f"looks (default: {SECONDS:g})"
    )
    made.add_argument("--watch", nargs="?", type=_seconds, const=SECONDS, metavar="SECONDS", help=watch)
    return made


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text}: give seconds, more than 0, and runs before --watch")


def _result(job: SubmittedJob) -> str:
    """Perplexity that an evaluation measured, or the last of a local run."""
    if job.kind == "run":
        last = Run.read(job.run).rows[-1:]
        return f"{last[0]['value']:,.2f}" if last and last[0]["metric"] == "perplexity" else ""
    try:
        return f"{json.loads(job.marker.read_bytes())['perplexity']:,.2f}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remark(status: JobStatus) -> str:
    """The log and the error; before the start, what the job waits for."""
    log = status.log
    if status.state in ("running", "done"):
        log = log or status.job.own_log or status.job.log
    shown = min(str(log), os.path.relpath(log), key=len) if log else ""
    return ": ".join(filter(None, (shown, status.why)))


def _show(seen: Sequence[JobStatus]) -> str:
    """The table and the counts; without finished jobs if the terminal is too small for all."""
    shown = list(seen)
    if sys.stdout.isatty() and len(shown) > shutil.get_terminal_size().lines - 4:
        shown = [status for status in seen if status.state != "done"]
    return f"{table(shown)}\n{queue.count(seen)}"


def _looks(launched: Sequence[Path], local: Sequence[Path], seconds: float) -> Iterator[list[JobStatus]]:
    """`watch` the `launched` runs together with the `local` ones, until none of them is moving."""
    from slurm.lm.local import state_of

    seen: list[JobStatus] = []
    for seen in queue.watch(launched, seconds):
        yield [*seen, *map(state_of, local)]
    while True:
        here = [state_of(run) for run in local]
        yield [*seen, *here]
        if not any(status.state in queue.MOVING for status in here):
            return
        time.sleep(seconds)


@command
def main() -> None:
    given = parser().parse_intermixed_args()
    from slurm.lm.local import state_of  # imports much, so the options are checked first

    runs = queue.find(given.runs)
    launched = [run for run in runs if queue.on_cluster(run)]
    local = [run for run in runs if not queue.on_cluster(run)]
    seen: list[JobStatus] = []
    if given.watch is None:
        seen = [*queue.look(launched), *map(state_of, local)]
        print(_show(seen))
    else:
        before = ""
        try:
            for seen in _looks(launched, local, given.watch):
                now = _show(seen)
                if sys.stdout.isatty():
                    print(f"\x1b[H\x1b[2J{now}", flush=True)  # clear the screen first
                elif now != before:
                    separator = "\n" if before else ""
                    print(separator + now, flush=True)
                before = now
        except KeyboardInterrupt:
            print()
    sys.exit(1 if any(status.state in queue.BAD for status in seen) else 0)


if __name__ == "__main__":
    main()
