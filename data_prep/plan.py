"""Stages plan, hashes and copies.

plan    divides every split into buckets of about equal size, in the order of content keys; so the
        concatenation of a split's buckets is in random order
hashes  chooses the MinHash entries that the stream keeps, to compare documents of later additions
copies  with --write-dropped, lists the documents dropped as duplicates, and those that they repeat
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from alma.files import atomic_write
from alma.stream import KEY_BYTES, FileInfo, Part
from data_prep import scan
from data_prep.cut import CUT, Cut, Splits, load, near_copies, placed, pools_of, save
from data_prep.near_duplicates import HASHES, KEY, entries_between, is_dropped, similar
from data_prep.pools import LEFT_OUT, sums_of
from data_prep.ranges import distinct, sorted_records
from data_prep.scan import RECORD, content_keys
from data_prep.work import (
    DOCUMENT_BYTES,
    Workspace,
    changes,
    join_files,
    mapped,
    name_of,
    open_items,
    read_arrays,
    slices,
)

BUCKET_BYTES = 60_000_000
"""Target size of a bucket in bytes of text, which one worker holds in memory: about 10 million
words."""

PLAN = "plan.npz"
_CHANCE = 1 / 256  # probability that the kept bytes of two different hashes agree
_COUNTS = [(name, "i8") for name in ("split", "place", "documents", "words")]
_PART = np.dtype([*_COUNTS, ("keys", "u8"), ("last", f"S{KEY_BYTES}")])
"""Dtype of a bucket, or of the part of a bucket in a range of keys, with the fields of CorpusPlan.

`place` is the number of the bucket in its split: bytes of the split before it // BUCKET_BYTES."""


@dataclass(frozen=True)
class CorpusPlan:
    """The plan of the whole corpus: the buckets, and what each of them holds."""

    bucket_split: np.ndarray  # (buckets,) number of the split, whose buckets are in hash order
    bucket_words: np.ndarray
    bucket_documents: np.ndarray
    bucket_keys: np.ndarray
    """(buckets,) uint64: sum of the low halves of the content keys, modulo 2**64"""
    bucket_last: np.ndarray  # (buckets,) content key of the last document
    source_words: np.ndarray  # (splits, sources)
    valid_last: np.ndarray  # as in `SortedCorpus`
    read: np.ndarray  # (2,) documents and words of the corpus, copies included
    duplicates: np.ndarray  # (2,) copies of another document of the corpus or of the stream
    longest: int  # words of the longest document
    near: np.ndarray  # (2,) documents and words of near duplicates that were dropped

    def buckets(self, split: int) -> list[int]:
        """The buckets of a split, in hash order."""
        return np.flatnonzero(self.bucket_split == split).tolist()

    def buckets_of(
        self, records: np.ndarray, splits: Splits, sources: tuple[str, ...]
    ) -> np.ndarray:
        """The bucket of each document, (records,), not considering copies; LEFT_OUT if in none."""
        result = np.full(len(records), LEFT_OUT)
        keys = content_keys(records)
        pools = pools_of(records, splits, sources, self.valid_last)
        bucket_pool = np.array(splits.pools)[self.bucket_split]
        for pool in np.unique(pools):
            buckets = np.flatnonzero(bucket_pool == pool)
            buckets = buckets[np.argsort(self.bucket_last[buckets])]
            in_pool = np.flatnonzero(pools == pool)
            places = np.searchsorted(self.bucket_last[buckets], keys[in_pool])
            result[in_pool] = np.append(buckets, LEFT_OUT)[places]
        return result


