"""What `--preset anytime` does to options, of text and of images.

A preset gives values to options that the user did not choose. `anytime` is a recommendation: a
value that contradicts a chosen one is left out. The values themselves are in slurm/lm/presets.py
and vision/presets.py.
"""

from collections.abc import Callable, Mapping
from typing import Any


def compatible(
    values: Mapping[str, Any],
    chosen: Mapping[str, Any],
    contradicts: Callable[[str, Mapping[str, Any]], bool],
) -> dict[str, Any]:
    """The values of a preset that are not chosen and do not contradict the `chosen` ones.

    `contradicts(name, options)` says whether the value of `name` contradicts the other `options`:
    those that are chosen and the preset's values before it.
    """
    accepted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in chosen and not contradicts(name, {**accepted, **chosen, name: value}):
            accepted[name] = value
    return accepted


def contradicts_replay(name: str, options: Mapping[str, Any]) -> bool:
    """Whether `name` is a share of replay beside --replay, which trains on all mega-batches."""
    return name == "replay_share" and bool(options.get("replay"))
