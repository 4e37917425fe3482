"""Show runs by another number than their metric.

The number is bits per byte, or a score of `alma train --evaluate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alma.errors import UserError, hint
from alma.records import Run

BITS = "bits-per-byte"  # name of bits per byte of the test text; other names are those of scores


@dataclass
class Scored(Run):
    """A run that is shown by the number `name`: it replaces the metric in every row.

    Rows without the number are left out.
    """

    name: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As `Run.rows`, with the number as `value`, and without fields about the run's metric."""
        rows = []
        for row in super().rows:
            numbers = numbers_of(row)
            if self.name not in numbers:
                continue
            extra = {}
            for key in ("experts", "members"):
                if key in row["extra"]:
                    extra[key] = row["extra"][key]
            value = numbers[self.name]
            rows.append(row | {"metric": self.name, "value": value, "extra": extra})
        return rows


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by which `scored` can show it."""
    bits = row["extra"].get("bits_per_byte")
    return row["extra"].get("scores", {}) | ({} if bits is None else {BITS: bits})


def scored(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs that have the number `name`, as `Scored` runs. Raises UserError if none has.

    With bits per byte, streams with the same test text count as one data set, so that tokenizers
    can be compared. If there are several streams, a run without a name is named after its stream.
    """
    with_number: list[Run] = []
    names: set[str] = set()
    several_streams = len({run.config.get("stream_sha256") for run in runs}) > 1
    for run in runs:
        for row in run.rows:
            names |= numbers_of(row).keys()
        rows = [row for row in run.rows if name in numbers_of(row)]
        if rows:
            config = run.config
            if name == BITS:
                config = _by_test_text(config, rows[0]["extra"], several_streams)
            with_number.append(Scored(run.directory, run.info | {"config": config}, name=name))
    if not with_number:
        raise UserError(f"--metric {name}: no run has it; {hint(name, sorted(names))}")
    return with_number


def _by_test_text(config: dict[str, Any], extra: Mapping[str, Any], named: bool) -> dict[str, Any]:
    """The config with the test text as its data instead of the stream.

    If `named`, the run is named after its stream.
    """
    words = extra.get("words")
    size = extra.get("bytes")
    text = f"{words:,} words, {size:,} bytes" if words and size else "text"
    name = {"name": config["stream"]} if named and "stream" in config else {}
    return {**name, **config, "stream": text, "stream_sha256": text}
