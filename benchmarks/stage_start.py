"""How long a stage takes to start: load_dataset and the first batch, against fairseq's language_modeling.

The peer reads the same files without verifying them, and indexes their items by TokenBlockDataset; alma_lm
compares them with the checksums in stream.json, which is most of its time. Imports and the dictionary do
not count. Blocks of 512 tokens, 8 in a batch, uint16, files in the page cache.
"""

import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from tqdm import tqdm

from alma.stream import VERSION, FileInfo, Part, Stream, write_index
from benchmarks.timing import Rows, ratios, turns
from fairseq_alma.task import AlmaLMConfig, AlmaLMTask

SHAPES = ((5, 70), (20, 70), (100, 70), (20, 7), (20, 700))  # million tokens, tokens of an item
VOCABULARY = 50_000
SETTINGS: dict[str, Any] = {"dataset_impl": "mmap", "batch_size": None, "use_plasma_view": False}
SETTINGS |= {"tokens_per_sample": 512, "seed": 1}


def write_stream(directory: Path, tokens: int, item: int, vocabulary: int = VOCABULARY) -> int:
    """A stream of two equal mega-batches of random `tokens`, in items of `item` on average; returns how many
    items one has."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 2 * item, tokens // item).astype(np.int32)
    ids = rng.integers(4, vocabulary + 4, sizes.sum(), dtype=np.uint16)
    ids[np.cumsum(sizes) - 1] = 2  # eos

    def part(name: str, prefix: str) -> Part:
        (directory / prefix).parent.mkdir(exist_ok=True)
        ids.tofile(directory / f"{prefix}.bin")
        write_index(directory / f"{prefix}.idx", sizes, 8)
        files = {file: FileInfo.of(directory / file) for file in (f"{prefix}.bin", f"{prefix}.idx")}
        return Part(name, prefix, len(ids), len(ids), 1, len(sizes), len(ids), {"random": len(ids)}, files)

    (directory / "dict.txt").write_text("".join(f"token{i} 1\n" for i in range(vocabulary)))
    train = tuple(part(name, f"{name}/train") for name in ("megabatch_00", "megabatch_01"))
    items, ids, sizes = len(sizes), np.array([2], np.uint16), np.ones(1, np.int32)
    valid, test = part("valid", "valid"), part("test", "test")
    Stream(directory, VERSION, 1, vocabulary, train, valid, test, {}, {}).write()
    for suffix in (".bin", ".idx"):  # where fairseq's task looks for it
        os.link(directory / f"megabatch_00/train{suffix}", directory / f"train{suffix}")
    return items


def start(task: FairseqTask) -> None:
    """From nothing loaded to the first batch."""
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=8 * 512,
        max_positions=512,
        required_batch_size_multiple=8,
        disable_iterator_cache=True,
    )
    first = next(batches.next_epoch_itr())
    assert first["target"].shape == (8, 512)


def measure(repeats: int) -> Rows:
    """A row for each number of tokens and of items."""
    logging.disable(logging.INFO)
    rows = []
    for millions, item in tqdm(SHAPES, disable=None, unit="stream"):
        with tempfile.TemporaryDirectory() as directory:
            items = write_stream(Path(directory), millions * 10**6, item)
            ours = AlmaLMTask(AlmaLMConfig(data=directory, **SETTINGS), Dictionary())
            peer = LanguageModelingTask(LanguageModelingConfig(data=directory, **SETTINGS), Dictionary())
            kinds = {"alma_lm": partial(start, ours), "fairseq": partial(start, peer)}
            assert ours.stream is not None
            checksums = partial(ours.stream.check, ours.stream.megabatches[:1])
            measured = turns({**kinds, "checksums": checksums}, repeats)
        medians = {name: f"{median(turn[name] for turn in measured):.3f}" for name in measured[0]}
        rows.append(
            {
                "tokens": f"{millions}M",
                "items": f"{items / 1e6:.2f}M",
                "alma_lm, s": medians["alma_lm"],
                "of it checksums, s": medians["checksums"],
                "fairseq, s": medians["fairseq"],
                "fairseq / alma_lm": ratios(measured, "fairseq", "alma_lm"),
            }
        )
    logging.disable(logging.NOTSET)
    return rows
