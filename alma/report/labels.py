"""Short labels: the settings that distinguish the configurations of a report, such as `lr=2e-3 fp16`."""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from alma.configs import differing
from alma.options import CHANGED, options_of
from alma.protocol import TextOptions

VARIANT = frozenset({"schedule", "average", "replay_share", "replay_from"})
"""Settings that are part of a learner's name in reports, see `variants`; absent if off."""
ALWAYS_SHOWN = VARIANT | {"learner", "name", "waiting_time", "replay", "seed", "megabatches"}
"""Settings that every table and legend shows."""
_OPTIONAL = {
    name for name, option in options_of(TextOptions).items() if option.metadata["record"] == CHANGED
}
"""Settings that run.json lacks if they have their defaults."""
_CHECKSUMS = ("stream_sha256", "megabatch_sha256", "data", "init_sha256")
"""Shown only if no other setting distinguishes two configurations."""
_OF_VARIANT = ("select", "--lr-scheduler", "--total-num-update")
"""Settings that a schedule or a preset usually sets together with the variant."""


def distinguishing(
    configs: Sequence[Mapping[str, Any]], shown: Collection[str] = ALWAYS_SHOWN
) -> list[str]:
    """The settings that a label needs to distinguish flat configs, beside those `shown` elsewhere.

    A setting of only some learners is needed if it differs among them, or if another run of one of
    them lacks it; one of _OF_VARIANT, if it differs within a variant; a checksum, if nothing else
    differs.
    """

    def kinds(names: Iterable[str]) -> int:
        """Number of different combinations of the settings' values."""
        return len({json.dumps([config.get(name) for name in names]) for config in configs})

    def needed(name: str) -> bool:
        if name in _OPTIONAL or name.startswith("--"):
            return True
        having = [{name: config[name]} for config in configs if name in config]
        lacking = {config.get("learner") for config in configs if name not in config}
        return bool(differing(having)) or any(
            c.get("learner") in lacking for c in configs if name in c
        )

    follows = {name for name in _OF_VARIANT if kinds([*VARIANT, name]) == kinds([*VARIANT])}
    # `flatten` leaves the key fairseq_flags in a run without flags.
    left_out = {*shown, *_CHECKSUMS, *follows, "fairseq_flags"}
    names = [name for name in differing(configs) if name not in left_out and needed(name)]
    others = [name for name in shown if name != "seed"]
    for name in _CHECKSUMS:
        if kinds([*names, *others, name]) > kinds([*names, *others]):
            names.append(name)
    return names


def describe(
    config: Mapping[str, Any], names: Iterable[str], text: Callable[[Any], str] | None = None
) -> str:
    """The named settings of a flat config: `experts=2 lr=2e-3 fp16`. `text` writes a value (`as_setting`)."""
    text = text or as_setting
    given = [(name.removeprefix("--"), config[name]) for name in names if name in config]
    return " ".join(
        name if value is True else f"{name}={text(value)}".rstrip("=") for name, value in given
    )


def variants(configs: Sequence[Mapping[str, Any]], within: Sequence[str] = ()) -> list[str]:
    """Schedule, average of weights and replay by share of each config: "", "continuous, average last:8".

    A decay follows the word "average" only if averages differ among configs with the same settings
    `within`.
    """
    groups = [json.dumps([config.get(name) for name in within]) for config in configs]
    averages: dict[str, set[Any]] = {}
    for group, config in zip(groups, configs, strict=True):
        averages.setdefault(group, set()).update({config["average"]} if "average" in config else ())
    found = []
    for group, config in zip(groups, configs, strict=True):
        parts = [as_setting(config["schedule"])] if "schedule" in config else []
        if "average" in config:
            decay = isinstance(config["average"], str) or len(averages[group]) > 1
            parts.append("average" + f" {as_setting(config['average'])}" * decay)
        parts += [f"replay {replay(config)}"] if config.get("replay_share") else []
        found.append(", ".join(parts))
    return found


def replay(config: Mapping[str, Any]) -> str:
    """The replay of a config: "no", "yes", or its share of the training data, such as "0.5 recent"."""
    if not config.get("replay_share"):
        return "yes" if config["replay"] else "no"
    return as_setting(config["replay_share"]) + " recent" * (config.get("replay_from") == "recent")


def as_setting(value: Any) -> str:
    """A setting as text: [2, 4] as 2,4; [2, 2] as 2; a long list as 2*50,4*49; 8 digits of a checksum."""
    if isinstance(value, list):
        texts = [as_setting(each) for each in value]
        if len(set(texts)) == 1:
            return texts[0]
        counted = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
        return (
            ",".join(f"{text}*{count}" for text, count in counted)
            if len(texts) > 8
            else ",".join(texts)
        )
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,}", value):
        return value[:8]
    return str(value)
