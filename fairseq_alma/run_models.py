"""The models that a run of `alma train` deploys, for commands that take RUN in place of a checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from alma.errors import UserError
from alma.records import Run
from alma.schema import parse_json


class Models(NamedTuple):
    """Checkpoints, the stream that they were trained on, and weights as of --weights."""

    paths: list[str]
    stream: Path
    weights: str


def models_of(what: str, stream: Path | None, weights: str | None) -> Models:
    """The models of `what`, a checkpoint or a run: those deployed after its last stage, with their average.

    UserError: no stage has finished, or as `memory_map_members`.
    """
    paths, own = [what], "trained"
    if (Path(what) / "run.json").is_file():
        average = str(Run.read(what).config.get("average", ""))
        own = average if average.startswith("last:") else "average" if average else "trained"
        paths = checkpoints_of(Path(what))
    if stream is None:
        from fairseq_alma.checkpoint import memory_map_members  # torch: seconds

        stream = Path(memory_map_members(paths)[0]["cfg"]["task"]["data"])
    return Models(paths, stream, weights or own)


def checkpoints_of(run: Path) -> list[str]:
    """The checkpoints evaluated after the last finished stage of `run`. UserError: none."""
    stages = sorted(folder for folder in run.glob("stage_*") if (folder / "result.json").is_file())
    if not stages:
        raise UserError(f"{run}: no stage has finished yet; see `alma status {run}`")
    count = len(_read(stages[-1] / "result.json")["training"])
    found: list[str] = []
    while stages and len(found) < count:  # gens deploys the models of earlier stages, too
        markers = sorted(stages.pop().rglob("trained.json"))
        cooled = [marker for marker in markers if marker.parent.name == "cooldown"]
        names = [str(marker.with_name(_read(marker)["checkpoint"])) for marker in cooled or markers]
        found = names + found
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return parse_json(file.read_bytes())
    except ValueError:
        raise UserError(f"{file} is damaged: delete it and run `alma train` again") from None
