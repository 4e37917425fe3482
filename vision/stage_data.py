"""The examples of each stage of a run: training and validation images, with replay of earlier
ones."""

from collections.abc import Sequence

import numpy as np
import torch

from alma.stages import Stage
from vision.data import MegaBatchStream
from vision.examples import AnyExamples
from vision.train import Replay


class StageData:
    """Training and validation examples of the stages of a `schedule`.

    With a `replay_share`, epochs are those of `alma.stages`, and a stage's validation examples have
    the same share of old ones, sampled once per stage.
    """

    def __init__(
        self,
        stream: MegaBatchStream,
        schedule: Sequence[Stage],
        device: torch.device,
        replay_share: float = 0.0,
    ):
        self._stream = stream
        self._schedule = schedule
        self._device = device
        self._replay_share = replay_share
        self._valid: tuple[int, AnyExamples] | None = None
        self.black = stream.dataset.black.to(device)

    def train(self, index: int) -> AnyExamples:
        """Training examples of stage `index`; with replay, also the old ones to sample from."""
        return self._examples(index, 0)

    def valid(self, index: int) -> AnyExamples:
        """Validation examples of stage `index`; those of the last call are cached."""
        if self._valid is None or self._valid[0] != index:
            examples = self._examples(index, 1)
            self._valid = (index, examples)
        return self._valid[1]

    def replay(self, index: int, part: int = 0) -> Replay | None:
        """How stage `index` samples old examples; None if it uses all of its examples.

        `part` 0: for each training epoch; 1: for the validation set.
        """
        stage = self._schedule[index]
        if not (self._replay_share and stage.earlier):
            return None
        sizes = list(self.sizes(index, part).values())
        earlier_sizes = sizes[: len(stage.earlier)]
        new_sizes = sizes[len(stage.earlier) :]
        return Replay(tuple(earlier_sizes), sum(new_sizes), self._replay_share)

    def sizes(self, index: int, part: int = 0) -> dict[int, int]:
        """Number of training (`part` 1: validation) examples of each mega-batch t of stage
        `index`."""
        return {t: len(self._stream.split(t)[part]) for t in self._schedule[index].train_on}

    def classes(self, index: int) -> int:
        """Number of classes in stage `index`; in a stream by date, those that appeared so far."""
        periods = self._stream.periods[: self._schedule[index].last]
        return sum(len(period.new_classes) for period in periods) or self._stream.dataset.classes

    def _examples(self, index: int, part: int) -> AnyExamples:
        dataset = self._stream.dataset
        megabatches = self._schedule[index].train_on
        indices = np.concatenate([self._stream.split(t)[part] for t in megabatches])
        replay = self.replay(index, part)
        if replay and part:
            random = np.random.RandomState([self._stream.seed, index])
            indices = indices[replay.sample(random)]
        # With replay, a stage reads few of its training examples: normalising them all would take
        # longer than training.
        stored = replay is not None and not part
        return dataset.select(dataset.train, torch.from_numpy(indices), self._device, stored)
