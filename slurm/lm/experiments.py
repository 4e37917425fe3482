"""Experiments: YAML files with options of the launcher and flags of fairseq-train.

learner: gmoe              # any option of the launcher, without dashes
grow-experts: 2,2,4
size: base                 # sizes/base.yaml beside this file: options and flags of that size
flags:                     # flags of fairseq-train; they override those of the size
  dropout: [0, 0.1]        # a list: a run for each value, in a folder of its own

On the command line `seed=3` or `dropout=0.2` overrides the files; `dropout=0,0.1` is a list.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from alma.errors import UserError
from alma.experiments import folder_part, read_settings, size_file
from alma.stream import is_stream
from slurm.lm.flags import read_flags
from slurm.lm.settings import Flags

_ONE_VALUE: tuple[str, ...] = ("stream", "size", "out", "name", "seed", "seeds", "stages")
"""Options that cannot be a list of values to try."""
_WITH_COMMAS = (*_ONE_VALUE, "grow-experts")
"""Options in whose key=value a comma is part of the value."""


class Combination(NamedTuple):
    """One combination of the values in an experiment's lists."""

    swept: dict[str, Any]
    """Its value of each setting that is a list."""
    words: list[str]
    """Of the launcher's command line."""
    flags: Flags
    """Of fairseq-train."""

    @property
    def folder(self) -> str:
        """Folder of its run, such as lr-2e-4_replay-on, in that of the experiment; empty without lists."""
        return "_".join(folder_part(*each) for each in self.swept.items())


def is_experiment(path: Path) -> bool:
    """Whether `path` is an experiment, or a folder of experiments."""
    return path.suffix == ".yaml" or (any(path.glob("*.yaml")) and not is_stream(path))


def experiment_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and the experiments in its folders."""
    return [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into paths and `key=value` overrides; an existing path may contain "=".

    `key=a,b` and `key=[a,b]` are lists; see _WITH_COMMAS. Raises UserError for a value that is neither a
    scalar nor a list of scalars in YAML.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # A:B is a corpus in shards: its first folder must exist.
        if not re.match(r"[A-Za-z][\w-]*=", word) or Path(word.partition(":")[0]).exists():
            paths.append(word)
            continue
        key, _, text = word.partition("=")
        if "," in text and key not in _WITH_COMMAS and text[0] not in "[('\"":
            text = f"[{text}]"
        try:
            # As in the files: PyYAML keeps 1e-3 as text, so run.json records a number as it was written.
            # OmegaConf would make it 0.001, which differs from what the file or an earlier launch says.
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{word}: the value is not YAML: quote it, as in a file") from None
    return paths, _checked("key=value", overrides)


def read_experiment(path: Path, size: str | None, overrides: Mapping[str, Any]) -> list[Combination]:
    """Read an experiment as one or more command lines: every combination of the values in its lists.

    `size` replaces that of the file. An override sets the flag of that name if the experiment has it, else an
    option. The default --out is runs/FOLDER/NAME, with the size in NAME.

    Raises UserError for a missing or malformed file.
    """
    record = read_settings(path)
    own = record.pop("size", None)
    size = size or overrides.get("size") or own
    flags = _checked(path, record.pop("flags", {}))
    name = path.stem.removesuffix(f"_{own}") + (f"_{size}" if size else "")
    options: dict[str, Any] = {"out": Path("runs", path.resolve().parent.name, name)}
    if size:
        file = size_file(path, size)
        shared = read_settings(file)
        flags = _checked(file, shared.pop("flags", {})) | flags
        options |= _checked(file, shared)
    options |= _checked(path, record)
    for key, value in overrides.items():
        place = flags if key in flags else options
        # A single value in place of a list joins the runs of the others, in a folder of its own.
        joins = isinstance(place.get(key), list) and not isinstance(value, list | None)
        place[key] = [value] if joins else value
    return list(_combinations(options, flags))


def _combinations(options: dict[str, Any], flags: dict[str, Any]) -> Iterator[Combination]:
    lists = {name: value for name, value in (options | flags).items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        swept = dict(zip(lists, values, strict=True))
        chosen = {name: swept.get(name, value) for name, value in options.items()}
        # The launcher has no `--replay=false`: an option that is off is left out.
        on = {name: value for name, value in chosen.items() if value is not False}
        own_flags = {name: swept.get(name, value) for name, value in flags.items()}
        yield Combination(swept, _words(on), read_flags(_words(own_flags)))


def _checked(where: object, options: Any) -> dict[str, Any]:
    """Raise UserError unless `options` maps names to scalars, or to lists of them."""
    if not isinstance(options, Mapping) or any(isinstance(each, dict) for each in options.values()):
        raise UserError(f"{where}: give flags as `name: value`, such as `max-update: 400`")
    for name, value in options.items():
        if isinstance(value, list):
            _check_list(f"{where}: {name}", name, value)
    return dict(options)


def _check_list(where: str, name: str, values: list[Any]) -> None:
    """Raise UserError unless each value of a list can have a run of its own."""
    if name in _ONE_VALUE:
        hint = "; several seeds are `seeds: 0-2`" if name in ("seed", "seeds") else ""
        raise UserError(f"{where} takes one value, not a list{hint}")
    if not values or any(each is None or isinstance(each, list | dict) for each in values):
        raise UserError(f"{where}: give a list of values, such as [2e-4, 1e-3]")
    folders = [folder_part(name, each) for each in values]
    if twice := next((each for each in folders if folders.count(each) > 1), None):
        hint = "; a value with commas needs quotes, such as '2,2,4'"
        raise UserError(f"{where}: two values of the list have the folder {twice}{hint}")


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as on a command line, without those that have no value."""
    texts = {False: "=false", True: ""}
    return [
        f"--{name}" + (texts[value] if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
        if value is not None
    ]
