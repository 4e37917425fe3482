"""The raw weights of runs with `--average`, as runs of their own.

Such a run is tested twice after each stage, with the averaged weights (`value`) and with the raw
ones (`extra.raw`). Training continues from the raw weights: their numbers are those of a run
without `--average`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from alma import metrics
from alma.records import Run

_OF_THE_AVERAGE = {"raw", "valid", "nll", "perplexity_per_word", "bits_per_byte", "scores"}
_OF_THE_AVERAGE |= {"expert_layers", "matrix", "matrix_experts"}
"""Fields of `extra` that describe the averaged weights; rows of the raw weights leave them out."""


@dataclass
class Raw(Run):
    """The raw weights of a run with `--average`, in its directory; the config has no `average`."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows with the raw metric as `value`.

        The untrained model has one set of weights, and keeps its row. A trained row without a raw
        metric is left out.
        """
        rows = []
        for row in super().rows:
            raw = row["extra"].get("raw")
            if raw:
                extra = _extra_of_raw(row, raw)
                rows.append(row | {"value": raw[row["metric"]], "extra": extra})
            elif row["stage"] is None:
                rows.append(row)
        return rows


def _extra_of_raw(row: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` of a row of the raw weights."""
    averaged = row["extra"]
    extra = {name: field for name, field in averaged.items() if name not in _OF_THE_AVERAGE}
    extra |= {name: raw[name] for name in ("matrix", "valid") if name in raw}
    value = raw[row["metric"]]
    words = averaged.get("words")
    tokens = averaged.get("tokens")
    if row["metric"] == "perplexity" and words and tokens and value:
        nll = math.log(value) * tokens
        extra["perplexity_per_word"] = metrics.perplexity(nll / words)
        size = averaged.get("bytes")
        if size:
            extra["bits_per_byte"] = metrics.bits_per_byte(nll, size)
    return extra


def raw_runs(runs: Iterable[Run]) -> list[Run]:
    """The raw weights of the runs with `--average`, as runs.

    Runs that differ only in `--average` have the same raw weights, which are returned once.
    """
    raw: list[Run] = []
    for run in runs:
        if "average" in run.config and any(row["extra"].get("raw") for row in run.rows):
            config = {name: value for name, value in run.config.items() if name != "average"}
            raw.append(Raw(run.directory, run.info | {"config": config}))
    return raw
