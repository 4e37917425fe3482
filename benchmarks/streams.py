"""Streams of random tokens, for benchmarks of language models."""

import os
from pathlib import Path

import numpy as np

from alma.stream import SPECIALS, VERSION, FileInfo, Part, Stream, write_index

VOCABULARY = 50_000


def write_stream(directory: Path, tokens: int, item: int, vocabulary: int = VOCABULARY) -> int:
    """A stream of two equal mega-batches of random `tokens`, in items of `item` on average; returns
    how many items one has."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 2 * item, tokens // item).astype(np.int32)
    ids = rng.integers(SPECIALS, vocabulary + SPECIALS, sizes.sum(), dtype=np.uint16)
    ids[np.cumsum(sizes) - 1] = 2  # eos

    def part(name: str, prefix: str) -> Part:
        (directory / prefix).parent.mkdir(exist_ok=True)
        ids.tofile(directory / f"{prefix}.bin")
        write_index(directory / f"{prefix}.idx", sizes, 8)
        files = {file: FileInfo.of(directory / file) for file in (f"{prefix}.bin", f"{prefix}.idx")}
        return Part(
            name, prefix, len(ids), len(ids), 1, len(sizes), len(ids), {"random": len(ids)}, files
        )

    (directory / "dict.txt").write_text("".join(f"token{i} 1\n" for i in range(vocabulary)))
    train = tuple(part(name, f"{name}/train") for name in ("megabatch_00", "megabatch_01"))
    items = len(sizes)
    # the other parts have one item, of eos alone
    ids = np.array([2], np.uint16)
    sizes = np.ones(1, np.int32)
    valid = part("valid", "valid")
    test = part("test", "test")
    Stream(directory, VERSION, 1, vocabulary, train, valid, test, {}, {}).write()
    for suffix in (".bin", ".idx"):  # where fairseq's task looks for it
        os.link(directory / f"megabatch_00/train{suffix}", directory / f"train{suffix}")
    return items
