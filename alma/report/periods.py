"""The periods of a stream in its runs: their names, those of the test set, cells not tested."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from alma.records import Run
from alma.report.repeats import Rows
from alma.report.results import Result, matrix


@dataclass(frozen=True)
class PeriodSpan:
    """The periods whose held-out parts the test set of a run has."""

    names: tuple[str, ...]
    """Of all periods of the stream."""
    count: int
    """Number of first periods that the test set has."""

    @property
    def whole(self) -> bool:
        """Whether it has all periods."""
        return self.count >= len(self.names)

    @property
    def text(self) -> str:
        """Such as "2024-01 to 2024-02"."""
        first = self.names[0]
        last = self.names[self.count - 1]
        return first if first == last else f"{first} to {last}"


def dated_names(result: Result) -> list[str]:
    """The names of the periods of a stream with periods, of all that a row was tested on."""
    names: list[str] = []
    for rows in result.repeats:
        for row in rows.values():
            names = max(names, row["extra"].get("matrix_periods", []), key=len)
    return names


def period_names(result: Result) -> list[str]:
    """The names of the held-out parts; "mega-batch j" on streams without periods."""
    names = dated_names(result)
    width = 0
    for rows in result.repeats:
        for row in rows.values():
            width = max(width, len(row["extra"].get("matrix", ())))
    without_name = [f"mega-batch {t}" for t in range(len(names) + 1, width + 1)]
    return [*names, *without_name]


def span_of_test_set(result: Result) -> PeriodSpan | None:
    """The periods of the test set; None of a stream that has none, or does not drift."""
    if not all(matrix(rows) for rows in result.repeats):
        return None
    names = period_names(result)
    counts = [_test_periods(run, len(names)) for run in result.runs]
    span = PeriodSpan(tuple(names), min(counts, default=len(names)))
    return span if dated_names(result) or not span.whole else None


def _test_periods(run: Run, total: int) -> int:
    """Number of first periods that the test set of a run has, of `total`."""
    recorded = run.config.get("test_periods") or run.info.get("test_periods")
    if recorded:
        return min(recorded, total)
    # An older record: the first row was written when the stream had so many periods, or more of
    # them than its test set has.
    first = run.rows_as_written[0]["extra"].get("matrix", ())
    return min(len(first) or total, total)


def arrived(result: Result) -> int:
    """The newest mega-batch that has arrived: trained on, or tested later than its row."""
    late = [evaluation["megabatch"] for run in result.runs for evaluation in run.late_evaluations]
    return min(max(result.progress, *late, 0), result.megabatches)


def holes(results: Iterable[Result]) -> list[str]:
    """A line for each configuration whose models were not tested on all held-out parts."""
    lines: dict[tuple[str, ...], str] = {}
    for result in results:
        missing = 0
        total = 0
        places: dict[str, None] = {}
        for run, rows in zip(result.runs, result.repeats, strict=True):
            count, cells = _count(rows, arrived(result))
            missing += count
            total += cells
            if count:
                places[str(run.directory)] = None
        if missing:
            first, *further_places = places
            line = (
                f"not tested: {missing} of {total} cells of the evaluation matrix of "
                f"{result.label}: `alma test {first}` tests the models whose checkpoints are there"
            )
            if further_places:
                line += f"; so for {len(further_places)} more of its runs"
            lines.setdefault(tuple(places), line)
    return list(lines.values())


def _count(rows: Rows, width: int) -> tuple[int, int]:
    """Missing cells, and all cells, of the trained models of a run, a row for each model."""
    if not matrix(rows):
        return 0, 0
    missing = 0
    total = 0
    for _, of_stage in itertools.groupby(rows.values(), key=lambda row: row["stage"]):
        row = next(of_stage)
        if row["stage"] is None:
            continue
        cells = row["extra"].get("matrix", [])
        columns = max(width, len(cells))
        measured = sum(map(math.isfinite, cells))
        missing += columns - measured
        total += columns
    return missing, total
