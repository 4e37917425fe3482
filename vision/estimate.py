"""Cost of runs before their start: `alma images --dry-run`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from alma.cost_table import GIGA, TERA, cost_table, scaled, with_commas
from alma.stages import stages
from vision import folder, presets, unreadable
from vision.data import NORMALISED, VALIDATION
from vision.examples import Examples
from vision.experiment import device_of
from vision.learners import LEARNERS
from vision.learners.base import GrowingLearner, Learner
from vision.periods import listed
from vision.sweep import SweepRun
from vision.train import evaluate, fit

_COLUMNS = ("run", "learner", "parameters", "epochs", "TFLOPs", "minutes", "GB/process")
PROCESS = 3e8
"""Memory of a process before it loads images or a model, in bytes."""
VECTORS = 6
"""Floats kept per parameter: value, gradient, best epoch, average, and two optimizer states."""


@dataclass(frozen=True)
class _Data:
    """The images of a run."""

    shape: tuple[int, ...]  # channels, height, width
    sizes: list[int]  # images of each mega-batch
    tested: int  # test images
    classes: int


@dataclass(frozen=True)
class _Seconds:
    """Seconds per example."""

    training: float
    evaluation: float


@dataclass(frozen=True)
class _Estimate:
    """Cost of one run."""

    parameters: int
    epochs: int
    teraflops: float
    minutes: float
    memory: float  # bytes of the process


def table(jobs: Sequence[SweepRun]) -> str:
    """A table with a line for each run and one for the sum.

    Columns: parameters at the start, epochs and training FLOPs of all stages, minutes, and memory
    of a process. Minutes are extrapolated from one timed batch of each model.
    """
    torch.set_num_threads(1 if len(jobs) > 1 else torch.get_num_threads())  # as `run_all` does
    timed: dict[tuple, _Seconds] = {}
    estimates = []
    runs = []
    for job in jobs:
        estimate, is_growing = _estimate(job, timed)
        estimates.append(estimate)
        about = ""
        if is_growing:
            about = ">"
        elif job.settings.patience > 0:
            about = "<"
        runs.append(
            {
                "run": str(job.out),
                "learner": job.options["learner"],
                "parameters": with_commas(estimate.parameters),
                "epochs": with_commas(estimate.epochs),
                "TFLOPs": f"{about}{estimate.teraflops:.3g}",
                "minutes": f"{about}{estimate.minutes:.2g}",
                "GB/process": scaled(estimate.memory, GIGA),
            }
        )
    teraflops = sum(estimate.teraflops for estimate in estimates)
    minutes = sum(estimate.minutes for estimate in estimates)
    sums = {
        "run": f"{len(jobs)} runs",
        "epochs": with_commas(sum(estimate.epochs for estimate in estimates)),
        "TFLOPs": f"{teraflops:.3g}",
        "minutes": f"{minutes:.3g}",
    }
    return cost_table(_COLUMNS, runs, sums)


def _estimate(job: SweepRun, timed: dict[tuple, _Seconds]) -> tuple[_Estimate, bool]:
    """The cost of a run, and whether its model grows; `timed` caches the seconds of each model."""
    data = _data(job)
    settings = job.settings
    options = job.options
    learner = untrained(job, data)
    flops = learner.model.flops
    seconds = timed_seconds(learner, options["learner"], timed)

    schedule = stages(job.megabatches, options["waiting_time"], options["replay"])
    images_of_stages = []
    validated = 0
    for stage in schedule:
        sizes = [data.sizes[t - 1] for t in stage.train_on]
        images_of_stages.append(sum(sizes))
        validated += settings.epochs * sum(max(1, int(size * VALIDATION)) for size in sizes)
    trained = settings.epochs * sum(images_of_stages) - validated
    evaluated = validated + data.tested * (len(schedule) + 1)

    pixels = math.prod(data.shape)
    stored = (sum(data.sizes) + data.tested) * pixels
    normalised = min(4 * pixels * max(images_of_stages), NORMALISED)
    estimate = _Estimate(
        parameters=learner.parameters,
        epochs=len(schedule) * settings.epochs,
        teraflops=trained * (flops.forward + flops.backward) / TERA,
        minutes=(trained * seconds.training + evaluated * seconds.evaluation) / 60,
        memory=PROCESS + stored + normalised + VECTORS * 4 * learner.parameters,
    )
    return estimate, isinstance(learner, GrowingLearner)


def untrained(job: SweepRun, data: "_Data | None" = None) -> Learner:
    """The untrained learner of a run, whose `data` are read unless given."""
    data = data or _data(job)
    kind = LEARNERS[job.options["learner"]]
    device = device_of(job.options["device"])
    return kind(data.shape, data.classes, job.settings, job.options["seed"], device)


def timed_seconds(learner: Learner, name: str, timed: dict[tuple, _Seconds]) -> _Seconds:
    """Seconds per example of the learner `name`; `timed` caches those of each model."""
    settings = learner.settings
    key = (
        name,
        learner.model.flops,
        settings.batch_size,
        settings.optimizer,
        settings.amp,
        learner.device,
    )
    if key not in timed:
        timed[key] = _seconds(learner)
    return timed[key]


def _data(job: SweepRun) -> _Data:
    """The images of a run; those of a folder are listed."""
    name = job.dataset["name"]
    side = job.dataset["image_size"]
    if name != "folder":
        channels, pixels, images, tested, classes = presets.SIZES[name]
        shape = (channels, side or pixels, side or pixels)
        return _Data(shape, _sizes(images, job.megabatches), tested, classes)
    if job.source:
        periods, _ = listed(job.source)
        paths = [image["path"] for image in periods[0].splits["train"]]
        sizes = [len(period.splits["train"]) + len(period.splits["valid"]) for period in periods]
        tested = sum(len(period.splits["test"]) for period in periods)
        classes = sum(len(period.new_classes) for period in periods)
    else:
        listing = folder.listed(Path(job.dataset["root"]), job.dataset["skip_unreadable"])
        paths = [path for _, path in listing.train]
        sizes = _sizes(len(listing.train), job.megabatches)
        tested = len(listing.test)
        classes = len(listing.classes)
    height, width = _height_and_width(paths)
    return _Data((3, side or height, side or width), sizes, tested, classes)


def _height_and_width(paths: Sequence[str]) -> tuple[int, int]:
    """Those of the first readable image. UserError: none is readable; all are named."""
    for path in paths:
        size = folder.upright_size(path)
        if size:
            width, height = size
            return height, width
    raise unreadable.error_of(paths)


def _sizes(images: int, megabatches: int) -> list[int]:
    """Images of each mega-batch of an i.i.d. partition."""
    return [len(part) for part in np.array_split(range(images), megabatches)]


def _seconds(learner: Learner) -> _Seconds:
    """Seconds per example, measured on a batch; a small batch before it warms up."""
    settings = replace(learner.settings, epochs=1, patience=0)
    for count in (2, settings.batch_size):
        labels = torch.arange(count, device=learner.device) % learner.classes
        examples = Examples(torch.rand(count, *learner.shape, device=learner.device), labels)
        began = time.perf_counter()
        evaluate(learner.model, examples).cpu()
        evaluation = time.perf_counter() - began
        fit(learner.model, examples, examples, settings, learner.generators)
        training = time.perf_counter() - began - 2 * evaluation  # `fit` validates, too
    return _Seconds(max(training, evaluation) / count, evaluation / count)
