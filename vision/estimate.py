"""Cost of runs before their start: `alma images --dry-run`."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from alma.stages import stages
from alma.tables import as_text
from vision import folder, presets
from vision.data import NORMALISED, VALIDATION
from vision.examples import Examples
from vision.experiment import device_of
from vision.learners import LEARNERS
from vision.learners.base import GrowingLearner, Learner
from vision.periods import listed
from vision.sweep import SweepRun
from vision.train import evaluate, fit

PROCESS, VECTORS = 3e8, 6
"""Bytes of a process without images and model; numbers for a parameter: values, gradients, best epoch,
average, and two of the optimizer."""


def table(jobs: Sequence[SweepRun]) -> str:
    """A line for each run and one for all: parameters at the start, epochs and training FLOPs of all stages,
    minutes, and memory of a process. A batch of each model is timed."""
    torch.set_num_threads(1 if len(jobs) > 1 else torch.get_num_threads())  # as `run_all` does
    lines = [["run", "learner", "parameters", "epochs", "TFLOPs", "minutes", "GB/process"]]
    timed: dict[tuple, tuple[float, float]] = {}
    total = [0, 0.0, 0.0]
    for job in jobs:
        (shape, sizes, tested, classes), settings, options = _data(job), job.settings, job.options
        device = device_of(options["device"])
        learner = LEARNERS[options["learner"]](shape, classes, settings, options["seed"], device)
        cost = learner.model.flops
        key = options["learner"], cost, settings.batch_size, settings.optimizer, settings.amp, device
        training, evaluation = timed[key] = timed.get(key) or _seconds(learner)
        schedule = stages(job.megabatches, options["waiting_time"], options["replay"])
        parts = [sizes[t - 1] for stage in schedule for t in stage.train_on]
        checked = settings.epochs * sum(max(1, int(size * VALIDATION)) for size in parts)
        seen = settings.epochs * sum(parts) - checked
        epochs, flops = len(schedule) * settings.epochs, seen * (cost.forward + cost.backward) / 1e12
        checked += tested * (len(schedule) + 1)
        minutes = (seen * training + checked * evaluation) / 60
        pixels = math.prod(shape)
        floats = min(4 * pixels * max(sum(sizes[t - 1] for t in s.train_on) for s in schedule), NORMALISED)
        memory = PROCESS + (sum(sizes) + tested) * pixels + floats + VECTORS * 4 * learner.parameters
        about = ">" * isinstance(learner, GrowingLearner) or "<" * (settings.patience > 0)
        numbers = [f"{learner.parameters:,}", f"{epochs:,}", f"{about}{flops:.3g}", f"{about}{minutes:.2g}"]
        lines.append([str(job.out), options["learner"], *numbers, f"{memory / 1e9:.1f}"])
        total = [a + b for a, b in zip(total, (epochs, flops, minutes), strict=True)]
    lines.append([f"{len(jobs)} runs", "", "", f"{total[0]:,}", *(f"{value:.3g}" for value in total[1:]), ""])
    return as_text(lines)


def _data(job: SweepRun) -> tuple[tuple[int, ...], list[int], int, int]:
    """Shape of the images, those of each mega-batch, test images, and classes; of a folder, as its files are
    listed."""
    name, side = job.dataset["name"], job.dataset["image_size"]
    if name != "folder":
        channels, own, images, tested, classes = presets.SIZES[name]
        sizes = [len(part) for part in np.array_split(range(images), job.megabatches)]
        return (channels, side or own, side or own), sizes, tested, classes
    if job.source:
        periods, _ = listed(job.source)
        first, tested = periods[0].splits["train"][0]["path"], sum(len(p.splits["test"]) for p in periods)
        sizes = [len(p.splits["train"]) + len(p.splits["valid"]) for p in periods]
        classes = sum(len(p.new_classes) for p in periods)
    else:
        listing = folder.listed(Path(job.dataset["root"]))
        first, tested, classes = listing.train[0][1], len(listing.test), len(listing.classes)
        sizes = [len(part) for part in np.array_split(range(len(listing.train)), job.megabatches)]
    height, width, channels = folder.read_image(first, None).shape
    return (channels, side or height, side or width), sizes, tested, classes


def _seconds(learner: Learner) -> tuple[float, float]:
    """Seconds of an example in training and in evaluation, of a batch after a small one."""
    settings = replace(learner.settings, epochs=1, patience=0)
    for count in (2, settings.batch_size):
        labels = torch.arange(count, device=learner.device) % learner.classes
        examples = Examples(torch.rand(count, *learner.shape, device=learner.device), labels)
        began = time.perf_counter()
        evaluate(learner.model, examples).cpu()
        evaluation = time.perf_counter() - began
        fit(learner.model, examples, examples, settings, learner.generators)
        training = time.perf_counter() - began - 2 * evaluation  # it validates, too
    return max(training, evaluation) / count, evaluation / count
