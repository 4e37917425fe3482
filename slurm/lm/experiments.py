"""Runs of language models from an experiment: overrides `key=value`, combinations, words.

On the command line of `alma train`, `seed=3` or `dropout=0.2` overrides the files, `dropout=0,0.1`
is a list, and `runs=copy` picks runs.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.experiments import ExperimentSection, sections_of, values_of
from alma.options import joined_words
from alma.sweeps import combinations, common_folder, folder_parts

_ONE_VALUE: tuple[str, ...] = ("stream", "size", "out", "name", "seed", "seeds", "stages")
"""Options that cannot be a list of values to try."""


@dataclass(frozen=True)
class ExperimentRun:
    """One combination of the values in the lists of a section."""

    swept: Collection[str]  # settings that are lists
    folder: str  # below --out, such as lr-2e-4_replay-on; "" without lists
    options: list[str]  # words of `alma train`
    flags: list[str]  # words of fairseq-train


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into paths and `key=value` overrides; an existing path may contain "=".

    `key=a,b` and `key=[a,b]` are lists, but for _ONE_VALUE and grow-experts. UserError: it is not
    YAML.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # A:B is a corpus in shards: its first folder must exist.
        if not re.match(r"[A-Za-z][\w-]*=", word) or os.path.exists(word.partition(":")[0]):
            paths.append(word)
        else:
            key, _, text = word.partition("=")
            overrides[key] = _override(key, text)
    _check_lists("key=value", overrides)
    return paths, overrides


def _override(key: str, text: str) -> Any:
    """The value of an override; None: the option is left out. UserError: it is not YAML."""
    if key in ("stream", "size", "out", "name") and text[:1] not in ("'", '"', "["):
        return text or None  # as it stands: 2024_05 is no number
    if "," in text and key not in (*_ONE_VALUE, "grow-experts") and text[0] not in "[('\"":
        yaml_text = f"[{text}]"
    else:
        yaml_text = text
    import yaml

    from alma.yaml_text import load

    try:
        # As in the files: PyYAML keeps 1e-3 as text, so run.json records a number as it was
        # written. OmegaConf would make it 0.001, unlike the file or an earlier launch.
        return load(yaml_text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no such date
        remedy = "the value is not YAML: quote it, as in a file"
        raise UserError(f"{key}={text}: {remedy}") from None


def _check_lists(where: object, settings: Mapping[str, Any]) -> None:
    """Raise UserError unless each value of a list can have a run of its own."""
    for name, value in settings.items():
        if isinstance(value, list) and name in _ONE_VALUE:
            raise UserError(
                f"{where}: {name} takes one value, not a list; several seeds are `seeds: 0-2`"
            )
        if value is None:  # left out
            continue
        values = values_of(f"{where}: {name}", value)
        folder = common_folder(part for one in values for part in folder_parts({name: one}))
        if folder:
            quotes = "a value with commas needs quotes, such as '2,2,4'"
            raise UserError(f"{where}: two values of the list have the folder {folder}; {quotes}")


def read_experiment(
    path: Path, size: str | None, overrides: Mapping[str, Any]
) -> Iterator[ExperimentRun]:
    """Each combination of the values in the lists of an experiment.

    An override sets the flag of that name if the experiment has it, else an option; `runs` picks
    sections. The default --out is runs/FOLDER/NAME_SIZE of the file, or runs/NAME/SECTION_SIZE.
    UserError: the file is missing or malformed, or a value of a list cannot have a run of its own.
    """
    changes = dict(overrides)
    size = size or changes.pop("size", None)
    names = changes.pop("runs", None) or []
    if not isinstance(names, list):
        names = [names]
    for section in sections_of(path, size, names):
        options: dict[str, Any] = {"out": _default_out(path, section), **section.options}
        flags = dict(section.flags)
        _check_lists(path, options | flags)
        for key, value in changes.items():
            _change(flags if key in flags else options, key, value)
        yield from runs_of(options, flags)


def _default_out(path: Path, section: ExperimentSection) -> Path:
    """The run directory of a section that has no `out`."""
    if section.name:
        folder = path.stem
        name = section.name
    else:
        folder = path.resolve().parent.name
        name = path.stem
    if section.size:
        name = f"{name}_{section.size}"
    return Path("runs", folder, name)


def _change(settings: dict[str, Any], key: str, value: Any) -> None:
    """Override a setting.

    A single value in place of a list joins the other runs, in a folder of its own.
    """
    was_list = isinstance(settings.get(key), list)
    if was_list and value is not None and not isinstance(value, list):
        settings[key] = [value]
    else:
        settings[key] = value


def runs_of(options: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[ExperimentRun]:
    """Each combination of the values of options and flags that are lists."""
    settings = {**options, **flags}
    lists = {name: value for name, value in settings.items() if isinstance(value, list)}
    for swept in combinations(lists):
        options_of_run = {name: swept.get(name, value) for name, value in options.items()}
        flags_of_run = {name: swept.get(name, value) for name, value in flags.items()}
        for name, value in flags_of_run.items():
            if value is False:  # turns off a flag that is a default
                flags_of_run[name] = "false"
        # The launcher has no `--replay=false`: an option that is off is left out.
        yield ExperimentRun(
            swept=lists,
            folder="_".join(folder_parts(swept)),
            options=_words(options_of_run),
            flags=_words(flags_of_run),
        )


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as on a command line, without those that are off or have no value."""
    words = []
    for name, value in settings.items():
        words += joined_words(f"--{name}", value)
    return words
