"""How long a stage takes to start: load_dataset and the first batch, against fairseq's language_modeling.

The peer reads the same files without verifying them, and indexes their items by TokenBlockDataset; alma_lm
compares them with the checksums in stream.json, which is most of its time. Imports and the dictionary do
not count. Blocks of 512 tokens, 8 in a batch, uint16, files in the page cache.
"""

import logging
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from tqdm import tqdm

from alma.stream import VERSION, FileInfo, Part, Stream, write_index
from benchmarks.timing import spread
from fairseq_alma.task import AlmaLMConfig, AlmaLMTask

SHAPES = ((5, 70), (20, 70), (100, 70), (20, 7), (20, 700))  # million tokens, tokens of an item
VOCABULARY = 50_000
SETTINGS: dict[str, Any] = {"dataset_impl": "mmap", "batch_size": None, "use_plasma_view": False}
SETTINGS |= {"tokens_per_sample": 512}


def write_stream(directory: Path, tokens: int, item: int) -> int:
    """A stream of one mega-batch of random `tokens`, in items of `item` on average; returns their number."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 2 * item, tokens // item).astype(np.int32)
    ids = rng.integers(4, VOCABULARY + 4, sizes.sum(), dtype=np.uint16)
    ids[np.cumsum(sizes) - 1] = 2  # eos

    def part(name: str, prefix: str) -> Part:
        (directory / prefix).parent.mkdir(exist_ok=True)
        ids.tofile(directory / f"{prefix}.bin")
        write_index(directory / f"{prefix}.idx", sizes, 8)
        files = {file: FileInfo.of(directory / file) for file in (f"{prefix}.bin", f"{prefix}.idx")}
        return Part(name, prefix, len(ids), len(ids), 1, len(sizes), len(ids), {"random": len(ids)}, files)

    train = part("megabatch_00", "megabatch_00/train")
    items, ids, sizes = len(sizes), np.array([2], np.uint16), np.ones(1, np.int32)
    Stream(
        directory, VERSION, 1, VOCABULARY, (train,), part("valid", "valid"), part("test", "test"), {}, {}
    ).write()
    for suffix in (".bin", ".idx"):  # where fairseq's task looks for it
        os.link(directory / f"megabatch_00/train{suffix}", directory / f"train{suffix}")
    return items


def seconds(task: FairseqTask) -> float:
    """From nothing loaded to the first batch."""
    started = time.perf_counter()
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
    return time.perf_counter() - started


def verifying(task: AlmaLMTask) -> float:
    """The part of alma_lm's `seconds` that goes into checksums."""
    assert task.stream is not None
    started = time.perf_counter()
    task.stream.check(task.stream.megabatches)
    return time.perf_counter() - started


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each number of tokens and of items; the first round, a warm-up, is left out."""
    logging.disable(logging.INFO)
    rows = []
    for millions, item in tqdm(SHAPES, disable=None, unit="stream"):
        with tempfile.TemporaryDirectory() as directory:
            items = write_stream(Path(directory), millions * 10**6, item)
            ours = AlmaLMTask(AlmaLMConfig(data=directory, **SETTINGS), Dictionary())
            peer = LanguageModelingTask(LanguageModelingConfig(data=directory, **SETTINGS), Dictionary())
            rounds = [(seconds(ours), verifying(ours), seconds(peer)) for _ in range(repeats + 1)][1:]
        rows.append(
            {
                "tokens": f"{millions}M",
                "items": f"{items / 1e6:.2f}M",
                "alma_lm, s": f"{median(own for own, _, _ in rounds):.3f}",
                "of it checksums, s": f"{median(check for _, check, _ in rounds):.3f}",
                "fairseq, s": f"{median(other for _, _, other in rounds):.3f}",
                "fairseq / alma_lm": spread([other / own for own, _, other in rounds]),
            }
        )
    logging.disable(logging.NOTSET)
    return rows
