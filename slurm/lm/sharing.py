"""Trainings that runs of one launch have in common: one run trains, the others take over its files.

Two trainings are the same if their commands agree in all but the folder, and so do those whose models they
continue: sm is the first member of ens, and gmoe's first stage is sm's.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alma.errors import UserError
from alma.files import make_directory, write_json_atomic
from slurm.lm.plan import Plan, Training
from slurm.lm.rows import TRAINED, read_marker


def share(plans: Sequence[Plan]) -> list[Plan]:
    """The plans, in which each training that equals another one has that one's directory as `source`.

    The source is a complete training if there is one, else the first. A training with a checkpoint of its own
    has no source and goes on by itself.
    """
    numbers: dict[Path, int] = {}  # of the group of a training
    groups: dict[tuple[object, ...], list[Path]] = {}
    places: dict[tuple[object, ...], int] = {}
    for training in (each for plan in plans for spec in plan.stages for each in spec.trainings):
        key = (*_without_folder(training), training.previous and numbers[training.previous])
        numbers[training.directory] = places.setdefault(key, len(places))
        groups.setdefault(key, []).append(training.directory)
    sources: dict[Path, Path] = {}
    for directories in groups.values():
        first = next((each for each in directories if (each / TRAINED).exists()), directories[0])
        begun = {each for each in directories if (each / "checkpoint_last.pt").exists()}
        sources |= {each: first for each in directories if each != first and each not in begun}
    return [_with_sources(plan, sources) for plan in plans]


def _without_folder(training: Training) -> list[str]:
    words = list(training.arguments)
    place = words.index("--save-dir")
    return words[:place] + words[place + 2 :]


def _with_sources(plan: Plan, sources: dict[Path, Path]) -> Plan:
    stages = []
    for spec in plan.stages:
        sourced = [replace(each, source=sources.get(each.directory)) for each in spec.trainings]
        stages.append(replace(spec, trainings=tuple(sourced)))
    return replace(plan, stages=tuple(stages))


def take_over(source: Path, directory: Path) -> None:
    """Link the checkpoints of the complete training in `source` into `directory`, then write its marker.

    Copies where links are impossible. UserError: the training in `source` is not complete.
    """
    if not (source / TRAINED).exists():
        raise UserError(f"{source}: the training that {directory} shares is gone: launch again")
    make_directory(directory)
    for path in sorted(source.glob("*.pt")):
        part = directory / f"{path.name}.part"
        part.unlink(missing_ok=True)
        try:
            os.link(path, part)
        except OSError:  # another file system, or one without links
            shutil.copy2(path, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, directory / path.name)
        part.unlink(missing_ok=True)  # renaming a link to another of the same file does nothing
    marker = read_marker(source / TRAINED)
    write_json_atomic(directory / TRAINED, marker | {"shared_with": str(source)})
