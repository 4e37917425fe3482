"""Experiments: YAML files with settings, and the sizes in the folder `sizes` beside them."""

import re
from pathlib import Path
from typing import Any

from alma.errors import UserError, closest
from alma.schema import is_plain

_DEPTH = 4  # of a file: sections, their settings, lists of values


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. UserError: there is no such file, or it is not a mapping."""
    import yaml

    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        near = closest(path.name, (each.name for each in path.parent.glob("*.yaml")))
        hint = f"; did you mean {path.with_name(near)}?" if near else ""
        raise UserError(f"{path}: no such experiment{hint}") from None
    except RecursionError:
        raise UserError(f"{path}: not YAML (nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a date or number that is none
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    if not is_plain(record, _DEPTH):
        raise UserError(f"{path}: give each option a number, a text, on, off, or a list of these")
    return record


def size_file(path: Path, size: str) -> Path:
    """The file of a size of the experiment `path`. UserError: there is none."""
    folder = path.parent / "sizes"
    file = folder / f"{size}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise UserError(f"{file}: no such size; there are: {there}")
    return file


def setting_text(value: Any) -> str:
    """A setting as on a command line: `on` and `off`, numbers without loss."""
    if isinstance(value, bool):
        return "on" if value else "off"
    short = f"{value:.12g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def folder_part(name: str, value: Any) -> str:
    """A setting in the name of a run's folder: `lr-0.3`, `replay-on`, `grow-experts-2-2-4`."""
    # Only what needs no quotes in a shell; fairseq splits paths at colons.
    text = re.sub(r"[^\w.+-]+", "-", setting_text(value).strip("()"))
    return f"{name.replace('_', '-')}-{text}"


def check_nesting(out: Path, sweep: bool) -> None:
    """UserError: a single run would write among the folders of a sweep in `out`, or a sweep into a run."""
    is_run = (out / "run.json").exists()
    if sweep and is_run:
        raise UserError(f"{out} is a single run: give a sweep another --out")
    if not sweep and not is_run and any(out.glob("*/run.json")):
        raise UserError(f"{out} has runs in folders of their own: give --out {out}/NAME to a single run")
