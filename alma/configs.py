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
    """Settings in which flat configs differ, in order of appearance; an absent setting counts as None."""
    names = dict.fromkeys(itertools.chain(*configs))
    return [name for name in names if len({json.dumps(config.get(name)) for config in configs}) > 1]


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], growing: Collection[str] = ()
) -> list[str]:
    """How two configs differ, one text per setting: `--lr: 4e-3 -> 2e-3`.

    Settings in `growing` may increase: a larger number, or a list with more values at its end.
    """
    flat = [flatten(old), flatten(new)]
    absent = dict.fromkeys(itertools.chain(*flat), "not given")
    old, new = (absent | config for config in flat)
    found = []
    for name in sorted(differing([old, new])):
        before, now = old[name], new[name]
        lists = isinstance(before, list) and isinstance(now, list)
        if lists:
            increased = now[: len(before)] == before
        else:
            increased = isinstance(before, int) and isinstance(now, int) and now > before
        if before == now or (name in growing and increased):  # 1 and 1.0 are equal
            continue
        if (
            lists and max(len(str(before)), len(str(now))) > _SHORT
        ):  # the first position that differs
            pairs = enumerate(zip(before, now, strict=False))
            place = next((i for i, pair in pairs if pair[0] != pair[1]), None)
            if place is None:
                found.append(f"{name}: {len(before)} values -> {len(now)}")
                continue
            name, before, now = f"{name}[{place}]", before[place], now[place]
        texts = []
        for value in (before, now):
            text = (
                (value or "given") if isinstance(value, str) else json.dumps(value)
            )  # "": a flag alone
            texts.append(text if len(text) <= _SHORT else f"{text[:12]}…")
        found.append(f"{name}: {' -> '.join(texts)}")
    return found
