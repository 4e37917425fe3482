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
from alma.markers import read_marker
from slurm.lm.plan import FOREIGN, Plan
from slurm.lm.record import TRAINED

_BEGUN = ("checkpoint_last.pt", FOREIGN["train"])  # of a training that has begun, one of these exists


def share(plans: Sequence[Plan]) -> list[Plan]:
    """The plans, in which each training that equals another one has that one's directory as `source`.

    The source is a complete training if there is one, else the first. A training with a checkpoint of its own
    has no source and goes on by itself.
    """
    numbers: dict[Path, int] = {}  # of the group of a training
    groups: dict[tuple[object, ...], list[Path]] = {}
    for training in (one for plan in plans for spec in plan.stages for one in spec.trainings):
        words = list(training.arguments)
        at = words.index("--save-dir")
        before = training.previous and numbers[training.previous]
        group = groups.setdefault((*words[:at], *words[at + 2 :], before), [])
        group.append(training.directory)
        numbers[training.directory] = numbers.get(group[0], len(groups))
    sources: dict[Path, Path] = {}
    for group in groups.values():
        first = next((path for path in group if (path / TRAINED).exists()), group[0])
        begun = {path for path in group for name in _BEGUN if (path / name).exists()}
        sources |= {path: first for path in group if path != first and path not in begun}
    shared = []
    for plan in plans:
        stages = []
        for spec in plan.stages:
            trainings = [replace(one, source=sources.get(one.directory)) for one in spec.trainings]
            stages.append(replace(spec, trainings=tuple(trainings)))
        shared.append(replace(plan, stages=tuple(stages)))
    return shared


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
        _link(path, part)
        os.replace(part, directory / path.name)
        part.unlink(missing_ok=True)  # renaming a link to another of the same file does nothing
    if (source / FOREIGN["train"]).exists():
        whole = directory / f"{FOREIGN['train']}.part"
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(source / FOREIGN["train"], whole, copy_function=_link)
        os.replace(whole, directory / FOREIGN["train"])
    marker = read_marker(source / TRAINED)
    write_json_atomic(directory / TRAINED, marker | {"shared_with": str(source)})


def _link(path: str | Path, to: str | Path) -> None:
    """A link, or a copy where links are impossible: another file system, or one without them."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)
        with open(to, "rb") as file:
            os.fsync(file.fileno())
