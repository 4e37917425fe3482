"""Select hyper-parameters by validation score, never by test score (paper, section 3.1)."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from alma.configs import canonical, flatten
from alma.errors import UserError, hint
from alma.records import Run
from alma.report import labels
from alma.report.results import Result, group, labelled, trained, validation

CHOOSABLE = ("replay_share", "replay_from", "from_scratch", "update_multiplier")
"""Settings that are chosen only on request (`choose`); otherwise each value is reported."""
_FIXED = (
    "learner",
    "waiting_time",
    "replay",
    "dataset",
    "data",
    "scenario",
    "partition",
    "stream_sha256",
    "megabatch_sha256",
    "context_window",
)
"""Settings that are never chosen, since they define the experiment: learner, waiting, data, ..."""
SELECTIONS = {"valid": "", "valid-first": " after the first stage"}
"""Values of --select, each with its addition to the name of the score in messages."""


def best_by_validation(
    runs: Sequence[Run], select: str, hold: Sequence[str] = (), choose: Sequence[str] = ()
) -> tuple[list[Run], list[str]]:
    """Keep only the best configuration of each experiment.

    An experiment is a combination of learner, waiting time, replay, B and data, and of the settings
    named in `hold`. Configurations that differ in other settings are its candidates. The settings
    CHOOSABLE also define the experiment, unless they are in `choose`.

    Returns the runs that are kept, and a line per choice, which names every configuration that is
    left out. A score is the validation metric, averaged over seeds and over the t since the first
    stage that all candidates have; with `select` "valid-first", only the first of these t counts,
    as in the paper. Raises UserError if a candidate has no validation score, candidates share no t,
    or no run has a setting of `hold`.
    """
    tables = group(runs)
    chosen = [name.replace("-", "_") for name in choose]
    for name in chosen:
        if name not in CHOOSABLE:
            raise UserError(
                f"--choose {name}: {hint(name, CHOOSABLE)}; other settings are chosen without it"
            )
    fixed = [*_FIXED, *(name for name in CHOOSABLE if name not in chosen)]
    settings = dict.fromkeys(
        name for table in tables for result in table for name in flatten(result.config)
    )
    # Settings by the name that --hold uses, such as lr for --lr.
    by_flag = {name.removeprefix("--").replace("_", "-"): name for name in settings}
    for name in hold:
        if name.replace("_", "-") not in by_flag:
            raise UserError(f"--hold {name}: no run has this setting; {hint(name, by_flag)}")
        fixed.append(by_flag[name.replace("_", "-")])
    dropped: set[str] = set()
    lines = []
    for table in tables:
        experiments: dict[str, list[Result]] = {}
        for result in table:
            experiments.setdefault(_experiment(result, fixed), []).append(result)
        plain = []  # for each experiment, a result with its fixed settings only, to get its label
        for first, *_ in experiments.values():
            config = flatten(first.config)
            plain.append(
                replace(first, config={name: config[name] for name in fixed if name in config})
            )
        names = {_experiment(result, fixed): result.label for result in labelled(plain)}
        for experiment, candidates in experiments.items():
            ranked = _ranked(candidates, select)
            dropped |= {canonical(flatten(result.config), "seed") for result, _ in ranked[1:]}
            if len(ranked) > 1:
                lines.append(_choice(names[experiment], ranked, select, fixed))
    return [run for run in runs if canonical(flatten(run.config), "seed") not in dropped], lines


def _experiment(result: Result, fixed: Sequence[str]) -> str:
    config = flatten(result.config)
    return json.dumps([config.get(name) for name in fixed])


def _ranked(candidates: Sequence[Result], select: str) -> list[tuple[Result, float]]:
    """Candidates with their scores, best (lowest) first; those without a complete stage last."""
    ready = [result for result in candidates if trained(result.repeats[0])]
    for result in ready:
        if not all(map(validation, result.repeats)):
            raise UserError(
                f"--select {select}: {result.label} has no validation score: leave it out"
            )
    shared = (
        set.intersection(*(set(trained(result.repeats[0])) for result in ready)) if ready else set()
    )
    if ready and not shared:
        names = "; ".join(result.label for result in ready)
        raise UserError(
            f"--select {select}: no t since the first stage is common to {names}: "
            "continue these runs"
        )
    scored = sorted(shared)[:1] if select == "valid-first" else sorted(shared)
    ranked = []
    for result in ready:
        scores = map(validation, result.repeats)
        mean = statistics.fmean(
            statistics.fmean(map(of_run.__getitem__, scored)) for of_run in scores
        )
        ranked.append((result, result.display.factor * mean))
    ranked.sort(key=lambda pair: (math.isnan(pair[1]), pair[1]))
    return ranked + [(result, math.inf) for result in candidates if not trained(result.repeats[0])]


def _choice(
    experiment: str, ranked: Sequence[tuple[Result, float]], select: str, fixed: Sequence[str]
) -> str:
    """The line about a choice: the number of configurations, the best, the others, all scores."""
    configs = [flatten(result.config) for result, _ in ranked]
    names = labels.distinguishing(configs, [*fixed, "seed", "megabatches"])
    texts = []
    for config, (_, score) in zip(configs, ranked, strict=True):
        shown = "no stage complete" if score == math.inf else f"{score:.2f}"
        texts.append(f"{labels.describe(config, names) or 'none'} ({shown})")
    score_name = f"validation {ranked[0][0].display.name}{SELECTIONS[select]}"
    best = f"best of {len(ranked)} by {score_name}: {experiment}: {texts[0]}"
    return f"{best}; left out: {', '.join(texts[1:])}"
