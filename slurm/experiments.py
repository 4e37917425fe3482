"""Experiments as files: the launcher's options and the flags of fairseq-train, in YAML.

learner: gmoe              # any option of the launcher, without its dashes
grow-experts: 2,2,4
size: base                 # sizes/base.yaml, beside this file: options and flags of that size
flags: {dropout: 0.1}      # more flags for fairseq-train, or other values than the size's
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alma.errors import UserError
from alma.stream import is_stream
from slurm.flags import Flags, read_flags


def is_experiment(path: Path) -> bool:
    """Whether `path` is an experiment's file, or a folder of such."""
    return path.suffix == ".yaml" or (any(path.glob("*.yaml")) and not is_stream(path))


def experiment_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are named, and those in the folders that are."""
    return [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def read_experiment(path: Path, size: str | None) -> tuple[list[str], Flags]:
    """The words of an experiment for the launcher's command line, and its flags for fairseq-train.

    `size` takes the place of the file's own, if given. The run goes to runs/FOLDER/NAME by default, NAME
    being the file's with the size it runs at. UserError: a file that is missing or malformed.
    """
    record = _read(path)
    own = record.pop("size", None)
    size = size or own
    flags = record.pop("flags", {})
    name = path.stem.removesuffix(f"_{own}") + (f"_{size}" if size else "")
    words = _options(path, {"out": Path("runs", path.resolve().parent.name, name)})
    shared: dict[str, Any] = {}
    if size:
        folder = path.parent / "sizes"
        file = folder / f"{size}.yaml"
        if not file.is_file():
            there = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
            raise UserError(f"{file}: no such size; there are: {there}")
        options = _read(file)
        shared = options.pop("flags", {})
        words += _options(file, options)
    merged = [read_flags(_words(path, each)) for each in (shared, flags)]
    return words + _options(path, record), {**merged[0], **merged[1]}


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


def _options(path: Path, options: dict[str, Any]) -> list[str]:
    """For the launcher, where `replay: false` is to say nothing."""
    return _words(path, {name: value for name, value in options.items() if value is not False})


def _words(path: Path, options: Any) -> list[str]:
    """Options as on a command line."""
    if not isinstance(options, Mapping) or any(isinstance(each, list | dict) for each in options.values()):
        raise UserError(f"{path}: give flags as `name: value`, such as `max-update: 400`")
    texts = {False: "=false", True: ""}
    return [
        f"--{name}" + (texts[value] if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
    ]
