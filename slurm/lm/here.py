"""Where a run is that was launched on this machine: by its lock, its markers, and its logs."""

import os
from pathlib import Path

from alma.files import holder
from alma.records import Run
from alma.stages import stages
from slurm.engine.children import last_problem
from slurm.engine.queue import Status, Unit, tail
from slurm.lm.stage import RESULT, TRAINED, UNTRAINED

_MARKERS = {"untrained.log": UNTRAINED, "train.log": TRAINED, "eval.log": RESULT}
"""What is complete when a log ends well."""


def state_of(directory: Path) -> Status:
    """The state of a local run, as slurm.status documents it. UserError as of `Run.read`."""
    run = Run.read(directory)
    rows, end = run.rows, run.config["megabatches"]
    t = rows[-1]["t"] if rows else 0
    unit = Unit(
        run=directory,
        name=f"mega-batch {t} of {end}",
        kind="run",
        directory=directory,
        marker=run.results,
        updates=None,
        job=None,
        log=None,
        needs=(),
    )
    logs = _logs(directory)
    if who := holder(directory):
        return Status(unit, "running", why=who, log=next(iter(logs), None))
    schedule = stages(end, run.config["waiting_time"], run.config["replay"])
    asked = min(run.info.get("stages", len(schedule)), len(schedule))
    if rows and t >= schedule[asked - 1].last:
        return Status(unit, "done", why="" if t == end else f"{asked} of {len(schedule)} stages asked for")
    for log in logs:
        failed = None if log.with_name(_MARKERS[log.name]).exists() else last_problem(_last_attempt(log))
        if failed:
            return Status(unit, "failed", why=failed[1], log=log)
    return Status(unit, "stopped", why="the same command goes on with it", log=next(iter(logs), None))


def _logs(directory: Path) -> list[Path]:
    """What the run's children printed, the latest first."""
    logs = [path for name in _MARKERS for path in directory.rglob(name)]
    return sorted(logs, key=lambda log: os.stat(log).st_mtime, reverse=True)


def _last_attempt(log: Path) -> str:
    """What the last child printed; those before it may have failed for a reason that is mended."""
    return tail(log).rpartition("\n$ ")[2]
