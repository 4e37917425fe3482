"""trained.json and result.json: markers of a training and of an evaluation of language models."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import read_file
from alma.records import Run
from alma.schema import TEXT, parse_json, require
from alma.stages import stages
from alma.stream import INSIDE
from alma.trainer import STAGE, TRAINED

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


@dataclass(frozen=True)
class Deployed:
    """What a run of language models evaluated after its last finished stage."""

    checkpoints: list[Path]  # trained in that stage; at least one
    models: int  # evaluated together; some may be of earlier stages
    stage: int  # number of that stage


def deployed_by(run: Path, t: int | None = None) -> Deployed:
    """What the run in the folder `run` evaluated last, or after mega-batch `t`.

    UserError: no stage has finished then, a marker is missing or damaged.
    """
    finished = {
        _index_of(marker.parent): marker.parent for marker in run.glob("stage_[0-9]*/result.json")
    }
    if not finished:
        raise UserError(
            f"{run}: no stage has finished yet; see `alma status {shlex.quote(str(run))}`"
        )
    index = max(finished)
    if t is not None:
        config = Run.read(run).config
        schedule = stages(config["megabatches"], config["waiting_time"])
        ends = [stage.last for stage in schedule if stage.index in finished]
        if not ends[0] <= t <= ends[-1]:
            raise UserError(f"--t {t}: {run} has models after mega-batches {ends[0]} to {ends[-1]}")
        index = sum(end <= t for end in ends) - 1
    stage = finished[index]
    checkpoints = []
    for marker in sorted([*stage.glob(TRAINED), *stage.glob(f"*/{TRAINED}")]):
        if not marker.with_name(STAGE).exists():  # else the answer of the user's own trainer
            checkpoints.append(marker.parent / read_marker(marker)["checkpoint"])
    if not checkpoints:
        raise UserError(
            f"{stage}: no training is complete there: rerun the command that trained it"
        )
    result = read_record(stage / "result.json", {"training": list}, ["training"])
    return Deployed(checkpoints, len(result["training"]), index)


def _index_of(folder: Path) -> int:
    """The number of a stage from the name of its folder."""
    return int(folder.name.removeprefix("stage_"))
