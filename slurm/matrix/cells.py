"""Cells of a matrix: the value of a model on a period, each in a file of its own."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from alma.errors import UserError
from alma.files import atomic_write, read_file, write_json_atomic
from alma.metrics import bits_per_byte
from alma.schema import AMOUNT, COUNT, NUMBER, TEXT, parse_json
from alma.tables import Table
from slurm.matrix.models import TestedModel
from slurm.matrix.periods import PeriodData

BITS_PER_BYTE = "bits_per_byte"


class MeasuredCell(msgspec.Struct, frozen=True):
    """The value of a model on the records of a period, as its file has it."""

    period: TEXT
    data: TEXT  # SHA-256 of the records
    value: NUMBER  # the loss in nats a token, or another metric
    count: COUNT  # of tokens, or of what the value is a mean of
    seconds: AMOUNT  # of the evaluation


class CellStore(NamedTuple):
    """The cells of one model, in a folder whose name has the model, its files and the program."""

    folder: Path

    def file(self, period: PeriodData) -> Path:
        """The file of a cell; records that change have another one."""
        return self.folder / f"{period.name}-{period.sha256[:12]}.json"

    def read(self, period: PeriodData) -> MeasuredCell | None:
        """A cell; None: not measured. UserError: its file is damaged."""
        file = self.file(period)
        if not file.exists():
            return None
        try:
            cell = msgspec.convert(parse_json(read_file(file)), MeasuredCell)
        except ValueError as error:
            raise UserError(f"{file}: damaged ({error}): delete it and rerun") from None
        if (cell.period, cell.data) != (period.name, period.sha256):
            raise UserError(f"{file}: of other records: delete it and rerun")
        return cell

    def write(self, period: PeriodData, value: float, count: int, seconds: float) -> None:
        """Write a cell, atomically."""
        cell = MeasuredCell(period.name, period.sha256, value, count, seconds)
        write_json_atomic(self.file(period), msgspec.to_builtins(cell))

    def remove(self, periods: Sequence[PeriodData]) -> None:
        """Remove the cells of these periods."""
        for period in periods:
            self.file(period).unlink(missing_ok=True)

    def missing(self, periods: Sequence[PeriodData]) -> list[PeriodData]:
        """The periods whose cells are not measured."""
        return [period for period in periods if not self.file(period).exists()]


class ModelRow(NamedTuple):
    """The cells of a model, on all periods in their order."""

    model: TestedModel
    periods: Sequence[PeriodData]
    cells: Sequence[MeasuredCell]
    in_bits: bool  # whether the values are nats a token, shown as bits a byte

    @property
    def values(self) -> list[float]:
        """The values of the metric."""
        if not self.in_bits:
            return [cell.value for cell in self.cells]
        return [
            bits_per_byte(cell.value * cell.count, period.bytes)
            for cell, period in zip(self.cells, self.periods, strict=True)
        ]


def write_matrix(rows: Sequence[ModelRow], column: str, out: Path) -> None:
    """Write the CSV file that `alma advise --matrix` reads, atomically."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "trained_until", "tested_on", column])
    for row in rows:
        for period, value in zip(row.periods, row.values, strict=True):
            line = [row.model.group, row.model.cutoff.period, period.name, f"{value:.6g}"]
            writer.writerow(line)
    with atomic_write(out, keep_same=True) as file:
        file.write(text.getvalue())


def summary(rows: Sequence[ModelRow], column: str) -> Table:
    """A line for each model: its value on its own period, on the newest and on average."""
    newest = rows[0].periods[-1].name
    counted = "tokens" if rows[0].in_bits else "count"
    table = [["model", "trained until", "own period", newest, f"mean {column}", counted, "seconds"]]
    for row in rows:
        by_period = {
            period.name: value for period, value in zip(row.periods, row.values, strict=True)
        }
        on_own_period = by_period.get(row.model.cutoff.period)
        line = [row.model.name, row.model.cutoff.period]
        line.append("" if on_own_period is None else f"{on_own_period:.4g}")
        line.append(f"{by_period[newest]:.4g}")
        line.append(f"{sum(row.values) / len(row.values):.4g}")
        line.append(f"{sum(cell.count for cell in row.cells):,}")
        line.append(f"{sum(cell.seconds for cell in row.cells):.1f}")
        table.append(line)
    return table
