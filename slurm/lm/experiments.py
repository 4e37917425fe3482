"""Experiments as files: the launcher's options and the flags of fairseq-train, in YAML.

learner: gmoe              # any option of the launcher, without its dashes
grow-experts: 2,2,4
size: base                 # sizes/base.yaml, beside this file: options and flags of that size
flags: {dropout: 0.1}      # more flags for fairseq-train, or other values than the size's

On the command line `seed=3` or `dropout=0.2` stands for what a file says of that key.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alma.errors import UserError
from alma.stream import is_stream
from slurm.lm.flags import Flags, read_flags


def is_experiment(path: Path) -> bool:
    """Whether `path` is an experiment's file, or a folder of such."""
    return path.suffix == ".yaml" or (any(path.glob("*.yaml")) and not is_stream(path))


def experiment_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are named, and those in the folders that are."""
    return [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """The words that name files or folders, and what the others, `key=value`, set; a path that exists is one.

    UserError: a value that is not YAML.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # of a corpus in shards, A:B, the first tells
        if not re.match(r"[A-Za-z][\w-]*=", word) or Path(word.partition(":")[0]).exists():
            paths.append(word)
            continue
        key, _, text = word.partition("=")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{word}: the value is not YAML: put it in quotes, as in a file") from None
    return paths, _checked(", ".join(overrides), overrides)


def read_experiment(path: Path, size: str | None, overrides: Mapping[str, Any]) -> tuple[list[str], Flags]:
    """The words of an experiment for the launcher's command line, and its flags for fairseq-train.

    `size` takes the place of the file's own, if given, and `overrides` that of the values of options, and of
    flags that the experiment has. The run goes to runs/FOLDER/NAME by default, NAME being the file's with
    the size it runs at. UserError: a file that is missing or malformed.
    """
    record = _read(path)
    own = record.pop("size", None)
    size = size or overrides.get("size") or own
    flags = _checked(path, record.pop("flags", {}))
    name = path.stem.removesuffix(f"_{own}") + (f"_{size}" if size else "")
    options = {"out": Path("runs", path.resolve().parent.name, name)}
    if size:
        folder = path.parent / "sizes"
        file = folder / f"{size}.yaml"
        if not file.is_file():
            there = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
            raise UserError(f"{file}: no such size; there are: {there}")
        shared = _read(file)
        flags = _checked(file, shared.pop("flags", {})) | flags
        options |= _checked(file, shared)
    options |= _checked(path, record)
    for key, value in overrides.items():
        (flags if key in flags else options)[key] = value
    # For the launcher `replay: false` is to say nothing.
    said = {name: value for name, value in options.items() if value is not False}
    return _words(said), read_flags(_words(flags))


def _read(path: Path) -> dict[str, Any]:
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such experiment") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())}): mend it") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    return record


def _checked(where: object, options: Any) -> dict[str, Any]:
    """UserError: not a value for each name."""
    if not isinstance(options, Mapping) or any(isinstance(each, list | dict) for each in options.values()):
        raise UserError(f"{where}: give flags as `name: value`, such as `max-update: 400`")
    return dict(options)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as on a command line; those without a value are left out."""
    texts = {False: "=false", True: ""}
    return [
        f"--{name}" + (texts[value] if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
        if value is not None
    ]