def plan_range(space: Workspace, number: int, splits: Splits) -> None:
    """Cut the splits into buckets of about BUCKET_BYTES, in hash order; write a range's files."""
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    pools = placed(records, space, number, splits, cut)
    is_copy = (pools == LEFT_OUT) & (records["words"] > 0)
    left_out = [records[is_copy]]
    source_words = np.zeros((len(splits.names), len(space.sources)), np.int64)
    parts = []
    for pool, bytes_before in enumerate(cut.before[:, number].tolist()):
        documents = records[pools == pool]
        starts = np.cumsum(documents["bytes"], dtype=np.int64) - documents["bytes"] + bytes_before
        spans = np.flatnonzero(cut.pool == pool)
        stops = np.searchsorted(content_keys(documents), cut.last[spans], "right")
        span = np.repeat(spans, np.diff(stops, prepend=0))
        documents = documents[: len(span)]  # documents after the last span are surplus
        starts = starts[: len(span)]
        is_rest = cut.split[span] == LEFT_OUT
        left_out.append(documents[is_rest])
        documents = documents[~is_rest]
        starts = starts[~is_rest]
        span = span[~is_rest]
        split = cut.split[span]
        place = (starts - cut.start[span]) // BUCKET_BYTES
        np.add.at(source_words, (split, documents["source"]), documents["words"])
        parts.append(_bucket_parts(documents, split, place))
    with open_items(space.file("dropped", number, "bin")) as file:
        file.write(np.sort(_places(np.concatenate(left_out))).data)
    with atomic_write(space.file("parts", number, "npz"), "wb") as file:
        first, stays = distinct(records, splits.arrivals(space.sources))
        is_near = near_copies(records, space, number, splits, cut)
        near = sums_of(records[stays & first & is_near])[:2]
        np.savez(file, buckets=np.concatenate(parts), source_words=source_words, near=near)


