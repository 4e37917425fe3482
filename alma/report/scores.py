"""Runs shown by another number than their metric: bits per byte, or a score of `alma train --evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alma.errors import UserError, hint
from alma.records import Run

BITS = "bits-per-byte"  # name of bits per byte of the test text; other names are those of scores


@dataclass
class Scored(Run):
    """A run whose rows have the number `name` as `value`; rows without it are left out."""

    name: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As `Run.rows`, without what is about the run's own metric."""
        rows = []
        for row, numbers in ((row, numbers_of(row)) for row in super().rows):
            if self.name in numbers:
                extra = {
                    key: row["extra"][key] for key in ("experts", "members") if key in row["extra"]
                }
                rows.append(
                    row | {"metric": self.name, "value": numbers[self.name], "extra": extra}
                )
        return rows


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by which `scored` can show it."""
    bits = row["extra"].get("bits_per_byte")
    return row["extra"].get("scores", {}) | ({} if bits is None else {BITS: bits})


def scored(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs that have the number `name`, shown by it. UserError: none has.

    With bits per byte, streams of the same test text are one data set, so that tokenizers can be
    compared: of several streams, a run without a name has that of its stream.
    """
    found: list[Run] = []
    known: set[str] = set()
    several = len({run.config.get("stream_sha256") for run in runs}) > 1
    for run in runs:
        known |= {number for row in run.rows for number in numbers_of(row)}
        with_it = [row for row in run.rows if name in numbers_of(row)]
        if with_it:
            config = run.config
            if name == BITS:
                words, size = (with_it[0]["extra"].get(key) for key in ("words", "bytes"))
                named = {"name": config["stream"]} if several and "stream" in config else {}
                text = f"{words:,} words, {size:,} bytes" if words and size else "text"
                config = {**named, **config, "stream": text, "stream_sha256": text}
            found.append(Scored(run.directory, run.info | {"config": config}, name=name))
    if not found:
        raise UserError(f"--metric {name}: no run has it; {hint(name, sorted(known))}")
    return found
