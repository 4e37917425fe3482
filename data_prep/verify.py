"""Verify a stream: compare files with their checksums, and find documents that are in two parts."""

from collections import Counter

import numpy as np

from alma.errors import fail
from alma.stream import KEY_BYTES, FileInfo, Part, Stream
from alma.workers import Workers
from data_prep.work import DOCUMENT_BYTES, run_all

_KEY = f"S{KEY_BYTES}"  # dtype of keys; byte strings compare as big-endian numbers do
_KEYS_AT_ONCE = 1 << 20

_WHOLE = "documents are"
_PIECES = "documents have pieces"


def leaks(stream: Stream) -> list[str]:
    """Find documents that are twice in a part or in two parts; returns a line for each problem.

    Documents are compared by their .keys; different pieces of one document in two parts count too.
    The keys of all parts are merged range by range, in about 100 MB of memory for any number of
    documents. The keys of the mixed parts of an ordered stream are not ascending, so they are
    sorted in memory, 16 bytes each.
    """
    may_share: dict[str, list[str]] = {}  # mixed part -> held-out parts whose documents it repeats
    if stream.ordered:
        may_share["valid"] = [part.name for part in stream.held_out_valid]
        may_share["test"] = [part.name for part in stream.held_out]
    names = [part.name for part in stream.parts]
    columns = []
    for part in stream.parts:
        keys = _read_keys(stream, part)
        columns.append(np.sort(keys) if part.name in may_share else keys)
    problems = []
    for (problem, left, right), number in sorted(_count_repeats(columns).items()):
        if names[right] in may_share.get(names[left], ()):
            continue
        places = f"{names[left]} and in {names[right]}"
        if left == right:
            places = f"{names[left]} twice"
        problems.append(f"{stream.directory}: {number:,} {problem} in {places}")
    return problems


def _read_keys(stream: Stream, part: Part) -> np.ndarray:
    """(documents,) the content keys of a part, memory-mapped; none if it has no .keys."""
    name = f"{part.prefix}.keys"
    if name in part.files:
        return np.memmap(stream.directory / name, _KEY, "r")
    return np.zeros(0, _KEY)


def _count_repeats(columns: list[np.ndarray]) -> Counter[tuple[str, int, int]]:
    """Count documents that repeat, by problem and the numbers of their two parts.

    `columns`: the keys of each part, ascending.
    """
    repeats: Counter[tuple[str, int, int]] = Counter()
    ranges = 1 + sum(map(len, columns)) // _KEYS_AT_ONCE
    borders = np.array([(i * 2**128 // ranges).to_bytes(16) for i in range(1, ranges)], _KEY)
    cuts = [[0, *np.searchsorted(keys, borders), len(keys)] for keys in columns]
    for i in range(ranges):
        slices = [keys[cut[i] : cut[i + 1]] for keys, cut in zip(columns, cuts, strict=True)]
        keys = np.concatenate(slices)
        part = np.repeat(np.arange(len(columns)), [len(part_keys) for part_keys in slices])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        part = part[order]
        same_key = keys[1:] == keys[:-1]
        documents = keys.astype(f"S{DOCUMENT_BYTES}")
        same_document = documents[1:] == documents[:-1]
        in_two_parts = part[1:] != part[:-1]
        pairs = np.sort(np.stack([part[:-1], part[1:]], 1))
        for left, right in pairs[same_key].tolist():
            repeats[_WHOLE, left, right] += 1
        for left, right in pairs[same_document & ~same_key & in_two_parts].tolist():
            repeats[_PIECES, left, right] += 1
    return repeats


def check(stream: Stream, workers: Workers) -> None:
    """Print each problem on a line and exit with code 2; else print what was verified."""
    files = dict(stream.files)
    for part in stream.parts:
        files |= part.files
    tasks = [(info, stream.directory / name) for name, info in files.items()]
    sizes = [info.size for info in files.values()]
    damage = run_all(workers, "files", FileInfo.problem, tasks, sizes)
    problems = []
    for (_, path), problem in zip(tasks, damage, strict=True):
        if problem:
            problems.append(f"{path}: {problem}")
    if not problems:
        problems = leaks(stream)
    if problems:
        print(*problems, sep="\n", flush=True)
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        remedy = "copy the stream again, or make it again with `alma data`"
        fail(f"{stream.directory}: {count}; {remedy}")
    print(f"verified {len(files)} files, {sum(sizes) / 1e9:.3g} GB")
