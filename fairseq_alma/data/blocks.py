"""Blocks of equal length over memory-mapped token files, and their batches, by arithmetic alone.

In break mode `none` block k is the tokens [k L, (k + 1) L) of the files joined, whatever items they hold, so
a stage of any size starts at once: there is no index over items to build and no list of batches to fill.
The blocks and batches are those of fairseq's TokenBlockDataset and EpochBatchIterator, in the same order.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, MonolingualDataset, data_utils, iterators
from numpy.typing import NDArray

from alma.stream import DTYPES, read_index


class Tokens:
    """The tokens of PREFIX.bin files, joined; or of the items `items` (n,) of them, in that order.

    Only runs are kept, 24 bytes each: a file, or a document of the chosen items (more precisely, items that
    follow each other in a file). The files must fit their indices: see `preprocessed.check_files`.
    """

    def __init__(self, prefixes: Sequence[str], items: NDArray[np.int64] | None = None):
        self.prefixes = list(prefixes)
        self.files = [_memory_map(prefix) for prefix in self.prefixes]
        if items is None:
            self.file = np.arange(len(self.files))
            first, lengths = np.zeros_like(self.file), np.array([len(file) for file in self.files])
        else:
            self.file, first, lengths = _runs([read_index(f"{p}.idx")[0] for p in self.prefixes], items)
        self.edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.shift = first - self.edges[:-1]  # from a place in the whole to the place in the run's file

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read(self, start: int, end: int) -> NDArray[np.int64]:
        """A copy of the tokens [start, end): (end - start,)."""
        tokens = np.empty(end - start, np.int64)
        run = int(np.searchsorted(self.edges, start, side="right")) - 1
        at = start
        while at < end:
            stop, shift = min(end, int(self.edges[run + 1])), self.shift[run]
            tokens[at - start : stop - start] = self.files[self.file[run]][at + shift : stop + shift]
            at, run = stop, run + 1
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"files": None}  # pickled maps would be copies of the files

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"files": [_memory_map(prefix) for prefix in state["prefixes"]]}


class TokenBlocks(FairseqDataset):
    """Blocks of `length` tokens, the last may be shorter, for a MonolingualDataset with targets `future`.

    An item is (source, target, None). The source is the target shifted by one token, before the first one
    comes eos. (Where an item of the data did not end in eos and a block begins right after it, fairseq's
    source has eos instead of that item's last token. fairseq-preprocess and data_prep end each in eos.)
    """

    def __init__(self, tokens: Tokens, length: int, eos: int):
        self.tokens, self.length, self.eos = tokens, length, eos

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.length)

    @property
    def sizes(self) -> NDArray[np.integer]:
        """(blocks,), in fairseq's dtype."""
        dtype = np.uint16 if self.length < 65535 else np.uint32
        sizes: NDArray[np.integer] = np.full(len(self), self.length, dtype)
        sizes[-1:] = len(self.tokens) - (len(self) - 1) * self.length
        return sizes

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(index) * self.length
        end = min(start + self.length, len(self.tokens))
        tokens = self.tokens.read(max(start - 1, 0), end)
        if start == 0:
            tokens = np.concatenate([[self.eos], tokens])
        # a copy: --output-dictionary-size overwrites rare words in the target, and in it only
        return torch.from_numpy(tokens[:-1].copy()), torch.from_numpy(tokens[1:]), None


class Batches(Sequence):
    """Batches of `size` consecutive entries of `order` (blocks,), made when they are asked for.

    `numbers` says which, in which order (default: all); a number past the end is an empty batch.
    """

    def __init__(self, order: NDArray[np.integer], size: int, numbers: NDArray[np.integer] | None = None):
        self.order, self.size = order, size
        self.numbers = np.arange(-(-len(order) // size)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index):
        """A batch of block numbers (size,), or for a slice some of the batches."""
        number = self.numbers[index]
        if isinstance(index, slice):
            return Batches(self.order, self.size, number)
        return self.order[number * self.size : (number + 1) * self.size]


class _BatchIterator(iterators.EpochBatchIterator):
    """fairseq's, for `Batches` instead of a list: to go on at any update is to slice an array."""

    def __init__(self, dataset: MonolingualDataset, batches: Batches, **kwargs):
        super().__init__(dataset, dataset.collater, (), **kwargs)
        self._frozen_batches = batches

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> Batches:
        """This shard's batches of an epoch, as fairseq shuffles and deals them (without prefetching)."""
        every = self._frozen_batches
        numbers = every.numbers.copy()
        if shuffle:
            with data_utils.numpy_seed(self.seed + epoch):
                np.random.shuffle(numbers)  # noqa: NPY002  as fairseq shuffles the list
        filler = np.full(-len(every) % self.num_shards, len(every))  # empty batches
        numbers = np.concatenate([numbers, filler])
        return Batches(every.order, every.size, numbers[self.shard_id :: self.num_shards])


def equal_blocks(dataset, max_tokens: int | None, max_positions) -> bool:
    """Whether `dataset` is TokenBlocks in a MonolingualDataset, and every block fits into a batch."""
    if not (isinstance(dataset, MonolingualDataset) and isinstance(dataset.dataset, TokenBlocks)):
        return False
    length = dataset.dataset.length
    return length <= (max_tokens or length) and (
        max_positions is None or (isinstance(max_positions, int) and length <= max_positions)
    )


def batch_iterator(
    dataset: MonolingualDataset,
    max_tokens: int | None,
    max_sentences: int | None,
    required_batch_size_multiple: int = 1,
    seed: int = 1,
    epoch: int = 1,
    data_buffer_size: int = 0,
    **kwargs,
) -> iterators.EpochBatchIterator:
    """What fairseq's get_batch_iterator makes of `equal_blocks`; it documents the arguments."""
    for unused in ("ignore_invalid_inputs", "disable_iterator_cache", "update_epoch_batch_itr"):
        kwargs.pop(unused, None)
    dataset.set_epoch(epoch)
    with data_utils.numpy_seed(seed + epoch):
        order = dataset.ordered_indices()
    dealt = deal(order, dataset.dataset.length, max_tokens, max_sentences, required_batch_size_multiple)
    return _BatchIterator(dataset, dealt, seed=seed, epoch=epoch, buffer_size=data_buffer_size, **kwargs)


def deal(
    order: NDArray[np.integer], length: int, max_tokens: int | None, max_sentences: int | None, multiple: int
) -> Batches:
    """What fairseq's batch_by_size makes of equal blocks of `length` tokens in the order `order` (blocks,).

    The number of blocks in a batch is a multiple of `multiple` if it can be, and a last batch that is not
    is left out.
    """
    limits = [max_sentences or len(order), max_tokens // length if max_tokens else len(order)]
    size = max(1, min(*limits, len(order)))
    if size > multiple:
        size -= size % multiple
    last = len(order) % size or size
    dropped = last % multiple
    return Batches(order[: len(order) - dropped], size)


def _memory_map(prefix: str) -> NDArray[np.integer]:
    """The tokens of PREFIX.bin, (tokens,)."""
    dtype = DTYPES[read_index(f"{prefix}.idx")[1]]
    if not os.path.getsize(f"{prefix}.bin"):  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(f"{prefix}.bin", dtype, "r").view(np.ndarray)


def _runs(
    sizes: list[NDArray[np.int32]], items: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """File, first token in it and length of every run of `items` that follow each other in a file.

    `sizes` has the tokens of each file's items, (items of the file,).
    """
    file_items = np.cumsum([0, *(len(each) for each in sizes[:-1])])  # first item of each file
    edges = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
    begins = np.flatnonzero((np.diff(items, prepend=-2) != 1) | np.isin(items, file_items))
    heads = items[begins]
    tails = items[np.append(begins[1:], len(items)) - 1]
    file = np.searchsorted(file_items, heads, side="right") - 1
    return file, edges[heads] - edges[file_items[file]], edges[tails + 1] - edges[heads]
