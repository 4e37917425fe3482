"""The blocks of fairseq's TokenBlockDataset over memory-mapped token files, computed without an
index.

In break mode `none`, block k is the tokens [k L, (k + 1) L) of the concatenated files, across
items.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, MonolingualDataset
from numpy.typing import NDArray

from alma.epochs import draw_replayed, replayed_blocks
from alma.errors import UserError
from alma.stream import DTYPES, read_index


class Tokens:
    """The concatenated tokens of PREFIX.bin files, or of their items `items` (n,), in that order.

    Memory: 24 bytes per run of consecutive tokens, which is a file or, with `items`, consecutive
    items of a file (usually a document). The files must match their indices: see
    `preprocessed.checked`.
    """

    def __init__(self, prefixes: Sequence[str], items: NDArray[np.int64] | None = None):
        self.prefixes = list(prefixes)
        self.files = [_memory_map(prefix) for prefix in self.prefixes]
        # For each run: the number of its file, its first token in that file, its length in tokens.
        if items is None:
            self.file = np.arange(len(self.files))
            first = np.zeros_like(self.file)
            lengths = np.array([len(file) for file in self.files])
        else:
            sizes = [read_index(f"{prefix}.idx")[0] for prefix in self.prefixes]
            file_items = np.cumsum([0, *map(len, sizes[:-1])])  # first item of each file
            edges = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
            is_head = (np.diff(items, prepend=-2) != 1) | np.isin(items, file_items)
            begins = np.flatnonzero(is_head)
            heads = items[begins]
            tails = items[np.append(begins[1:], len(items)) - 1]
            self.file = np.searchsorted(file_items, heads, side="right") - 1
            first = edges[heads] - edges[file_items[self.file]]
            lengths = edges[tails + 1] - edges[heads]
        self.edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        # Add `shift` to a position in the concatenation to get the position in the run's file.
        self.shift = first - self.edges[:-1]

    def __len__(self) -> int:
        return int(self.edges[-1])

    def read(self, start: int, end: int) -> NDArray[np.int64]:
        """A copy of the tokens [start, end): (end - start,)."""
        tokens = np.empty(end - start, np.int64)
        run = int(np.searchsorted(self.edges, start, side="right")) - 1
        position = start
        while position < end:
            stop = min(end, int(self.edges[run + 1]))
            shift = self.shift[run]
            file = self.files[self.file[run]]
            tokens[position - start : stop - start] = file[position + shift : stop + shift]
            position = stop
            run += 1
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"files": None}  # pickling a map would copy the file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.files = [_memory_map(prefix) for prefix in self.prefixes]


class TokenBlocks(FairseqDataset):
    """Blocks of `length` tokens (the last may be shorter), as MonolingualDataset reads them.

    The dataset must use the targets "future", the next tokens.

    An item is (source, target, None): the source is the target shifted right by one token, with eos
    before the first. Every item of the data must end in eos, as fairseq-preprocess and data_prep
    write it; after another item, fairseq's source would begin with eos instead of its last token.
    """

    def __init__(self, tokens: Tokens, length: int, eos: int):
        self.tokens = tokens
        self.length = length
        self.eos = eos

    def __len__(self) -> int:
        return (len(self.tokens) + self.length - 1) // self.length

    @property
    def sizes(self) -> NDArray[np.integer]:
        """Tokens per block, (blocks,), in fairseq's dtype."""
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
        # A copy: --output-dictionary-size replaces rare words in the target only.
        return torch.from_numpy(tokens[:-1].copy()), torch.from_numpy(tokens[1:]), None


class ReplayBlocks(TokenBlocks):
    """The blocks of a stage, followed by the replayed blocks of `alma.stages`.

    They are `share` of all tokens, chosen at random from the `earlier` mega-batches. The short
    block at the end of a mega-batch is not chosen; a mega-batch with too few blocks repeats them.
    UserError: a mega-batch without a whole block.
    """

    def __init__(self, new: TokenBlocks, earlier: Sequence[Tokens], share: float, seed: int):
        super().__init__(new.tokens, new.length, new.eos)
        self.new = new
        self.earlier = [TokenBlocks(tokens, new.length, new.eos) for tokens in earlier]
        replayed = replayed_blocks(share, len(new.tokens), new.length)
        whole_blocks = [len(tokens) // new.length for tokens in earlier]
        if 0 in whole_blocks:
            tokens = earlier[whole_blocks.index(0)]
            problem = f"an earlier mega-batch of {len(tokens)} tokens is shorter than"
            remedy = f"--tokens-per-sample {new.length}: give shorter blocks"
            raise UserError(f"--replay-share: {problem} {remedy}")
        # numbers of the replayed blocks of each earlier mega-batch
        self.chosen = draw_replayed(replayed, whole_blocks, np.random.default_rng(seed))
        self.edges = np.cumsum([len(new), *map(len, self.chosen)])

    def __len__(self) -> int:
        return int(self.edges[-1])

    @property
    def sizes(self) -> NDArray[np.integer]:
        """Tokens per block, (blocks,)."""
        return np.pad(self.new.sizes, (0, len(self) - len(self.new)), constant_values=self.length)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        part = int(np.searchsorted(self.edges, index, side="right"))
        if part == 0:
            return self.new[index]
        block = self.chosen[part - 1][index - self.edges[part - 1]]
        return self.earlier[part - 1][int(block)]


class LanguageModelDataset(MonolingualDataset):
    """fairseq's MonolingualDataset whose batches say whether they have padding: `padded`."""

    def num_tokens_vec(self, indices: NDArray[np.integer]) -> NDArray[np.integer]:
        """Tokens of the items `indices`, (n,); spares fairseq a Python call for each item."""
        return self.sizes[indices]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """As fairseq's, plus `padded`; the batch is still on the host, so no GPU sync is needed.

        Blocks of one length are stacked: fairseq copies each row into a padded tensor.
        """
        lengths = {len(sample["source"]) for sample in samples}
        pads = self.fixed_pad_length or self.pad_to_bsz
        has_one_target = bool(samples) and isinstance(samples[0]["target"], torch.Tensor)
        if len(lengths) == 1 and has_one_target and not pads:
            batch = _stacked(samples, lengths.pop())
        else:
            batch = super().collater(samples)
        if batch:
            batch["padded"] = bool(batch["net_input"]["src_tokens"].eq(self.vocab.pad()).any())
        return batch


def _stacked(samples: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """fairseq's batch (B, T) of samples of T tokens each."""
    tokens = torch.stack([sample["source"] for sample in samples])
    return {
        "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.int64),
        "nsentences": len(samples),
        "ntokens": tokens.numel(),
        "net_input": {
            "src_tokens": tokens,
            "src_lengths": torch.full((len(samples),), length),
        },
        "target": torch.stack([sample["target"] for sample in samples]),
    }


def _memory_map(prefix: str) -> NDArray[np.integer]:
    """The tokens of PREFIX.bin, (tokens,)."""
    dtype = DTYPES[read_index(f"{prefix}.idx")[1]]
    if not os.path.getsize(f"{prefix}.bin"):  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(f"{prefix}.bin", dtype, "r").view(np.ndarray)
