"""Small streams written by hand, and damaged streams with matching checksums."""

import dataclasses
import random
from pathlib import Path

import numpy as np

from alma.stream import VERSION, FileInfo, Part, Stream, write_index

TOKENS = 60


def write_part(
    out: Path, name: str, documents: list[list[list[int]]], sources: dict[str, int], first: int
):
    """Documents are lists of lines of ids. Keys begin at `first` and ascend, except those of
    valid."""
    prefix = f"{name}/train" if name.startswith("megabatch") else name
    (out / prefix).parent.mkdir(parents=True, exist_ok=True)
    items = []
    for document in documents:
        items += [[*line, 2] for line in document]
        items.append([2])
    np.concatenate(items).astype(np.uint16).tofile(out / f"{prefix}.bin")
    write_index(out / f"{prefix}.idx", np.array(list(map(len, items))), 8)
    keys = [(i * 2**120 + first * 2**32).to_bytes(16) for i in range(len(documents))]
    (out / f"{prefix}.keys").write_bytes(b"".join(keys[::-1] if name == "valid" else keys))
    files = {
        f"{prefix}{suffix}": FileInfo.of(out / f"{prefix}{suffix}")
        for suffix in (".bin", ".idx", ".keys")
    }
    tokens = sum(map(len, items))
    return Part(
        name, prefix, sum(sources.values()), tokens, len(documents), len(items), 1, sources, files
    )


def write_stream(
    out: Path, parts: list[list], sources: list[dict[str, int]] | None = None, files=None
) -> Path:
    """A stream of the given parts: mega-batches, then valid and test."""
    out.mkdir()
    files = {"dict.txt": "".join(f"u{i} 1\n" for i in range(TOKENS)), **(files or {})}
    for name, text in files.items():
        (out / name).write_text(text, "utf-8")
    names = [*(f"megabatch_{t:02d}" for t in range(len(parts) - 2)), "valid", "test"]
    megabatches = []
    first = 1
    for i, (name, documents) in enumerate(zip(names, parts, strict=True)):
        megabatches.append(
            write_part(out, name, documents, sources[i] if sources else {"web": 100}, first)
        )
        first += len(documents)
    infos = {name: FileInfo.of(out / name) for name in files}
    tokens = files["dict.txt"].count("\n")
    Stream(
        out,
        VERSION,
        0,
        tokens,
        tuple(megabatches[:-2]),
        megabatches[-2],
        megabatches[-1],
        {},
        infos,
    ).write()
    return out


def random_documents(
    seed: int, number: int, low: int = 4, high: int = 4 + TOKENS
) -> list[list[list[int]]]:
    """Documents that each repeat a few tokens, as real ones do."""
    rng = random.Random(seed)
    documents = []
    for _ in range(number):
        words = rng.choices(range(low, high), k=6)
        documents.append(
            [rng.choices(words, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 9))]
        )
    return documents


def bless(out: Path, **changes: object) -> None:
    """Update the checksums in stream.json, as a faulty writer would; `changes` go to
    megabatch_00."""
    stream = Stream.load(out)

    def measured(files):
        return {name: FileInfo.of(out / name) for name in files}

    def again(parts):
        return tuple(dataclasses.replace(part, files=measured(part.files)) for part in parts)

    first, *later = again(stream.megabatches)
    valid, test = again([stream.valid, stream.test])
    dataclasses.replace(
        stream,
        megabatches=(dataclasses.replace(first, **changes), *later),
        valid=valid,
        test=test,
        files=measured(stream.files),
        held_out=again(stream.held_out),
        held_out_valid=again(stream.held_out_valid),
    ).write()