def _bucket_parts(documents: np.ndarray, split: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The _PARTs of documents with these splits and places, which are in hash order."""
    starts = np.flatnonzero(changes(split) | changes(place))
    part = np.zeros(len(starts), _PART)
    part["split"] = split[starts]
    part["place"] = place[starts]
    part["documents"] = np.diff(starts, append=len(documents))
    part["words"] = np.add.reduceat(documents["words"], starts, dtype=np.int64)
    part["keys"] = np.add.reduceat(documents["low"].astype(np.uint64), starts)
    part["last"] = content_keys(documents[starts + part["documents"] - 1])
    return part


def keep_entries(space: Workspace, number: int, ranges: int, shards: int, splits: Splits) -> None:
    """Write past-NNNNN.bin: an ENTRY for each new document, and for each near duplicate of it.

    Entries of dropped documents are kept too, because documents of later additions are compared
    with them: so --append drops the same documents as a new stream of all mega-batches would.
    """
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    entries = entries_between(space, shards, number, ranges)
    pools = placed(records, space, number, splits, cut)
    batches = range(int(splits.arrivals(space.sources).max()) + 1)
    last = np.array([np.sort(cut.last[cut.pool == pool])[-1] for pool in batches])
    in_stream = entries["key"] <= last[entries["arrival"] - splits.first]
    if len(cut.valid_last):
        in_validation = content_keys(records[pools == splits.pools[-1]])
        in_stream |= np.isin(entries["key"], in_validation.astype(KEY))
    with open_items(space.file("past", number, "bin")) as file:
        file.write(entries[in_stream].tobytes())


def collect_plan(space: Workspace, splits: Splits, ranges: int) -> CorpusPlan:
    """Write plan.npz, unless it exists, and return the plan."""
    if (space.directory / PLAN).exists():
        return load_plan(space)
    cut = load(space.directory / CUT, Cut)
    arrays = [read_arrays(space.file("parts", number, "npz")) for number in range(ranges)]
    parts = np.concatenate([of_range["buckets"] for of_range in arrays])
    # A stable sort, which keeps the hash order within a bucket.
    parts = parts[np.lexsort((parts["place"], parts["split"]))]
    starts = np.flatnonzero(changes(parts["split"]) | changes(parts["place"]))
    ends = np.append(starts[1:], len(parts))
    plan = CorpusPlan(
        bucket_split=parts["split"][starts],
        bucket_words=np.add.reduceat(parts["words"], starts),
        bucket_documents=np.add.reduceat(parts["documents"], starts),
        bucket_keys=np.add.reduceat(parts["keys"], starts),
        bucket_last=parts["last"][ends - 1],
        source_words=np.stack([of_range["source_words"] for of_range in arrays]).sum(0),
        valid_last=cut.valid_last,
        read=cut.read,
        duplicates=cut.read - cut.kept,
        longest=cut.longest,
        near=np.stack([of_range["near"] for of_range in arrays]).sum(0),
    )
    save(space.directory / PLAN, plan)
    return plan


def load_plan(space: Workspace) -> CorpusPlan:
    """Read plan.npz."""
    return load(space.directory / PLAN, CorpusPlan)


def dropped(space: Workspace, shard: int, ranges: int) -> np.ndarray:
    """The places (reading order) of a shard's documents that are left out of the stream."""
    borders = np.array([shard, shard + 1], np.uint64) << np.uint64(32)
    pieces = []
    for number in range(ranges):
        places = mapped(space.file("dropped", number, "bin"), np.dtype("<u8"))
        start, stop = np.searchsorted(places, borders)
        pieces.append(places[start:stop] & np.uint64(2**32 - 1))
    return np.concatenate(pieces).astype(np.int64)


class Repeated(NamedTuple):
    """The document that a near duplicate repeats."""

    key: bytes
    equal: int  # hashes in which the two agree

    @property
    def similarity(self) -> float:
        """Estimate of the Jaccard similarity."""
        return (self.equal / HASHES - _CHANCE) / (1 - _CHANCE)


def write_copies(space: Workspace, number: int, ranges: int, shards: int, splits: Splits) -> None:
    """Write copies-NNNNN.jsonl: a line for each document of a range dropped as a duplicate."""
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    arrivals = splits.arrivals(space.sources)
    first, stays = distinct(records, arrivals)
    is_near = first & stays & near_copies(records, space, number, splits, cut)
    near_places = _places(records[is_near])
    in_pool = placed(records, space, number, splits, cut) != LEFT_OUT
    pool_places = _places(records[in_pool])
    repeated = _repeated_documents(space, number, splits, cut)
    with atomic_write(space.file("copies", number, "jsonl")) as file:
        for shard in range(shards):
            path = space.file("scan", shard, "bin")
            for piece in slices(path, RECORD, scan.RUN_DOCUMENTS, number, ranges):
                copies = piece[~np.isin(_places(piece), pool_places)]
                by_near = np.isin(_places(copies), near_places).tolist()
                keys = content_keys(copies).astype(KEY).tolist()
                sources = copies["source"].tolist()
                for key, is_near_copy, source in zip(keys, by_near, sources, strict=True):
                    name = name_of(space.sources[source])
                    if is_near_copy:
                        batch = splits.first + int(arrivals[source])
                        row = _near_row(key, repeated[key, batch], name)
                    else:
                        row = _exact_row(key, name)
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _repeated_documents(
    space: Workspace, number: int, splits: Splits, cut: Cut
) -> Mapping[tuple[bytes, int], Repeated]:
    """For each near duplicate of a range, by its key and mega-batch: the document it repeats."""
    near = similar(space, number)
    near = near[is_dropped(near, splits.first, cut.taken)]
    repeated: dict[tuple[bytes, int], Repeated] = {}
    for key, batch, _, repeated_key, equal in near.tolist():
        repeated.setdefault((key, batch), Repeated(repeated_key, equal))
    return repeated


def _exact_row(key: bytes, source: str) -> dict[str, Any]:
    return {
        "id": _hex(key),
        "repeats": _hex(key),
        "kind": "exact",
        "similarity": 1.0,
        "source": source,
    }


def _near_row(key: bytes, repeated: Repeated, source: str) -> dict[str, Any]:
    return {
        "id": _hex(key),
        "repeats": _hex(repeated.key),
        "kind": "near",
        "similarity": round(repeated.similarity, 3),
        "source": source,
    }


def _hex(key: bytes) -> str:
    """A KEY in hex digits; NumPy drops the zeros at its end."""
    return key.ljust(DOCUMENT_BYTES, b"\0").hex()


def _places(records: np.ndarray) -> np.ndarray:
    """(records,) shard and place of each as one number."""
    return records["shard"].astype(np.uint64) << np.uint64(32) | records["place"]


def add_copies(space: Workspace, part: Part, ranges: int, first: int) -> Part:
    """Join the lines of all ranges to dropped.jsonl, and add the file to those of `part`.

    As a file of a part, `alma inspect --verify` checks it. `part` is the first new mega-batch, with
    number `first`; an addition writes dropped_NN.jsonl.
    """
    name = f"dropped_{first:02d}.jsonl" if first else "dropped.jsonl"
    lines = (space.file("copies", number, "jsonl") for number in range(ranges))
    join_files(space.finished / name, lines)
    part.files[name] = FileInfo.of(space.finished / name)
    return part
