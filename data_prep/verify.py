"""Verification of a stream: files against their checksums, and documents that are in two parts."""

from collections import Counter

import numpy as np

from alma.errors import fail
from alma.stream import KEY_BYTES, FileInfo, Stream
from alma.workers import Workers
from data_prep.work import DOCUMENT_BYTES, run_all

_KEY = f"S{KEY_BYTES}"  # compared byte by byte, as big-endian numbers are
_KEYS_AT_ONCE = 1 << 20


def leaks(stream: Stream) -> list[str]:
    """Documents that are twice in a part, or in two parts, also with other pieces, by their .keys.

    The keys of all parts are merged range by range: about 100 MB of memory for any number of documents. Those
    of the mixed parts of an ordered stream do not ascend; they are sorted in memory, 16 bytes each.
    """
    mixed = {"valid": stream.held_out_valid, "test": stream.held_out} if stream.ordered else {}
    names = [part.name for part in stream.parts]
    columns = []
    for part in stream.parts:
        name = f"{part.prefix}.keys"
        keys = np.memmap(stream.directory / name, _KEY, "r") if name in part.files else np.zeros(0, _KEY)
        columns.append(np.sort(keys) if part.name in mixed else keys)
    twice: Counter[tuple[str, int, int]] = Counter()
    ranges = 1 + sum(map(len, columns)) // _KEYS_AT_ONCE
    borders = np.array([(i * 2**128 // ranges).to_bytes(16) for i in range(1, ranges)], _KEY)
    cuts = [[0, *np.searchsorted(keys, borders), len(keys)] for keys in columns]
    for i in range(ranges):
        slices = [keys[cut[i] : cut[i + 1]] for keys, cut in zip(columns, cuts, strict=True)]
        keys = np.concatenate(slices)
        owner = np.repeat(np.arange(len(names)), [len(part) for part in slices])
        order = np.argsort(keys, kind="stable")
        keys, owner = keys[order], owner[order]
        again = keys[1:] == keys[:-1]
        documents = keys.astype(f"S{DOCUMENT_BYTES}")
        other = (documents[1:] == documents[:-1]) & ~again & (owner[1:] != owner[:-1])
        for places, what in ((again, "documents are"), (other, "documents have pieces")):
            pairs = np.sort(np.stack([owner[:-1][places], owner[1:][places]], 1))
            twice.update((what, one, two) for one, two in pairs.tolist())
    found = []
    for (what, one, two), number in sorted(twice.items()):
        if names[two] not in [part.name for part in mixed.get(names[one], ())]:
            where = f"{names[one]} twice" if one == two else f"{names[one]} and in {names[two]}"
            found.append(f"{stream.directory}: {number:,} {what} in {where}")
    return found


def check(stream: Stream, workers: Workers) -> None:
    """Print each problem on a line and exit with code 2; without problems, print what was verified."""
    files = dict(stream.files)
    for part in stream.parts:
        files |= part.files
    tasks = [(info, stream.directory / name) for name, info in files.items()]
    sizes = [info.size for info in files.values()]
    damage = run_all(workers, "files", FileInfo.problem, tasks, sizes)
    problems = [f"{path}: {problem}" for (_, path), problem in zip(tasks, damage, strict=True) if problem]
    problems = problems or leaks(stream)
    if problems:
        print(*problems, sep="\n", flush=True)
        what = f"{len(problems):,} problem{'s' * (len(problems) > 1)}"
        fail(f"{stream.directory}: {what}; copy the stream again, or make it again with `alma data`")
    print(f"verified {len(files)} files, {sum(sizes) / 1e9:.3g} GB")
