"""Select hyper-parameters by validation score, never by test score, as section 3.1 of the paper requires.

python -m alma.report RUNS --select valid
python -m alma.report RUNS --select valid-first
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from alma.configs import canonical, flatten
from alma.errors import UserError
from alma.records import Run
from alma.report import labels
from alma.report.results import Result, group, trained, validation

_PROTOCOL = (
    *("learner", "waiting_time", "replay", "from_scratch", "update_multiplier", "context_window"),
    *("dataset", "data", "partition", "stream_sha256", "megabatch_sha256"),
    *("replay_share", "replay_from"),
    *("schedule", "average"),
)
"""Settings that define the experiment: learner, schedule, budget, data. All others are hyper-parameters."""


SELECTIONS = {"valid": "", "valid-first": " after the first stage"}
"""Values of --select, and what they add to the name of the score."""


def best_by_validation(runs: Sequence[Run], select: str) -> tuple[list[Run], list[str]]:
    """Keep the best configuration for each learner, waiting time, replay, B and data.

    Returns the runs that are kept, and a line per choice. Scores are means over seeds and over the t since
    the first stage that all candidates share; with "valid-first" only the first of these t counts, as in the
    paper. UserError: a candidate has no validation score, or candidates share no t.
    """
    dropped: set[str] = set()
    lines = []
    for table in group(runs):
        experiments: dict[str, list[Result]] = {}
        for result in table:
            key = json.dumps([result.config.get(name) for name in _PROTOCOL])
            experiments.setdefault(key, []).append(result)
        for candidates in experiments.values():
            ranked = _ranked(candidates, select)
            dropped |= {canonical(result.config, "seed") for result, _ in ranked[1:]}
            lines += [_choice(ranked, select)] if len(ranked) > 1 else []
    return [run for run in runs if canonical(run.config, "seed") not in dropped], lines


def _ranked(candidates: Sequence[Result], select: str) -> list[tuple[Result, float]]:
    """Candidates with their scores, best (lowest) first; those without a complete stage last."""
    ready = [result for result in candidates if trained(result.repeats[0])]
    for result in ready:
        if not all(map(validation, result.repeats)):
            raise UserError(
                f"--select {select}: {result.label} has no validation score, as older runs: run it again, "
                "or leave it out"
            )
    shared = set.intersection(*(set(trained(result.repeats[0])) for result in ready)) if ready else set()
    if ready and not shared:
        names = "; ".join(result.label for result in ready)
        raise UserError(
            f"--select {select}: no t since the first stage is common to {names}: continue these runs"
        )
    scored = sorted(shared)[:1] if select == "valid-first" else sorted(shared)

    def score(result: Result) -> float:
        mean, _ = result.over_seeds(lambda rows: statistics.fmean(validation(rows)[t] for t in scored))
        return result.display.factor * mean

    ranked = sorted([(result, score(result)) for result in ready], key=lambda pair: pair[1])
    return ranked + [(result, math.inf) for result in candidates if not trained(result.repeats[0])]


def _choice(ranked: Sequence[tuple[Result, float]], select: str) -> str:
    """The line about a choice: how many configurations there were, the best, the others, and all scores."""
    configs = [flatten(result.config) for result, _ in ranked]
    names = labels.distinguishing(configs, labels.ALWAYS_SHOWN - {"name"})
    told = [
        f"{labels.describe(config, names)} ({'no stage complete' if score == math.inf else f'{score:.2f}'})"
        for config, (_, score) in zip(configs, ranked, strict=True)
    ]
    best = ranked[0][0]
    experiment = replace(best, config=best.config | {"name": None}, settings="").label
    score_name = f"validation {best.display.name}{SELECTIONS[select]}"
    return f"best of {len(ranked)} by {score_name}: {experiment}: {told[0]}; left out: {', '.join(told[1:])}"
