"""Choosing among configurations by validation score, so that nobody chooses on the test set (section 3.1: the
learner "can only use" validation data "to select its own hyper-parameters").

`python -m alma.report RUNS --select valid`.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from alma.errors import UserError
from alma.records import Run, flatten
from alma.report import labels
from alma.report.results import Result, configuration, group, trained, validation

_PROTOCOL = (
    *("learner", "waiting_time", "replay", "from_scratch", "update_multiplier", "context_window"),
    *("dataset", "data", "partition", "stream_sha256", "megabatch_sha256"),
)
"""Settings that make another experiment: learner, schedule, budget and data. All others are tuned."""


def select(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs of the best configuration of each learner, waiting time, replay and B, on the same data; and a
    line for each choice that names what was left out.

    Scores are means over seeds and over the t since the first stage, or over those t that all candidates
    have. UserError: a candidate's rows have no validation score, or candidates share no t.
    """
    dropped: set[str] = set()
    lines = []
    for table in group(runs):
        alike: dict[str, list[Result]] = {}
        for result in table:
            key = json.dumps([result.config.get(name) for name in _PROTOCOL])
            alike.setdefault(key, []).append(result)
        for candidates in alike.values():
            ranked = _ranked(candidates)
            dropped |= {configuration(result.config) for result, _ in ranked[1:]}
            lines += [_told(ranked)] if len(ranked) > 1 else []
    return [run for run in runs if configuration(run.config) not in dropped], lines


def _ranked(candidates: Sequence[Result]) -> list[tuple[Result, float]]:
    """The candidates with their scores, the best (lowest) first; those without a complete stage are last."""
    ready = [result for result in candidates if trained(result.repeats[0])]
    for result in ready:
        if not all(map(validation, result.repeats)):
            raise UserError(
                f"--select valid: {result.label} has no validation score in its rows (older ones have none): "
                "run it again, or leave it out"
            )
    shared = set.intersection(*(set(trained(result.repeats[0])) for result in ready)) if ready else set()
    if ready and not shared:
        names = "; ".join(result.label for result in ready)
        raise UserError(f"--select valid: no t since the first stage is in all of: {names}: let them go on")

    def score(result: Result) -> float:
        scores, _ = result.over_seeds(lambda rows: statistics.fmean(validation(rows)[t] for t in shared))
        return result.scale * scores

    ranked = sorted([(result, score(result)) for result in ready], key=lambda pair: pair[1])
    return ranked + [(result, math.inf) for result in candidates if not trained(result.repeats[0])]


def _told(ranked: Sequence[tuple[Result, float]]) -> str:
    """The line for a choice: what was chosen, what was left out, and the scores."""
    configs = [flatten(result.config) for result, _ in ranked]
    names = labels.differing(configs, labels.ALWAYS_SHOWN - {"name"})
    told = [
        f"{labels.describe(config, names)} ({'no stage complete' if score == math.inf else f'{score:.2f}'})"
        for config, (_, score) in zip(configs, ranked, strict=True)
    ]
    best = ranked[0][0]
    experiment = replace(best, config=best.config | {"name": None}, settings="").label
    return f"chosen by validation {best.unit}: {experiment}: {told[0]}; left out: {', '.join(told[1:])}"
