"""Equal trainings in the runs of a launch run once: one run trains, the others link its files.

Two trainings are equal if their commands agree in all but the folder, and if the trainings that
they continue are equal too. For example, sm equals the first member of ens, and gmoe's first stage
equals that of sm.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alma.errors import UserError
from alma.files import make_directory, write_json_atomic
from alma.markers import read_marker
from slurm.lm.plan import Plan
from slurm.lm.planned import FOREIGN
from slurm.lm.record import TRAINED

_BEGUN = (
    "checkpoint_last.pt",
    FOREIGN["train"],
)  # if a training has begun, one of these exists


def share(plans: Sequence[Plan]) -> list[Plan]:
    """Set the `source` of each training that equals another one to the other's directory.

    Of several equal trainings, the source is a complete one if there is one, else the first. A
    training that already has a checkpoint gets no source and continues by itself.
    """
    sources: dict[Path, Path] = {}
    for directories in _equal_trainings(plans):
        complete = [directory for directory in directories if (directory / TRAINED).exists()]
        source = [*complete, *directories][0]
        for directory in directories:
            if directory != source and not _is_begun(directory):
                sources[directory] = source
    return [_with_sources(plan, sources) for plan in plans]


def _equal_trainings(plans: Sequence[Plan]) -> list[list[Path]]:
    """Directories of trainings in groups of equal ones."""
    groups: dict[tuple[object, ...], list[Path]] = {}
    group_numbers: dict[Path, int] = {}
    trainings = [training for plan in plans for spec in plan.stages for training in spec.trainings]
    for training in trainings:
        words = list(training.arguments)
        at = words.index("--save-dir")
        previous = training.previous and group_numbers[training.previous]
        group = groups.setdefault((*words[:at], *words[at + 2 :], previous), [])
        group.append(training.directory)
        group_numbers[training.directory] = group_numbers.get(group[0], len(groups))
    return list(groups.values())


def _is_begun(directory: Path) -> bool:
    return any((directory / name).exists() for name in _BEGUN)


def _with_sources(plan: Plan, sources: Mapping[Path, Path]) -> Plan:
    stages = []
    for spec in plan.stages:
        trainings = [
            replace(training, source=sources.get(training.directory)) for training in spec.trainings
        ]
        stages.append(replace(spec, trainings=tuple(trainings)))
    return replace(plan, stages=tuple(stages))


def take_over(source: Path, directory: Path) -> None:
    """Link the checkpoints of a complete training into `directory`, then write its marker.

    Copies where links are impossible. UserError: the training in `source` is not complete.
    """
    if not (source / TRAINED).exists():
        raise UserError(f"{source}: the training that {directory} shares is gone: launch again")
    make_directory(directory)
    for path in sorted(source.glob("*.pt")):
        part = directory / f"{path.name}.part"
        part.unlink(missing_ok=True)
        _link(path, part)
        os.replace(part, directory / path.name)
        # Renaming a hard link onto another link of the same file would do nothing.
        part.unlink(missing_ok=True)
    if (source / FOREIGN["train"]).exists():
        whole = directory / f"{FOREIGN['train']}.part"
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(source / FOREIGN["train"], whole, copy_function=_link)
        os.replace(whole, directory / FOREIGN["train"])
    marker = read_marker(source / TRAINED)
    write_json_atomic(directory / TRAINED, marker | {"shared_with": str(source)})


def _link(path: str | Path, to: str | Path) -> None:
    """Make a hard link, or a copy if the file system does not allow it."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)
        with open(to, "rb") as file:
            os.fsync(file.fileno())
