"""Repeats: the runs of one configuration, and which of them count."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from alma.records import Run
from alma.report.raw import Raw
from alma.stages import stages

Rows = dict[int, dict[str, Any]]  # the rows of one run by t


class Repeat(NamedTuple):
    """A run with its rows."""

    run: Run
    rows: Rows

    @property
    def finished(self) -> bool:
        """Whether it has the rows of all requested stages."""
        return progress(self.rows) >= end_of(self.run)


def one_per_seed(repeats: Iterable[Repeat], until: float) -> tuple[list[Repeat], list[str]]:
    """The repeats that count, seeds ascending, and a line for each run that does not.

    Of several runs with the same seed, the one with the most rows counts, then the first; the
    others are copies of it, or have slightly other numbers, such as from another machine. If some
    seeds are finished, an unfinished one counts only if it has the same rows, or those up to
    `until`.
    """
    counted: dict[int, Repeat] = {}
    left_out = []
    for repeat in sorted(repeats, key=lambda repeat: -len(repeat.rows)):
        run, rows = repeat
        first = counted.setdefault(run.config["seed"], repeat)
        # Runs that differ only in --average have the same raw weights, so no line reports a copy.
        if first is repeat or isinstance(run, Raw):
            continue
        common = rows.keys() & first.rows.keys()
        if all(rows[t]["value"] == first.rows[t]["value"] for t in common):
            difference = "a copy of"
        else:
            difference = "the same settings and seed but other numbers than"
        counting = first.run.directory
        left_out.append(f"left out: {run.directory}, {difference} {counting}, which counts")
    finished = [progress(repeat.rows) for repeat in counted.values() if repeat.finished]
    needed = min(max(finished, default=0), until)
    for seed, (run, rows) in list(counted.items()):
        last = progress(rows)
        if last < needed:
            del counted[seed]
            place = f"at t={last} of {run.config['megabatches']}"
            left_out.append(f"left out: {run.directory}, {place}, beside finished seeds")
    return [counted[seed] for seed in sorted(counted)], left_out


def end_of(run: Run) -> int:
    """The t of its last requested stage; of a run that waits for a training, of its last row."""
    if run.is_tested_ahead:
        return run.rows[-1]["t"]
    schedule = stages(run.config["megabatches"], run.config["waiting_time"])
    return schedule[: run.info.get("stages")][-1].last


def progress(rows: Rows) -> int:
    """The last t up to which there are all rows."""
    return next(t for t in itertools.count(min(rows)) if t + 1 not in rows)
