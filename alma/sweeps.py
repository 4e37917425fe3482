"""Sweeps of text and of images: combinations of lists of values, and the folder of each run."""

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from alma.errors import UserError

Folder = TypeVar("Folder", bound=Hashable)


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value for each name, in the order of nested loops: those of the
    first name change slowest, those of the last one fastest."""
    for choice in itertools.product(*values.values()):
        yield dict(zip(values, choice, strict=True))


def varying(names: Iterable[str], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ between runs; a run without a value has None."""
    differing = []
    for name in names:
        values = {run.get(name) for run in runs}
        if len(values) > 1:
            differing.append(name)
    return differing


def setting_text(value: Any) -> str:
    """A setting as on a command line: `on` and `off`, numbers without loss."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        short = f"{value:.12g}"
        if float(short) == value:
            return short
    return str(value)


def folder_parts(values: Mapping[str, Any]) -> list[str]:
    """Settings in the name of a run's folder: `lr-0.3`, `replay-on`, `grow-experts-2-2-4`.

    One without a value (None) has no part.
    """
    parts = []
    for name, value in values.items():
        if value is not None:
            # Only what needs no quotes in a shell; fairseq splits paths at colons.
            text = re.sub(r"[^\w.+-]+", "-", setting_text(value).strip("()"))
            parts.append(f"{name.replace('_', '-')}-{text}")
    return parts


def seed_part(seed: int) -> str:
    """The seed in the name of a run's folder, its last part."""
    return f"s{seed}"


def common_folder(folders: Iterable[Folder]) -> Folder | None:
    """The first folder that two runs have; None if each run has one of its own."""
    for folder, runs in Counter(folders).items():
        if runs > 1:
            return folder
    return None


def check_nesting(out: Path, sweep: bool) -> None:
    """UserError: a single run would write among those of a sweep in `out`, or a sweep into one."""
    is_run = (out / "run.json").exists()
    if sweep and is_run:
        raise UserError(f"{out} is a single run: give a sweep another --out")
    if not sweep and not is_run and any(out.glob("*/run.json")):
        raise UserError(
            f"{out} has runs in folders of their own: give --out {out}/NAME to a single run"
        )
