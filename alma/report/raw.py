"""The raw weights of runs with `--average`, as runs of their own.

Such a run is tested twice after each stage, with the averaged weights (`value`) and with the raw
ones (`extra.raw`). Training continues from the raw weights: their numbers are those of a run
without `--average`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from alma import metrics
from alma.records import Run

_OF_THE_AVERAGE = {"raw", "valid", "nll", "perplexity_per_word", "bits_per_byte", "scores"}
_OF_THE_AVERAGE |= {"expert_layers", "matrix", "matrix_experts"}
"""Fields of `extra` that are about the averaged weights, or hold both."""


@dataclass
class Raw(Run):
    """The raw weights of the run with `--average` in the same directory: its config has no `average`."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows with the raw metric as `value`.

        The untrained model has one set of weights, and keeps its row. A trained row without a raw
        metric is left out.
        """
        rows = []
        for row in super().rows:
            extra, raw = row["extra"], row["extra"].get("raw")
            if raw:
                value = raw[row["metric"]]
                known = {
                    name: field for name, field in extra.items() if name not in _OF_THE_AVERAGE
                }
                known |= {name: raw[name] for name in ("matrix", "valid") if name in raw}
                words, tokens = extra.get("words"), extra.get("tokens")
                if row["metric"] == "perplexity" and words and tokens and value:
                    nll = math.log(value) * tokens
                    known["perplexity_per_word"] = metrics.perplexity(nll / words)
                    if size := extra.get("bytes"):
                        known["bits_per_byte"] = metrics.bits_per_byte(nll, size)
                rows.append(row | {"value": value, "extra": known})
            elif row["stage"] is None:
                rows.append(row)
        return rows


def raw_runs(runs: Iterable[Run]) -> list[Run]:
    """The raw weights of each run with `--average`; runs that differ only in it have the same ones."""
    found: list[Run] = []
    for run in runs:
        if "average" in run.config and any(row["extra"].get("raw") for row in run.rows):
            config = {name: value for name, value in run.config.items() if name != "average"}
            found.append(Raw(run.directory, run.info | {"config": config}))
    return found
