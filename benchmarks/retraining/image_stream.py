"""Weekly images made from MNIST, with three kinds of change: made streams of real images.

rotation   3 degrees a week
classes    8 and 9 come in week 24; before, there are none
labels     the share of 0 to 4 goes from 95% to 5% over the weeks

A model is a logistic regression on the 4 newest weeks of 400 images; 200 further images a week are
tested.
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.inputs import Inputs

WEEKS = 60
_WINDOW = 4
_TRAINED = 400
_TESTED = 200
_DEGREES = 3.0
_NEW_CLASSES = 24  # week of the classes 8 and 9


def rotation(inputs: Inputs) -> tuple[list[str], Array]:
    """Weeks as numbers, and error in percent; images turn."""
    return _errors(inputs.data, _evenly, _DEGREES)


def classes(inputs: Inputs) -> tuple[list[str], Array]:
    """Weeks as numbers, and error in percent; new classes come."""
    return _errors(inputs.data, _with_new_classes, 0.0)


def labels(inputs: Inputs) -> tuple[list[str], Array]:
    """Weeks as numbers, and error in percent; the shares of classes shift."""
    return _errors(inputs.data, _with_shifting_shares, 0.0)


def _evenly(digits: Array, week: int) -> Array:
    return np.ones(len(digits))


def _with_new_classes(digits: Array, week: int) -> Array:
    return np.where((digits >= 8) & (week < _NEW_CLASSES), 0.0, 1.0)


def _with_shifting_shares(digits: Array, week: int) -> Array:
    share = 0.95 - 0.9 * week / (WEEKS - 1)
    return np.where(digits < 5, share, 1 - share)


def _errors(
    data: Path, weights: Callable[[Array, int], Array], degrees: float
) -> tuple[list[str], Array]:
    """Draw each week's images by the weights of their digits, and turn them."""
    from scipy.ndimage import rotate

    images = _idx(data / "MNIST" / "raw" / "train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    digits = _idx(data / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz", 8)
    random = np.random.default_rng(0)
    left = np.ones(len(digits))
    inputs = []
    targets = []
    for week in range(WEEKS):
        chances = left * weights(digits, week)
        count = _TRAINED + _TESTED
        drawn = random.choice(len(digits), count, replace=False, p=chances / chances.sum())
        left[drawn] = 0
        pixels = images[drawn].astype(np.float32) / 255
        if degrees:
            pixels = rotate(pixels, degrees * week, axes=(1, 2), reshape=False, order=1)
        inputs.append(pixels.reshape(count, -1))
        targets.append(digits[drawn])
    return matrix_of_errors(inputs, targets, _TRAINED)


def _idx(path: Path, header: int) -> Any:
    """The bytes of an IDX file after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)[header:]


def matrix_of_errors(
    inputs: list[Array], targets: list[Array], trained: int, decay: float = 1e-3
) -> tuple[list[str], Array]:
    """Weeks as numbers, and error in percent of each week's model on each week, (models, weeks).

    inputs   of each week, (images, features)
    targets  of each week, (images,)
    trained  images of a week to train on; the others are tested
    decay    of the weights
    """
    from sklearn.linear_model import SGDClassifier  # optional

    weeks = len(inputs)
    tests = np.concatenate([pixels[trained:] for pixels in inputs])
    answers = np.concatenate([classes[trained:] for classes in targets])
    errors = np.empty((weeks, weeks))
    for until in range(weeks):
        window = range(max(0, until - _WINDOW + 1), until + 1)
        pixels = np.concatenate([inputs[week][:trained] for week in window])
        classes = np.concatenate([targets[week][:trained] for week in window])
        model = SGDClassifier(loss="log_loss", alpha=decay, max_iter=8, tol=None, random_state=0)
        is_wrong = model.fit(pixels, classes).predict(tests) != answers
        errors[until] = 100 * is_wrong.reshape(weeks, -1).mean(1)
    return [str(week + 1) for week in range(weeks)], errors
