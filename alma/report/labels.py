"""Settings as short text: only those in which the configurations at hand differ, fairseq-train's by flag."""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from alma.records import flatten

ALWAYS_SHOWN = frozenset({"learner", "name", "waiting_time", "replay", "seed", "megabatches"})
"""What a table or legend says anyway."""
_OPTIONAL = ("from_scratch", "update_multiplier", "context_window")  # absent: the default
_CHECKSUMS = ("stream_sha256", "megabatch_sha256", "data")


def flags(config: Mapping[str, Any]) -> dict[str, str]:
    """A run's flags for fairseq-train and their values ("" for none), such as `--lr`."""
    return {name: value for name, value in flatten(config).items() if name.startswith("--")}


def differing(configs: Sequence[Mapping[str, Any]], told: Collection[str] = ALWAYS_SHOWN) -> list[str]:
    """Names of the settings in which flattened configurations differ, without those that were `told` already.

    A setting that only some learners have counts where two that have it differ, or two of one learner;
    a checksum where nothing else tells two configurations apart.
    """
    empty = "fairseq_flags"  # as `flatten` leaves a run without any
    names = [key for key in dict.fromkeys(itertools.chain(*configs)) if key not in {*told, empty}]
    found = [key for key in names if key not in _CHECKSUMS and _tells_apart(key, configs)]
    shown = [*found, *(key for key in told if key != "seed")]
    for key in _CHECKSUMS:
        if _kinds([*shown, key], configs) > _kinds(shown, configs):
            found.append(key)
            shown.append(key)
    return found


def _tells_apart(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    if key in _OPTIONAL or key.startswith("--"):
        return _kinds([key], configs) > 1
    having = [config for config in configs if key in config]
    lacking = {config.get("learner") for config in configs if key not in config}
    return _kinds([key], having) > 1 or any(config.get("learner") in lacking for config in having)


def _kinds(keys: Iterable[str], configs: Sequence[Mapping[str, Any]]) -> int:
    """How many different values the settings have together."""
    names = list(keys)
    return len({json.dumps([config.get(name) for name in names]) for config in configs})


def describe(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """The named settings that a flattened configuration has: `experts=2 lr=2e-3 fp16`."""
    return " ".join(_named(name, config[name]) for name in names if name in config)


def _named(name: str, value: Any) -> str:
    return f"{name.removeprefix('--')}={as_text(value)}".rstrip("=")


def as_text(value: Any) -> str:
    """A setting as typed: a list with commas, once if it repeats one value, as 2*50,4*49 where it is long; 8
    digits of a checksum."""
    if isinstance(value, list):
        texts = [as_text(each) for each in value]
        if len(set(texts)) == 1:
            return texts[0]
        runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
        return ",".join(f"{text}*{count}" for text, count in runs) if len(texts) > 8 else ",".join(texts)
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,}", value):
        return value[:8]
    return str(value)
