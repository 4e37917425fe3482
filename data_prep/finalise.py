"""Stage finalise: the files of the stream, from the buckets."""

import dataclasses
from pathlib import Path

import numpy as np

from alma.files import atomic_write, fsync_directory, write_json_atomic
from alma.stream import DTYPES, SPECIALS, SUFFIXES, FileInfo, Part, write_index
from data_prep.dictionary import DICTIONARY, dictionary_text
from data_prep.encode import load_encoder
from data_prep.near_duplicates import ENTRY
from data_prep.plan import load_plan
from data_prep.work import Workspace, damaged, join_files, mapped, open_items, read_arrays
from data_prep.written import JSON_KINDS, WRITTEN, write_json_kind, write_megatron

NEAR = ".near"  # suffix of the file with the entries of documents, beside a mega-batch


def finalise_part(
    space: Workspace,
    name: str,
    buckets: list[int],
    sources: dict[str, int],
    code: int,
    ranges: int,
    arrival: int | None,
    write: str,
) -> None:
    """Concatenate the buckets of a part, and write its Part to NAME.json in the work directory.

    `sources`: its words by source. `code`: fairseq's code of the dtype. `arrival`: number of the
    mega-batch whose entries, from `ranges` files past-NNNNN.bin, are kept beside the part; None: no
    entries are kept. `write`: a key of WRITTEN.
    """
    prefix = f"{name}/train" if name.startswith("megabatch") else name
    path = space.finished / prefix
    path.parent.mkdir(parents=True, exist_ok=True)
    # After a power failure NAME.json must not exist without these folders, so flush them first.
    fsync_directory(space.finished)
    fsync_directory(space.directory)
    lengths, sums = _join_buckets(space, name, path, buckets)
    tokens = int(lengths.sum(dtype=np.int64))
    if Path(f"{path}.bin").stat().st_size != tokens * np.dtype(DTYPES[code]).itemsize:
        raise damaged(space.directory / "bucket-*.bin")
    write_index(f"{path}.idx", lengths, code)
    suffixes = [*SUFFIXES]
    if arrival is not None:
        _write_entries(space, Path(f"{path}{NEAR}"), ranges, arrival)
        suffixes.append(NEAR)
    if write == "megatron":
        write_megatron(path, np.asarray(lengths), code, sums["documents"])
    elif write in JSON_KINDS:
        lines = (space.file("bucket", bucket, "jsonl") for bucket in buckets)
        write_json_kind(write, path, lines)
    suffixes += WRITTEN[write]
    part = Part(
        name=name,
        prefix=prefix,
        tokens=tokens,
        items=len(lengths),
        sources=sources,
        files={f"{prefix}{suffix}": FileInfo.of(f"{path}{suffix}") for suffix in suffixes},
        words=sums["words"],
        documents=sums["documents"],
        bytes=sums["bytes"],
    )
    write_json_atomic(space.directory / f"{name}.json", dataclasses.asdict(part))


def _join_buckets(
    space: Workspace, name: str, path: Path, buckets: list[int]
) -> tuple[np.ndarray, dict[str, int]]:
    """Write the .bin and .keys of a part.

    Returns (items,) the sizes of its items, memory-mapped, and its documents, words and bytes.
    """
    join_files(Path(f"{path}.bin"), (space.file("bucket", bucket, "bin") for bucket in buckets))
    sums = {"documents": 0, "words": 0, "bytes": 0}
    sizes = space.directory / f"{name}.sizes"  # a file: the sizes of all items may exceed memory
    with atomic_write(f"{path}.keys", "wb") as keys, atomic_write(sizes, "wb") as items:
        for bucket in buckets:
            arrays = read_arrays(space.file("bucket", bucket, "npz"), "sizes", "keys", *sums)
            items.write(arrays["sizes"].tobytes())
            keys.write(arrays["keys"].tobytes())
            for column in sums:
                sums[column] += int(arrays[column])
    if sizes.stat().st_size:
        return np.memmap(sizes, np.int32, "r"), sums
    return np.zeros(0, np.int32), sums


def _write_entries(space: Workspace, path: Path, ranges: int, arrival: int) -> None:
    """Write the entries of a mega-batch."""
    with open_items(path) as file:
        for number in range(ranges):
            entries = mapped(space.file("past", number, "bin"), ENTRY)
            file.write(entries[entries["arrival"] == arrival].tobytes())


def finalise_vocabulary(space: Workspace) -> dict[str, FileInfo]:
    """Write dict.txt, with the counts of the first mega-batch, and the tokenizer's files."""
    encoder = load_encoder(space.directory)
    beside = [name for name in encoder.companions if (space.directory / name).is_file()]
    names = (*encoder.files, *beside)
    for name in names:
        join_files(space.finished / name, [space.directory / name])
    counts = np.zeros(encoder.dictionary_size, np.int64)
    for bucket in load_plan(space).buckets(0):
        counts += read_arrays(space.file("bucket", bucket, "npz"), "counts")["counts"]
    with atomic_write(space.finished / DICTIONARY) as file:
        file.write(dictionary_text(encoder.tokens, counts[SPECIALS:]))
    return {name: FileInfo.of(space.finished / name) for name in (DICTIONARY, *names)}
