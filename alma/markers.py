"""trained.json and result.json: markers of a training and of an evaluation of language models."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import read_file
from alma.schema import TEXT, parse_json, require
from alma.stream import INSIDE

_TRAINED = {"checkpoint": INSIDE, "shared_with": TEXT}


def read_marker(path: Path) -> dict[str, Any]:
    """Read trained.json, whose checkpoint is a path inside its folder. UserError: damaged."""
    return read_record(path, _TRAINED, ["checkpoint"])


def read_record(path: Path, kinds: Mapping[str, Any], needed: Collection[str]) -> dict[str, Any]:
    """Read a JSON object with fields of these `kinds`, the `needed` among them.

    UserError: damaged.
    """
    try:
        record = parse_json(read_file(path))
        require(record, kinds, needed)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}): delete it and rerun `alma train`") from None
    return record
