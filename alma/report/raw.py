"""The raw weights of runs with `--average`, as runs of their own.

Such a run is tested twice after each stage, with the averaged weights (`value`) and with the raw ones
(`extra.raw`). Training continues from the raw weights, so that their numbers are those of the same run
without `--average`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alma import metrics
from alma.configs import canonical
from alma.records import Run

_OF_THE_AVERAGE = {"raw", "valid", "nll", "perplexity_per_word", "bits_per_byte"}
_OF_THE_AVERAGE |= {"expert_layers", "matrix", "matrix_experts"}
"""Fields of `extra` that are about the averaged weights, or hold both."""


@dataclass
class Raw(Run):
    """The raw weights of the run with `--average` in the same directory: its config has no `average`."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows with the raw metric as `value`. A row without one is left out if the model is trained."""
        return [_raw(row) for row in super().rows if row["extra"].get("raw") or row["stage"] is None]


def raw_runs(runs: Sequence[Run]) -> list[Run]:
    """The raw weights of each run with `--average`, unless `runs` has the same settings and seed without it.

    Of several runs that differ only in `average`, which have the same raw weights, the longest counts.
    """
    seen = {canonical(run.config) for run in runs if run.rows}
    found: list[Run] = []
    averaged = [
        run for run in runs if "average" in run.config and any(r["extra"].get("raw") for r in run.rows)
    ]
    for run in sorted(averaged, key=lambda each: -len(each.rows)):
        config = {name: value for name, value in run.config.items() if name != "average"}
        if canonical(config) not in seen:
            seen.add(canonical(config))
            found.append(Raw(run.directory, run.info | {"config": config}))
    return found


def _raw(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the raw weights. The untrained model has one set of weights, and keeps its row."""
    extra = row["extra"]
    if not extra.get("raw"):
        return row
    value = extra["raw"][row["metric"]]
    known = {name: each for name, each in extra.items() if name not in _OF_THE_AVERAGE}
    known |= {name: extra["raw"][name] for name in ("matrix", "valid") if name in extra["raw"]}
    if row["metric"] == "perplexity" and extra.get("words") and extra.get("tokens") and value:
        known["perplexity_per_word"] = metrics.perplexity(math.log(value) * extra["tokens"] / extra["words"])
    return row | {"value": value, "extra": known}
