"""Stage finalise: the files of the stream, in the folder stream/ of the work directory.

Reads bucket-NNNNN.{bin,npz} and the tokenizer. Writes .bin, .idx and .keys of each split and, in the work
directory, SPLIT.json with its record; then the tokenizer's files and dict.txt.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np

from alma.files import atomic_write, fsync_directory, write_json_atomic
from alma.stream import SUFFIXES, FileInfo, Part, write_index
from data_prep.dictionary import DICTIONARY, SPECIALS, dictionary_text
from data_prep.encode import load_encoder
from data_prep.plan import load_plan
from data_prep.work import Workspace


def finalise_part(
    space: Workspace, name: str, buckets: list[int], sources: dict[str, int], code: int
) -> None:
    """Concatenate the buckets of a split; `sources`: its words by source, `code`: fairseq's dtype code."""
    prefix = f"{name}/train" if name.startswith("megabatch") else name
    path = space.finished / prefix
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (space.finished, space.directory):  # SPLIT.json must not outlive them in a power cut
        fsync_directory(folder)
    with atomic_write(f"{path}.bin", "wb") as file:
        for bucket in buckets:
            with open(space.file("bucket", bucket, "bin"), "rb") as ids:
                shutil.copyfileobj(ids, file, 1 << 20)
    sums = {"documents": 0, "words": 0, "bytes": 0}
    sizes = []
    with atomic_write(f"{path}.keys", "wb") as file:
        for bucket in buckets:
            with np.load(space.file("bucket", bucket, "npz")) as arrays:
                sizes.append(arrays["sizes"])
                file.write(arrays["keys"].tobytes())
                sums = {key: value + int(arrays[key]) for key, value in sums.items()}
    lengths = np.concatenate(sizes)
    write_index(f"{path}.idx", lengths, code)
    part = Part(
        name=name,
        prefix=prefix,
        tokens=int(lengths.sum(dtype=np.int64)),
        items=len(lengths),
        sources=sources,
        files={f"{prefix}{suffix}": FileInfo.of(f"{path}{suffix}") for suffix in SUFFIXES},
        **sums,
    )
    write_json_atomic(space.directory / f"{name}.json", dataclasses.asdict(part))


def copy_atomic(source: str | Path, target: Path) -> None:
    """Copy a small file; `target` is whole or absent."""
    with atomic_write(target, "wb") as file:
        file.write(Path(source).read_bytes())


def finalise_vocabulary(space: Workspace) -> dict[str, FileInfo]:
    """Write dict.txt, with the counts of the first mega-batch, and the tokenizer's files."""
    encoder = load_encoder(space.directory)
    for name in encoder.files:
        copy_atomic(space.directory / name, space.finished / name)
    counts = np.zeros(encoder.dictionary_size, np.int64)
    for bucket in load_plan(space).buckets(0):
        with np.load(space.file("bucket", bucket, "npz")) as arrays:
            counts += arrays["counts"]
    with atomic_write(space.finished / DICTIONARY) as file:
        file.write(dictionary_text(encoder.tokens, counts[SPECIALS:]))
    return {name: FileInfo.of(space.finished / name) for name in (DICTIONARY, *encoder.files)}
