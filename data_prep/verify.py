"""Whether a stream is whole: every file against stream.json, every part against itself and the others."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.stream import DTYPES, KEY_BYTES, FileInfo, Part, Stream, dtype_code, read_index, read_pointers
from data_prep.similarity import running_sizes, token_blocks

EOS = 2
_KEY = f"S{KEY_BYTES}"  # numpy compares these byte by byte, which is the order of big-endian numbers
_KEYS_AT_ONCE = 1 << 20
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = " #fairseq:overwrite"


def file_problems(path: Path, info: FileInfo) -> list[str]:
    """Size and SHA-256 of a file against stream.json."""
    problem = info.problem(path)
    return [f"{path}: {problem}"] if problem else []


def part_problems(path: str, part: Part, dictionary_size: int) -> list[str]:
    """What is wrong inside .bin and .idx of a part, whose files may have the checksums of stream.json all
    the same; a missing file is for `file_problems`. Memory: some 50 MB."""
    if not (os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin")):
        return []
    try:
        sizes, code = read_index(f"{path}.idx")
    except UserError as error:
        return [str(error).split(";")[0]]
    found = []
    if code != dtype_code(dictionary_size):
        found.append(f"{path}.idx: of type {DTYPES[code].__name__}, not as {dictionary_size:,} units need")
    dtype = np.dtype(DTYPES[code])
    tokens, odd = divmod(os.path.getsize(f"{path}.bin"), dtype.itemsize)
    ids = np.memmap(f"{path}.bin", dtype, "r", shape=(tokens,)) if tokens else np.zeros(0, dtype)
    if odd:
        found.append(f"{path}.bin: ends inside of an id")
    found += [f"{path}.idx: {problem}" for problem in _index_problems(f"{path}.idx", sizes, ids, part)]
    beyond = sum(int((block >= dictionary_size).sum()) for _, block in token_blocks(ids))
    if beyond:
        found.append(f"{path}.bin: {beyond:,} ids beyond the {dictionary_size:,} of the dictionary")
    return found


def _index_problems(path: str, sizes: np.ndarray, ids: np.ndarray, part: Part) -> Iterator[str]:
    pointers = read_pointers(path, len(sizes))
    empty = breaks = unended = position = wrong = seen = 0
    for running, block in running_sizes(sizes):
        empty += int((block < 1).sum())
        breaks += int((block == 1).sum())
        starts = (running - block) * ids.itemsize
        wrong += int((pointers[seen : seen + len(block)] != starts).sum())
        inside = running[(running > 0) & (running <= len(ids))]
        unended += int((ids[inside - 1] != EOS).sum())
        seen, position = seen + len(block), int(running[-1])
    if empty:
        yield f"{empty:,} items of no tokens"
    if wrong:
        yield f"{wrong:,} pointers are not where the items start"
    if position != len(ids):
        yield f"its items add up to {position:,} tokens, .bin has {len(ids):,}"
    if unended:
        yield f"{unended:,} items do not end in eos"
    if not len(sizes) or sizes[-1] != 1:
        yield "does not end in a document break"
    for what, actual in (("items", len(sizes)), ("tokens", position), ("documents", breaks)):
        if (said := getattr(part, what)) != actual:
            yield f"has {actual:,} {what}, stream.json says {said:,}"


def dictionary_problems(path: Path, units: int) -> list[str]:
    """What keeps fairseq from reading dict.txt as `units` units; a missing file is for `file_problems`."""
    if not path.is_file():
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        return [f"{path}: not UTF-8 at byte {error.start}"]
    found = [] if len(lines) == units else [f"has {len(lines):,} lines, stream.json says {units:,} units"]
    known = set(_SPECIALS)
    for number, line in enumerate(lines, 1):
        kept = line.rstrip()
        unit, _, count = kept.removesuffix(_OVERWRITE).rpartition(" ")
        if not unit or not count.isdecimal():
            found.append(f"line {number} is not `unit count`")
        elif unit in known and not kept.endswith(_OVERWRITE):
            found.append(f"line {number}: the unit {unit!r} a second time")
        known.add(unit)
    shown = found[:3] + ([f"{len(found) - 3:,} lines more like these"] if len(found) > 3 else [])
    return [f"{path}: {problem}" for problem in shown]


def key_problems(stream: Stream) -> list[str]:
    """Documents that are in two parts or twice in one, by the keys of the parts that have some.

    All keys are merged in ranges, so the memory is some 100 MB for any number of documents whose keys
    ascend (as all must but those of valid), and 16 bytes for each other one.
    """
    found, names, columns = [], [], []
    for part in stream.parts:
        path = Path(f"{stream.path(part)}.keys")
        if f"{part.prefix}.keys" not in part.files or not path.is_file():
            continue
        size = path.stat().st_size
        if size != KEY_BYTES * part.documents:
            found.append(f"{path}: {size:,} bytes, not {KEY_BYTES} for each of {part.documents:,} documents")
        keys = (
            np.memmap(path, _KEY, "r", shape=(size // KEY_BYTES,)) if size >= KEY_BYTES else np.zeros(0, _KEY)
        )
        if not _ascend(keys):
            keys = np.sort(keys)
            if part is not stream.valid:
                found.append(f"{path}: its keys do not ascend")
        names.append(part.name)
        columns.append(keys)
    for (one, other), number in sorted(_shared(columns).items()):
        where = f"{names[one]} twice" if one == other else f"{names[one]} and in {names[other]}"
        found.append(f"{stream.directory}: {number:,} documents are in {where}")
    return found


def _ascend(keys: np.ndarray) -> bool:
    starts = range(0, len(keys), _KEYS_AT_ONCE)
    blocks = (keys[start : start + _KEYS_AT_ONCE + 1] for start in starts)
    return all((block[1:] >= block[:-1]).all() for block in blocks)


def _shared(columns: list[np.ndarray]) -> dict[tuple[int, int], int]:
    """How many keys each pair of ascending columns shares, or a column with itself."""
    shared: dict[tuple[int, int], int] = {}
    ranges = 1 + sum(map(len, columns)) // _KEYS_AT_ONCE
    borders = np.array([(i * 2**128 // ranges).to_bytes(16) for i in range(1, ranges)], _KEY)
    cuts = [[0, *np.searchsorted(keys, borders), len(keys)] for keys in columns]
    for i in range(ranges):
        pieces = [keys[cut[i] : cut[i + 1]] for keys, cut in zip(columns, cuts, strict=True)]
        keys = np.concatenate([np.zeros(0, _KEY), *pieces])
        owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        order = np.argsort(keys, kind="stable")
        keys, owner = keys[order], owner[order]
        again = np.flatnonzero(keys[1:] == keys[:-1])
        for pair in zip(owner[again].tolist(), owner[again + 1].tolist(), strict=True):
            shared[pair] = shared.get(pair, 0) + 1
    return shared
