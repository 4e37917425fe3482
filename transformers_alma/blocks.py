"""Blocks of a stream's tokens, packed and memory-mapped, and the order in which a stage has them.

A block has `length` tokens: one of context, then length - 1 to predict. The context is the token
before them, the end of a text at the beginning of a part; or the first token of the model, such as
Gemma's <bos>, if its tokenizer begins every text with one. So each token is predicted once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from alma.epochs import draw_replayed, replayed_blocks
from alma.errors import UserError
from alma.token_ids import TokenIds


@dataclass(frozen=True)
class Layout:
    """How tokens are cut into blocks."""

    length: int  # tokens of a block, the context included
    end_token: int  # id that ends a text
    first_token: int | None = None  # id that begins each block; None: the token before the block

    @property
    def targets(self) -> int:
        """Tokens of a block that are predicted."""
        return self.length - 1


class PartBlocks:
    """The blocks of a part, a mega-batch or an evaluation set, in its order."""

    def __init__(self, ids: TokenIds, layout: Layout) -> None:
        self.ids = ids
        self.layout = layout

    def __len__(self) -> int:
        return math.ceil(len(self.ids) / self.layout.targets)

    def read(self, number: int) -> NDArray[np.int64]:
        """Block `number`, (length,); the last one may be shorter."""
        return self._from(number * self.layout.targets)

    def read_whole(self, number: int) -> NDArray[np.int64]:
        """Block `number`, (length,); the last one begins earlier, so that it is whole, too."""
        return self._from(min(number * self.layout.targets, len(self.ids) - self.layout.targets))

    def _from(self, start: int) -> NDArray[np.int64]:
        """The block whose first target is at `start`."""
        targets = self.ids.read(start, start + self.layout.targets)
        context = self.layout.end_token
        if self.layout.first_token is not None:
            context = self.layout.first_token
        elif start:
            context = int(self.ids.read(start - 1, start)[0])
        return np.concatenate([[context], targets]).astype(np.int64)


class StageBlocks(Dataset[dict[str, Tensor]]):
    """The blocks of a training in the order of its updates.

    An epoch has every block of the new parts, and replayed ones as `alma.stages` says; each epoch
    has its own order. Item k is the k-th block of the training, the same at every start.
    """

    def __init__(
        self,
        new: Sequence[PartBlocks],
        earlier: Sequence[PartBlocks],
        share: float,
        seeds: Sequence[int],
        blocks: int,
    ) -> None:
        """share: of all tokens, from `earlier`. seeds: of the order. blocks: of the whole training.

        UserError: a part is shorter than a block.
        """
        self.parts = [*new, *earlier]
        self.seeds = list(seeds)
        self.blocks = blocks
        for part in self.parts:
            if len(part.ids) < part.layout.targets:
                problem = f"a mega-batch of {len(part.ids):,} tokens is shorter than a block"
                flag = f"--block_size {part.layout.length}"
                raise UserError(f"{flag}: {problem}; give shorter blocks")
        numbers = [np.arange(len(part)) for part in new]
        if earlier and share:
            targets = new[0].layout.targets
            replayed = replayed_blocks(share, sum(len(part.ids) for part in new), targets)
            whole_blocks = [len(part.ids) // targets for part in earlier]
            numbers += draw_replayed(replayed, whole_blocks, np.random.default_rng(self.seeds))
        self._numbers = numbers  # of each part, those of its blocks that an epoch has
        self._ends = np.cumsum([len(part_numbers) for part_numbers in numbers])
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.blocks

    @property
    def epoch_blocks(self) -> int:
        """Blocks of an epoch."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The inputs and labels of a causal model, which shifts the labels itself, (length,)."""
        part, number = self.place(index)
        ids = torch.from_numpy(self.parts[part].read_whole(number))
        return {"input_ids": ids, "labels": ids}

    def place(self, index: int) -> tuple[int, int]:
        """The part of the block at `index` of the training, and its number in the part."""
        epoch, position = divmod(index, self.epoch_blocks)
        if epoch != self._epoch:
            rng = np.random.default_rng([*self.seeds, epoch])
            self._order = rng.permutation(self.epoch_blocks)
            self._epoch = epoch
        of_epoch = int(self._order[position])
        part = int(np.searchsorted(self._ends, of_epoch, side="right"))
        first = int(self._ends[part]) - len(self._numbers[part])
        return part, int(self._numbers[part][of_epoch - first])
