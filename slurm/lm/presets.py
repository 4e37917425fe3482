"""Presets of language models: the options that `alma train --preset NAME` sets."""

from collections.abc import Mapping
from typing import Any

from alma.learners import LEARNERS
from alma.presets import compatible, contradicts_replay
from alma.protocol import SCHEDULES

PRESETS = ("paper", "anytime")
"""Of `paper` the options are the defaults."""
ANYTIME: dict[str, Any] = {"schedule": "continuous", "average": "poly:8", "replay_share": 0.5}
"""Options of --preset anytime: what paid in docs/results/average.md. They were chosen without a
search."""


def with_preset(preset: str | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The `chosen` options, with those of the preset that are not chosen and do not contradict
    them."""
    values = ANYTIME if preset == "anytime" else {}
    return compatible(values, chosen, _contradicts) | dict(chosen)


def _contradicts(name: str, options: Mapping[str, Any]) -> bool:
    """Whether an option of ANYTIME contradicts the other `options`, or would have no effect.

    A learner that trains new models in every stage has no schedule and no average over the stages.
    """
    if name == "schedule" and options.get("engine"):  # which has no schedule over all stages
        return True
    if name == "schedule":
        is_new = options.get("from_scratch") or LEARNERS[options["learner"]].fresh
        return bool(is_new) or options.get("grow_optimizer") == "reset"
    if name == "average":
        return options.get("schedule", SCHEDULES[0]) == SCHEDULES[0]
    return contradicts_replay(name, options)
