"""Experiments: YAML files with the options of runs, of text and of images.

learner: gmoe              # any option of `alma train` or `alma images`, without dashes
waiting-time: [1, 10]      # a list: a run for each value, in a folder of its own
flags:                     # language models: flags of fairseq-train
  dropout: [0, 0.1]
runs:                      # several runs or sweeps by name, or a list; each overrides the above
  copy: {grow-router: copy}
  tree: {grow-router: tree, flags: {lr: 1e-3}}
size: base                 # one of the sizes: options that all the above override
sizes:                     # or a file that has them; without it, sizes.yaml beside this file
  base: {stream: stream, flags: {arch: switch_gmoe_base}}

`sections_of` reads a file. slurm/lm/experiments.py and vision/sections.py write each section as
words of a command line, in front of those that the user gave, which override them.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.errors import UserError, hint
from alma.schema import is_plain


@dataclass(frozen=True)
class ExperimentSection:
    """One of the `runs` of an experiment, or all of it."""

    name: str  # "" without a name
    size: str | None
    options: dict[str, Any]  # by name, without dashes; a list has values to try
    flags: dict[str, Any]  # of fairseq-train, as `options`


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. UserError: there is no such file, or it is not a mapping."""
    import yaml

    from alma.yaml_text import load

    if not path.exists() and path.parts[0] == "experiments":  # use the installed files
        path = Path(__file__).parents[1] / path
    try:
        record = load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        names = (file.name for file in path.parent.glob("*.yaml"))
        raise UserError(f"{path}: no such experiment; {hint(path.name, names)}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, no such date
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    if not is_plain(record, depth=6):  # sizes, their flags, lists of values
        raise UserError(f"{path}: give each option a number, a text, on, off, or a list of these")
    return record


def sections_of(
    path: Path, size: str | None = None, names: Collection[str] = ()
) -> list[ExperimentSection]:
    """The sections of an experiment at `size` (None: the file's own), or those with these names.

    UserError: a missing or malformed file, an unknown size or name.
    """
    record = read_settings(path)
    size = size or record.get("size")
    sizes = record.get("sizes")
    runs = record.get("runs")
    settings_of_all = {
        name: value for name, value in record.items() if name not in ("size", "sizes", "runs")
    }
    parts: list[Any] = [settings_of_all]
    if size:
        parts.insert(0, _settings_of_size(path, size, sizes))
    named_runs = _named_runs(runs)
    names_of_file = [name for name, _ in named_runs]
    for name in names:
        if name not in names_of_file:
            raise UserError(f"{path}: no run {name}; there are: {', '.join(names_of_file)}")
    sections = []
    for name, run in named_runs:
        section = _merged(path, name, size, [*parts, run])
        if not names or name in names:
            sections.append(section)
    return sections


def _settings_of_size(path: Path, size: str, sizes: Any) -> Any:
    """The settings of a size; `sizes` is the value of that name in the experiment. UserError: there
    is no such size."""
    if not isinstance(sizes, dict):
        file = path.parent / str(sizes or "sizes.yaml")
        sizes = read_settings(file).get("sizes") if sizes or file.is_file() else None
    sizes = sizes if isinstance(sizes, dict) else {}
    if str(size) not in sizes:
        names = ", ".join(sorted(sizes)) or "none"
        raise UserError(f"{path}: {size}: no such size; there are: {names}")
    return sizes[str(size)]


def _named_runs(runs: Any) -> list[tuple[str, Any]]:
    """Name and settings of each run; the name is "" in a list, and of an experiment without
    `runs`."""
    if isinstance(runs, dict):
        return list(runs.items())
    if runs is None:
        runs = [{}]
    elif not isinstance(runs, list):
        runs = [runs]
    return [("", run) for run in runs]


def _merged(path: Path, name: str, size: str | None, parts: Collection[Any]) -> ExperimentSection:
    """A section of settings that override those of earlier parts. UserError: one is no mapping."""
    section = ExperimentSection(name, size, options={}, flags={})
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("flags", {}), dict):
            example = "give options, flags and runs as `name: value`, such as `seed: 3`"
            raise UserError(f"{path}: {example}")
        section.flags.update(part.get("flags", {}))
        section.options.update({key: value for key, value in part.items() if key != "flags"})
    return section


def values_of(name: str, value: Any) -> list[Any]:
    """The values of a setting to try: the elements of its list, or the single value.

    Raises UserError for an empty list.
    """
    values = value if isinstance(value, list) else [value]
    if not values or any(one is None or isinstance(one, list | dict) for one in values):
        raise UserError(f"{name}: give a value, or a list of values, such as [2e-4, 1e-3]")
    return values


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of an experiment in front of each UserError in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
