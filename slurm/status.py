"""Where runs are: a line for each unit of those on a cluster, and for each local run.

python -m slurm.status RUN... [--watch [SECONDS]]

state            a unit of a run on a cluster             a local run
done             its marker is there                      all stages asked for have their rows
running          SLURM says so                            a process holds its lock
queued           waits for resources                      -
waiting          waits for a unit that it needs           -
requeued         ran before, and is in the queue again    -
failed           its job ended without its marker         its last log ends with an error
stopped          -                                        none of the others: killed, or Ctrl-C
cancelled        by somebody, or what it needs failed     -
lost             SLURM does not know its job any more     -
never submitted  it has no job                            -

Exit code 0: all is done or on its way (down to `requeued`); 1: something is not.
"""

import json
import math
import os
import re
import shutil
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from alma.errors import Parser, UserError, command
from alma.records import Run
from alma.report.tables import as_text
from slurm.engine.queue import BAD, MOVING, Status, Unit, count, find, look, on_cluster, tail, watch
from slurm.lm.here import state_of

SECONDS = 10.0  # between two looks of --watch
HEADER = ["run", "unit", "state", "job", "node", "updates", "perplexity", "ETA"]
_LINE = re.compile(r".* \| (train_inner|valid) \| (\{.*\})$")

Line = tuple[list[str], str]
"""Cells under HEADER, and what follows them: log and error."""


@dataclass(frozen=True)
class Progress:
    """How far a training is, as the end of its log tells."""

    updates: int | None = None
    speed: float = 0.0  # updates a second
    perplexity: str = ""
    """The latest on the validation set, else that of the last training batches."""

    @classmethod
    def read(cls, log: Path) -> "Progress":
        """What the log tells; empty where there is none."""
        updates, speed, trained, valid = None, 0.0, "", ""
        for line in tail(log).splitlines():
            found = _LINE.match(line)
            try:
                stats = json.loads(found[2]) if found else {}
                if found and found[1] == "valid":
                    valid = f"valid {float(stats['valid_ppl']):,.2f}"
                elif found:
                    updates, speed = int(stats["num_updates"]), float(stats.get("ups", 0))
                    trained = f"train {float(stats['ppl']):,.2f}"
            except (ValueError, KeyError, TypeError):  # lines of several processes run together
                continue
        return cls(updates, speed, valid or trained)

    def eta(self, total: int | None) -> str:
        """The time until all updates are done; empty where it cannot be told."""
        if self.updates is None or total is None or not 0 < self.speed < math.inf:
            return ""
        return tqdm.format_interval(max(0, total - self.updates) / self.speed)


def lines(seen: Sequence[Status]) -> list[Line]:
    """The table's lines of units."""
    made = []
    for status in seen:
        unit = status.unit
        training = unit.kind == "train" and status.state != "waiting"
        progress = Progress.read(unit.own_log) if training and unit.own_log else Progress()
        updates = "" if progress.updates is None else f"{progress.updates}/{unit.updates or '?'}"
        eta = progress.eta(unit.updates) if status.state == "running" else ""
        perplexity = progress.perplexity if training else _result(unit)
        cells = [
            str(unit.run),
            unit.name,
            status.state,
            unit.job or "",
            status.node,
            updates,
            perplexity,
            eta,
        ]
        made.append((cells, _remark(status)))
    return made


def table(made: Sequence[Line]) -> str:
    """The table for a terminal."""
    columns = list(zip(HEADER, *(cells for cells, _ in made), strict=True))
    for i, column in enumerate(columns[: HEADER.index("updates")]):
        width = max(map(len, column))
        columns[i] = tuple(cell.ljust(width) for cell in column)  # words to the left, numbers to the right
    text = as_text([list(cells) for cells in zip(*columns, strict=True)]).splitlines()
    remarks = ["log", *(remark for _, remark in made)]
    return "\n".join(f"{line}  {remark}".rstrip() for line, remark in zip(text, remarks, strict=True))


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m slurm.status", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    made.add_argument("runs", nargs="*", metavar="RUN", help="a run directory, or a folder that holds some")
    made.add_argument(
        "--watch",
        nargs="?",
        const=str(SECONDS),
        metavar="SECONDS",
        help=f"look again every SECONDS (default: {SECONDS:g}) until all is done or nothing moves any more",
    )
    return made


def _result(unit: Unit) -> str:
    """The perplexity that an evaluation measured, or the last of a local run."""
    if unit.kind == "run":
        last = Run.read(unit.run).rows[-1:]
        return f"{last[0]['value']:,.2f}" if last and last[0]["metric"] == "perplexity" else ""
    try:
        return f"{json.loads(unit.marker.read_bytes())['perplexity']:,.2f}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remark(status: Status) -> str:
    """The log and what went wrong; of what has not started yet, what it waits for."""
    unit = status.unit
    log = status.log or ((unit.own_log or unit.log) if status.state in ("running", "done") else None)
    return ": ".join(filter(None, (_short(log) if log else "", status.why)))


def _short(path: Path) -> str:
    """The path as it is from here, if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def _show(seen: Sequence[Status]) -> str:
    """The table and a line that counts; of the finished units no more than a terminal has room for."""
    made = lines(seen)
    room = shutil.get_terminal_size().lines - 4 if sys.stdout.isatty() else len(made)
    if len(made) > room:
        made = [line for line in made if line[0][HEADER.index("state")] != "done"]
    return f"{table(made)}\n{count(seen)}"


def _looks(launched: Sequence[Path], local: Sequence[Path], seconds: float) -> Iterator[list[Status]]:
    """What `watch` sees, with the local runs; goes on while one of these is running."""
    for seen in watch(launched, seconds):
        here = [state_of(run) for run in local]
        yield [*seen, *here]
    while any(status.state in MOVING for status in here):
        time.sleep(seconds)
        here = [state_of(run) for run in local]
        yield [*seen, *here]


def _read_words() -> tuple[list[str], float | None]:
    """Runs, and seconds between looks if --watch was given."""
    given = parser().parse_intermixed_args()
    runs, seconds = given.runs, given.watch
    try:
        every = None if seconds is None else float(seconds)
    except ValueError:  # --watch RUN
        runs, every = [seconds, *runs], SECONDS
    if every is not None and not 0 < every < math.inf:
        raise UserError(f"--watch {seconds}: give seconds, more than 0")
    if not runs:
        raise UserError("give run directories; see `python -m slurm.status --help`")
    return runs, every


@command
def main() -> None:
    """Entry point of `python -m slurm.status`."""
    words, seconds = _read_words()
    runs = find(words)
    launched = [run for run in runs if on_cluster(run)]
    local = [run for run in runs if not on_cluster(run)]
    seen: list[Status] = []
    if seconds is None:
        seen = [*look(launched), *map(state_of, local)]
        print(_show(seen))
    else:
        before = ""
        try:
            for seen in _looks(launched, local, seconds):
                now = _show(seen)
                if sys.stdout.isatty():
                    print(f"\x1b[H\x1b[2J{now}", flush=True)  # from the top of an empty screen
                elif now != before:
                    print(f"{before and chr(10)}{now}", flush=True)
                before = now
        except KeyboardInterrupt:
            print()
    sys.exit(1 if any(status.state in BAD for status in seen) else 0)


if __name__ == "__main__":
    main()
