"""Verification of a stream: files against checksums, parts for consistency, documents for duplicates."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alma.errors import UserError, fail
from alma.stream import DTYPES, KEY_BYTES, FileInfo, Part, Stream, dtype_code, read_index, read_pointers
from alma.workers import Workers
from data_prep.dictionary import DICTIONARY, EOS, SPECIALS, dictionary_problems
from data_prep.install import leftovers
from data_prep.similarity import running_sizes, token_blocks
from data_prep.work import DOCUMENT_BYTES, run_all

_KEY = f"S{KEY_BYTES}"  # compared byte by byte, as big-endian numbers are
_KEYS_AT_ONCE = 1 << 20
_RUNS = 1000

Pair = tuple[int, int]


def part_problems(path: str, part: Part, dictionary_size: int) -> list[str]:
    """Inconsistencies of .bin and .idx, which a faulty writer leaves under matching checksums.

    None for a missing file, which `FileInfo.problem` reports. Memory: about 50 MB.
    """
    if not (os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin")):
        return []
    try:
        sizes, code = read_index(f"{path}.idx")
    except UserError as error:
        return [str(error).split(";")[0]]
    found = []
    if code != dtype_code(dictionary_size):
        found.append(f"{path}.idx: of type {DTYPES[code]}, not as {dictionary_size:,} tokens need")
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


def key_problems(stream: Stream) -> list[str]:
    """Documents that are twice in a part, or in two parts, also with other pieces, by their .keys.

    In an ordered stream those of `test` must be in test_00, ... too, and those of `valid` in valid_00, ....
    Ascending runs of keys are merged range by range: about 100 MB of memory for any number of documents. A
    mixed part has a run of each mega-batch; keys in more than _RUNS runs are sorted in memory, 16 bytes each.
    """
    found: list[str] = []
    names: list[str] = []
    columns: list[np.ndarray] = []
    owners: list[int] = []  # of each column the number of its part in `names`
    mixed = {"valid": stream.held_out_valid} | ({"test": stream.held_out} if stream.ordered else {})
    left = {"valid": stream.valid.documents, "test": stream.test.documents}
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
        runs = _runs(keys)
        if len(runs) > 1 and part.name not in mixed:
            found.append(f"{path}: its keys do not ascend")
        columns += runs if len(runs) <= _RUNS else [np.sort(keys)]
        owners += [len(names)] * (len(columns) - len(owners))
        names.append(part.name)
    shared, parted = _shared(columns, owners)
    for pairs, what in ((shared, "documents are"), (parted, "documents have pieces")):
        for (one, other), number in sorted(pairs.items()):
            if names[other] in [part.name for part in mixed.get(names[one], ())]:
                left[names[one]] -= number if pairs is shared else 0
                continue
            where = f"{names[one]} twice" if one == other else f"{names[one]} and in {names[other]}"
            found.append(f"{stream.directory}: {number:,} {what} in {where}")
    for name, parts in mixed.items():
        if parts and left[name] and name in names:
            found.append(
                f"{stream.directory}: {left[name]:,} documents of {name} are not in {name}_00 or those after"
            )
    return found


def _runs(keys: np.ndarray) -> list[np.ndarray]:
    """The first _RUNS + 1 ascending runs of keys, the last with all that follows."""
    starts = [0]
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        block = keys[start : start + _KEYS_AT_ONCE + 1]
        starts += (start + 1 + np.flatnonzero(block[1:] < block[:-1])[: _RUNS + 1]).tolist()
        if len(starts) > _RUNS:
            break
    starts = starts[: _RUNS + 1]
    return [keys[start:end] for start, end in zip(starts, [*starts[1:], len(keys)], strict=True)]


def _shared(columns: list[np.ndarray], owners: list[int]) -> tuple[Counter[Pair], Counter[Pair]]:
    """Number of keys that each pair of owners shares; and of documents of which two have different pieces.

    A pair (i, i): keys that i has repeatedly. The keys of each column ascend; `owners` has the owner of each.
    """
    shared: Counter[Pair] = Counter()
    parted: Counter[Pair] = Counter()
    ranges = 1 + sum(map(len, columns)) // _KEYS_AT_ONCE
    borders = np.array([(i * 2**128 // ranges).to_bytes(16) for i in range(1, ranges)], _KEY)
    cuts = [[0, *np.searchsorted(keys, borders), len(keys)] for keys in columns]
    for i in range(ranges):
        slices = [keys[cut[i] : cut[i + 1]] for keys, cut in zip(columns, cuts, strict=True)]
        keys = np.concatenate([np.zeros(0, _KEY), *slices])
        owner = np.repeat(owners, [len(each) for each in slices])
        order = np.argsort(keys, kind="stable")
        keys, owner = keys[order], owner[order]
        again = keys[1:] == keys[:-1]
        documents = keys.astype(f"S{DOCUMENT_BYTES}")
        other = (documents[1:] == documents[:-1]) & ~again & (owner[1:] != owner[:-1])
        for places, counts in ((again, shared), (other, parted)):
            pairs = np.sort(np.stack([owner[:-1][places], owner[1:][places]], 1))
            counts.update(map(tuple, pairs.tolist()))
    return shared, parted


def check(stream: Stream, workers: Workers) -> None:
    """Print each problem on a line and exit with code 2; without problems, print what was verified."""
    start = time.monotonic()
    files = dict(stream.files)
    for part in stream.parts:
        files |= part.files
    tasks = [(info, stream.directory / name) for name, info in files.items()]
    sizes = [info.size for info in files.values()]
    damage = run_all(workers, "files", FileInfo.problem, tasks, sizes)
    problems = [f"{path}: {found}" for (_, path), found in zip(tasks, damage, strict=True) if found]
    problems += dictionary_problems(stream.directory / DICTIONARY, stream.vocab_size)
    parts = [(stream.path(part), part, stream.vocab_size + SPECIALS) for part in stream.parts]
    tokens = [part.tokens for part in stream.parts]
    for found in run_all(workers, "parts", part_problems, parts, tokens, "token"):
        problems += found
    problems += key_problems(stream)
    for path in leftovers(stream.directory):
        print(f"warning: {path}: left by an interrupted run; remove it if no run is active", file=sys.stderr)
    for problem in problems:
        print(problem)
    if problems:
        sys.stdout.flush()
        what = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        fail(
            f"{stream.directory}: {what}; copy the stream again from where it was made, or make it "
            "again with `alma data`"
        )
    seconds = time.monotonic() - start
    print(f"verified {len(files)} files, {sum(sizes) / 1e9:.3g} GB in {seconds:.1f} s")
