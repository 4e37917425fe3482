"""Restore the learner of a finished or running image run, to predict, export or draw with it."""

from pathlib import Path

import torch

from alma.errors import UserError, hint
from alma.records import TRAINED_MEGABATCHES, Run
from alma.stages import stages
from vision.checkpoints import read_checkpoint, reading
from vision.data import Dataset, prepared_like
from vision.learners import LEARNERS, Learner
from vision.models import Factory
from vision.stage_trainer import CHECKPOINT, stage_file


def learner_of(
    run: Run,
    data: Dataset,
    file: Path,
    device: torch.device | str = "cpu",
    backbone: Factory | None = None,
) -> Learner:
    """Build the learner of `run` and load its state from `file`.

    `file` is the run's checkpoint, or the model of a stage (--save-stages). `data` gives the shape
    of the images and the number of classes. `backbone` must be the one that `vision.run` was called
    with, if any. Raises UserError if the file is missing or damaged, the learner is unknown, or the
    backbone is missing.
    """
    config = run.config
    name = config["learner"]
    if name not in LEARNERS:
        raise UserError(f"{run.directory}: learner {name}: {hint(name, LEARNERS)}")
    kind = LEARNERS[name]
    if config.get("backbone") and not backbone:
        needed = "from Python, give it: vision.deployed.load(RUN, backbone=...)"
        raise UserError(f"{run.directory} has a backbone of its own, {config['arch']}: {needed}")
    state = read_checkpoint(file, device)
    with reading(file, "restore it"):
        names = config.keys() & set(kind.settings_class.names()) - {
            "weights"
        }  # run.json records only a hash of the file `weights`
        settings = kind.settings_class(**{name: config[name] for name in names})
        learner = kind(
            data.shape, data.classes, settings, config["seed"], torch.device(device), backbone
        )
        learner.load(state.get("learner", state))
    return learner


def load(
    directory: str | Path,
    t: int | None = None,
    device: torch.device | str = "cpu",
    backbone: Factory | None = None,
) -> tuple[Learner, Dataset]:
    """Load the learner of an image run as it was after mega-batch `t` (None: the last one).

    Also returns a data set without images, whose `examples` prepares new images as the run did:
    `learner.judged(learner.deployed, data.examples(images))` predicts. `backbone` must be the one
    that `vision.run` was called with, if any. Raises UserError if `directory` is not an image run,
    the run has not reached `t`, or the model of that stage was not saved (--save-stages).
    """
    run = Run.read(directory)
    place = Path(directory)
    if not {"dataset", "arch"} <= run.config.keys():
        raise UserError(f"{place} is no run of `alma images`")
    if "images" not in run.info:
        how = f"run it again, which trains nothing: {run.info.get('command', 'the same command')}"
        raise UserError(f"{place}/run.json lacks the preparation of images, which is new: {how}")
    # It may be tested on later ones, too.
    megabatches = run.info.get(TRAINED_MEGABATCHES, run.config["megabatches"])
    schedule = stages(megabatches, run.config["waiting_time"])
    ends = [stage.last for stage in schedule]
    if t is not None and not ends[0] <= t <= ends[-1]:
        raise UserError(f"--t {t}: the run has models after mega-batches {ends[0]} to {ends[-1]}")
    index = sum(end <= (t or ends[-1]) for end in ends) - 1
    file = place / (CHECKPOINT if index == len(schedule) - 1 else stage_file(index))
    if not file.is_file():
        again = "start it again, or with --save-stages into a new folder"
        raise UserError(f"{place} has no {file.name}: {again} to keep the model of every stage")
    if file.name == CHECKPOINT:
        done = read_checkpoint(file).get("done")
        if done != len(schedule):
            progress = f"{done} of {len(schedule)} stages are complete"
            remedy = "finish the run, or give --t with a run of --save-stages"
            raise UserError(f"{place}: {progress}: {remedy}")
    with reading(place / "run.json", "restore it"):
        data = prepared_like(run.info["images"], run.config["dataset"])
    return learner_of(run, data, file, device, backbone), data
