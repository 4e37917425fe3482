"""Short labels: the settings that distinguish configurations, such as `lr=2e-3 fp16`."""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from alma.configs import differing
from alma.options import CHANGED, options_of
from alma.protocol import TextOptions

VARIANT = frozenset({"schedule", "average", "replay_share", "replay_from"})
"""Settings that are part of a method's name in reports, see `variants`; absent if off."""
ALWAYS_SHOWN = VARIANT | {"learner", "name", "waiting_time", "replay", "seed", "megabatches"}
"""Settings that every table and legend shows."""
_OPTIONAL = {
    name for name, option in options_of(TextOptions).items() if option.metadata["record"] == CHANGED
}
"""Settings that run.json leaves out if they have their defaults."""
_CHECKSUMS = ("stream_sha256", "megabatch_sha256", "data", "init_sha256")
"""Checksums; labels show them only if no other setting distinguishes two configurations."""
_OF_VARIANT = ("select", "--lr-scheduler", "--total-num-update")
"""Settings that usually change together with the variant, because a preset sets both."""


def distinguishing(
    configs: Sequence[Mapping[str, Any]], shown: Collection[str] = ALWAYS_SHOWN
) -> list[str]:
    """The names of the settings that labels must show to distinguish flat configs.

    `shown` are settings that tables and legends show anyway. Of the settings that differ, some are
    needed only on a condition: a setting that only some learners have, if it differs among these,
    or if another run of the same learner lacks it; one of _OF_VARIANT, if it differs within a
    variant; a checksum, if nothing else distinguishes two configs.
    """

    def kinds(names: Iterable[str]) -> int:
        """Number of different combinations of the settings' values."""
        combinations = set()
        for config in configs:
            combinations.add(json.dumps([config.get(name) for name in names]))
        return len(combinations)

    def needed(name: str) -> bool:
        if name in _OPTIONAL or name.startswith("--"):
            return True
        having = [{name: config[name]} for config in configs if name in config]
        lacking = {config.get("learner") for config in configs if name not in config}
        return bool(differing(having)) or any(
            c.get("learner") in lacking for c in configs if name in c
        )

    follows = {name for name in _OF_VARIANT if kinds([*VARIANT, name]) == kinds([*VARIANT])}
    # For a run without flags, `flatten` returns an empty fairseq_flags.
    left_out = {*shown, *_CHECKSUMS, *follows, "fairseq_flags"}
    names = [name for name in differing(configs) if name not in left_out and needed(name)]
    shown_elsewhere = [name for name in shown if name != "seed"]
    for name in _CHECKSUMS:
        if kinds([*names, *shown_elsewhere, name]) > kinds([*names, *shown_elsewhere]):
            names.append(name)
    return names


def describe(
    config: Mapping[str, Any], names: Iterable[str], text: Callable[[Any], str] | None = None
) -> str:
    """The named settings of a flat config, such as `experts=2 lr=2e-3 fp16`.

    `text` writes a value (default: `as_setting`).
    """
    text = text or as_setting
    parts = []
    for name in names:
        if name not in config:
            continue
        shown_name = name.removeprefix("--")
        value = config[name]
        if value is True:
            parts.append(shown_name)
        else:
            parts.append(f"{shown_name}={text(value)}".rstrip("="))
    return " ".join(parts)


def variants(configs: Sequence[Mapping[str, Any]], within: Sequence[str] = ()) -> list[str]:
    """The variant of each config, a text such as "" or "continuous, average last:8".

    It names the schedule, the average and the replay share, if not the defaults. The decay of an
    average is named only if configs that agree in the settings `within` have different decays.
    """
    groups = []
    averages: dict[str, set[Any]] = {}
    for config in configs:
        group = json.dumps([config.get(name) for name in within])
        groups.append(group)
        averages.setdefault(group, set())
        if "average" in config:
            averages[group].add(config["average"])
    texts = []
    for group, config in zip(groups, configs, strict=True):
        parts = []
        if "schedule" in config:
            parts.append(as_setting(config["schedule"]))
        if "average" in config:
            average = config["average"]
            is_needed = isinstance(average, str) or len(averages[group]) > 1
            parts.append(f"average {as_setting(average)}" if is_needed else "average")
        if config.get("replay_share"):
            parts.append(f"replay {replay(config)}")
        texts.append(", ".join(parts))
    return texts


def replay(config: Mapping[str, Any]) -> str:
    """The replay of a config: "no", "yes", or its share of the data, such as "0.5 recent"."""
    if not config.get("replay_share"):
        return "yes" if config["replay"] else "no"
    share = as_setting(config["replay_share"])
    return f"{share} recent" if config.get("replay_from") == "recent" else share


def as_setting(value: Any) -> str:
    """A setting as text.

    Lists are shortened: 2,4 for [2, 4]; 2 for [2, 2]; 2*50,4*49 for fifty 2s and forty-nine 4s. A
    checksum has 8 digits.
    """
    if isinstance(value, list):
        texts = [as_setting(member) for member in value]
        if len(set(texts)) == 1:
            return texts[0]
        if len(texts) > 8:
            texts = [f"{text}*{len(list(run))}" for text, run in itertools.groupby(texts)]
        return ",".join(texts)
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,}", value):
        return value[:8]
    return str(value)
