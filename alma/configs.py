"""Configs of runs: flattening and comparison."""

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_SHORT = 40  # characters of a value in a message


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level: {"model": {"layers": 2}} becomes {"model.layers": 2}.

    A command line becomes one setting per flag: {"flags": ["--lr", "1e-3"]} becomes {"--lr":
    "1e-3"}, with "" for no value; the last one of repeated flags counts.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": deep for inner, deep in flatten(value).items()}
        elif isinstance(value, list) and value and str(value[0]).startswith("--"):
            name = ""
            for word in value:
                if re.match("--?[A-Za-z]", word):
                    name, _, flat[name] = word.partition("=")
                else:
                    flat[name] = f"{flat.get(name, '')} {word}".strip()
        else:
            flat[key] = value
    return flat


def canonical(config: Mapping[str, Any], *without: str) -> str:
    """JSON text that is the same for equal configs, leaving out some settings."""
    return json.dumps(
        {key: value for key, value in config.items() if key not in without}, sort_keys=True
    )


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings in which flat configs differ; an absent setting counts as None."""
    differ = []
    for name in dict.fromkeys(itertools.chain(*configs)):
        values = {json.dumps(config.get(name)) for config in configs}
        if len(values) > 1:
            differ.append(name)
    return differ


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], growing: Collection[str] = ()
) -> list[str]:
    """How two configs differ, one text per setting: `--lr: 4e-3 -> 2e-3`.

    Settings in `growing` may increase: a larger number, or a list with more values at its end.
    """
    flat = [flatten(old), flatten(new)]
    absent = dict.fromkeys(itertools.chain(*flat), "not given")
    old, new = (absent | config for config in flat)
    texts = []
    for name in sorted(differing([old, new])):
        before = old[name]
        now = new[name]
        if before == now:  # equal, though their JSON texts differ, such as 1 and 1.0
            continue
        if name in growing and _is_increased(before, now):
            continue
        texts.append(_change(name, before, now))
    return texts


def _is_increased(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        return now[: len(before)] == before
    return isinstance(before, int) and isinstance(now, int) and now > before


def _change(name: str, before: Any, now: Any) -> str:
    """How a setting changed; of long lists, only the first position that differs."""
    both_lists = isinstance(before, list) and isinstance(now, list)
    if not both_lists or max(len(str(before)), len(str(now))) <= _SHORT:
        return f"{name}: {_short(before)} -> {_short(now)}"
    for i, (value_before, value_now) in enumerate(zip(before, now, strict=False)):
        if value_before != value_now:
            return f"{name}[{i}]: {_short(value_before)} -> {_short(value_now)}"
    return f"{name}: {len(before)} values -> {len(now)}"


def _short(value: Any) -> str:
    """A value in a message; a flag without a value is "given"."""
    text = (value or "given") if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[:12]}…"
