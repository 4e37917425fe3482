"""Weekly images made from CIFAR-10 whose light goes with the seasons: a made stream of real images.

In the darkest week brightness is .35 of that of the first week, red 30% less and blue 30% more; a
year has 52 weeks. A model is a logistic regression on the 4 newest weeks of 300 images,
200 further images a week are tested. Inputs are colours averaged over 4 x 4 pixels, and histograms
of the directions of edges, both standardised by the first week.
"""

from pathlib import Path

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.image_stream import matrix_of_errors
from benchmarks.retraining.inputs import Inputs

FILES = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
"""The binary version of https://www.cs.toronto.edu/~kriz/cifar.html, below the data root."""
_WEEKS = 100
_YEAR = 52
_TRAINED = 300
_TESTED = 200
_DARKEST = 0.35
_COLOUR = 0.3
_DIRECTIONS = 8
_DECAY = 0.1
_RECORD = 1 + 3 * 32 * 32
"""Bytes of a label and an image."""


def light(inputs: Inputs) -> tuple[list[str], Array]:
    """Weeks as numbers, and error in percent."""
    labels, images = _read([inputs.data / name for name in FILES])
    drawn = np.random.default_rng(0).permutation(len(labels))
    count = _TRAINED + _TESTED
    features = []
    targets = []
    for week in range(_WEEKS):
        chosen = drawn[week * count : (week + 1) * count]
        features.append(_features(_lit(images[chosen], week)))
        targets.append(labels[chosen])
    usual = features[0].mean(0)
    spread = features[0].std(0)
    standardised = [(of_week - usual) / spread for of_week in features]
    return matrix_of_errors(standardised, targets, _TRAINED, _DECAY)


def _read(paths: list[Path]) -> tuple[Array, Array]:
    """Labels (images,), and images from 0 to 1 (images, 3, 32, 32)."""
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    records = records.reshape(-1, _RECORD)
    images = records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255
    return records[:, 0], images


def _lit(images: Array, week: int) -> Array:
    """The images in the light of a week."""
    dark = (1 - np.cos(2 * np.pi * week / _YEAR)) / 2  # 0 in week 0, 1 half a year later
    brightness = 1 - (1 - _DARKEST) * dark
    colours = brightness * np.array([1 - _COLOUR * dark, 1.0, 1 + _COLOUR * dark])
    return np.minimum(images * colours[:, None, None], 1.0)


def _features(images: Array) -> Array:
    """Averaged colours and directions of edges, (images, features)."""
    count = len(images)
    colours = images.reshape(count, 3, 8, 4, 8, 4).mean((3, 5)).reshape(count, -1)
    grey = images.mean(1)
    down, right = np.gradient(grey, axis=(1, 2))
    strength = np.hypot(down, right)
    direction = np.floor((np.arctan2(down, right) / np.pi + 1) / 2 * _DIRECTIONS) % _DIRECTIONS
    histograms = []
    for bin_ in range(_DIRECTIONS):
        in_bin = np.where(direction == bin_, strength, 0.0)
        histograms.append(in_bin.reshape(count, 4, 8, 4, 8).sum((2, 4)).reshape(count, -1))
    return np.hstack([colours, *histograms])
