"""The test images of a run, and the errors of models on them."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alma.evaluations import item_losses_file, write_item_losses
from vision.data import NORMALISED
from vision.examples import AnyExamples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vision.data import MegaBatchStream
    from vision.learners import Learner


class HeldOut:
    """One test set or, in a stream by date, the test images of each period.

    The images of a period are predicted on their own, in batches of their own: so the errors are
    the same, bit for bit, whether the period was there from the start or arrived later.
    """

    def __init__(
        self, stream: "MegaBatchStream", device: torch.device, config: "Mapping[str, Any]"
    ):
        self.parts = stream.held_out
        self.periods = [period.name for period in stream.periods]
        self._dataset = stream.dataset
        self._device = device
        self._known_only = config.get("classes") == "known"
        self.labels = stream.dataset.test.labels
        self._tested = len(self.labels)  # of the first periods, which `value` counts
        if config.get("test_periods"):
            self._tested = sum(map(len, self.parts[: config["test_periods"]]))
        if self.periods:
            self._sets = [torch.from_numpy(part) for part in self.parts]
        else:
            self._sets = [torch.arange(len(self.labels))]
        self._stored = 4 * len(self.labels) * math.prod(stream.dataset.shape) > NORMALISED
        self._examples: dict[int, AnyExamples] = {}

    def __len__(self) -> int:
        """Number of test images."""
        return len(self.labels)

    def examples(self, k: int) -> AnyExamples:
        """The k-th set of images that is predicted on its own: in a stream by date, those of
        mega-batch k + 1."""
        if k not in self._examples:
            images = self._dataset.test
            chosen = self._dataset.select(images, self._sets[k], self._device, self._stored)
            self._examples[k] = chosen
        return self._examples[k]

    def predict(self, learner: "Learner", caches: dict[int, Any]) -> tuple[Tensor, float]:
        """Predicted classes of all test images, (n,), and FLOPs.

        `caches` has one for each set, see `Learner.predict`.
        """
        predicted = []
        flops = 0.0
        for k in range(len(self._sets)):
            classes, flops_of_set = learner.predict(self.examples(k), caches.setdefault(k, {}))
            predicted.append(classes)
            flops += flops_of_set
        return torch.cat(predicted), flops

    def classify(self, learner: "Learner", model: Any) -> Tensor:
        """Classes (n,) that `model`, that of `learner` or its average, predicts."""
        sets = range(len(self._sets))
        return torch.cat([learner.classify(model, self.examples(k)) for k in sets])

    def wrong(self, predicted: Tensor, learner: "Learner", megabatch: int | None = None) -> Tensor:
        """1 or 0 for each image whose class is wrong or right, NaN where it does not count, (n,).

        `predicted` are the classes of all test images, or of those of one `megabatch`.
        """
        labels = self.labels if megabatch is None else self.labels[self._sets[megabatch - 1]]
        wrong = (predicted.cpu() != labels).double()
        if self._known_only:
            wrong[labels >= learner.classes] = math.nan
        return wrong

    def tested(self, values: Tensor) -> Tensor:
        """Those of the `values` of all test images that belong to the first command's periods."""
        return values[: self._tested]

    def matrix(self, wrong: Tensor) -> list[float]:
        """The error on the images of each mega-batch."""
        return [mean(wrong[part]) for part in self.parts]

    def write(self, directory: Path, stage: int, wrong: Tensor) -> None:
        """Write the losses by image of the model of a stage on each period."""
        for megabatch, images in enumerate(self._sets, start=1):
            self.write_part(directory, stage, megabatch, wrong[images])

    def write_part(self, directory: Path, stage: int, megabatch: int, wrong: Tensor) -> None:
        """Write the losses by image on one period, of which `wrong` is a result."""
        counts = ~wrong.isnan()
        losses = torch.stack([wrong.nan_to_num(0.0), counts.double()], 1)
        write_item_losses(item_losses_file(directory, stage, megabatch), losses.numpy())


def mean(wrong: Tensor) -> float:
    """Mean of the numbers that are not NaN; 1 if there is none."""
    return float(wrong.nanmean().nan_to_num(1.0))
