"""Experiments: YAML files with settings, and the sizes in the folder `sizes` beside them."""

from pathlib import Path
from typing import Any

from alma.errors import UserError, closest


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. UserError: there is no such file, or it is not a mapping."""
    import yaml

    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        near = closest(path.name, (each.name for each in path.parent.glob("*.yaml")))
        hint = f"; did you mean {path.with_name(near)}?" if near else ""
        raise UserError(f"{path}: no such experiment{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    return record


def size_file(path: Path, size: str) -> Path:
    """The file of a size of the experiment `path`. UserError: there is none."""
    folder = path.parent / "sizes"
    file = folder / f"{size}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise UserError(f"{file}: no such size; there are: {there}")
    return file
