"""Experiments: YAML files with options of the launcher and flags of fairseq-train.

learner: gmoe              # any option of the launcher, without dashes
grow-experts: 2,2,4
size: base                 # sizes/base.yaml beside this file: options and flags of that size
flags: {dropout: 0.1}      # flags of fairseq-train; they override those of the size

On the command line `seed=3` or `dropout=0.2` overrides the files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alma.errors import UserError
from alma.experiments import read_settings, size_file
from alma.stream import is_stream
from slurm.lm.flags import Flags, read_flags


def is_experiment(path: Path) -> bool:
    """Whether `path` is an experiment, or a folder of experiments."""
    return path.suffix == ".yaml" or (any(path.glob("*.yaml")) and not is_stream(path))


def experiment_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and the experiments in its folders."""
    return [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into paths and `key=value` overrides; an existing path may contain "=".

    Raises UserError for a value that is not YAML, or not a scalar.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # A:B is a corpus in shards: its first folder must exist.
        if not re.match(r"[A-Za-z][\w-]*=", word) or Path(word.partition(":")[0]).exists():
            paths.append(word)
            continue
        key, _, text = word.partition("=")
        try:
            # As in the files: PyYAML keeps 1e-3 as text, so run.json records a number as it was written.
            # OmegaConf would make it 0.001, which differs from what the file or an earlier launch says.
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{word}: the value is not YAML: quote it, as in a file") from None
    return paths, _checked(", ".join(overrides), overrides)


def read_experiment(path: Path, size: str | None, overrides: Mapping[str, Any]) -> tuple[list[str], Flags]:
    """Read an experiment as words of the launcher's command line and flags of fairseq-train.

    `size` replaces that of the file. An override sets the flag of that name if the experiment has it, else an
    option. The default --out is runs/FOLDER/NAME, with the size in NAME.

    Raises UserError for a missing or malformed file.
    """
    record = read_settings(path)
    own = record.pop("size", None)
    size = size or overrides.get("size") or own
    flags = _checked(path, record.pop("flags", {}))
    name = path.stem.removesuffix(f"_{own}") + (f"_{size}" if size else "")
    options = {"out": Path("runs", path.resolve().parent.name, name)}
    if size:
        file = size_file(path, size)
        shared = read_settings(file)
        flags = _checked(file, shared.pop("flags", {})) | flags
        options |= _checked(file, shared)
    options |= _checked(path, record)
    for key, value in overrides.items():
        (flags if key in flags else options)[key] = value
    # The launcher has no `--replay=false`: an option that is off is left out.
    on = {name: value for name, value in options.items() if value is not False}
    return _words(on), read_flags(_words(flags))


def _checked(where: object, options: Any) -> dict[str, Any]:
    """Raise UserError unless `options` maps names to scalars."""
    if not isinstance(options, Mapping) or any(isinstance(each, list | dict) for each in options.values()):
        raise UserError(f"{where}: give flags as `name: value`, such as `max-update: 400`")
    return dict(options)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as on a command line, without those that have no value."""
    texts = {False: "=false", True: ""}
    return [
        f"--{name}" + (texts[value] if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
        if value is not None
    ]
