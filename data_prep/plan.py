"""Stages plan, hashes and copies: the buckets of every split, the hashes that the stream keeps, and, with
--write-dropped, which documents were dropped as duplicates, and of which.

The buckets of a split follow the order of content keys, so their concatenation is in random order.
"""

import json
from dataclasses import dataclass

import numpy as np

from alma.files import atomic_write
from alma.stream import KEY_BYTES, FileInfo, Part
from data_prep import scan
from data_prep.cut import CUT, Cut, Wanted, load, near_copies, placed, pools_of, save
from data_prep.near_duplicates import HASHES, KEY, entries_between, is_dropped, similar
from data_prep.pools import LEFT_OUT, sums_of
from data_prep.ranges import distinct, sorted_records
from data_prep.scan import RECORD, content_keys
from data_prep.work import Workspace, changes, join_files, mapped, open_items, read_arrays, slices

BUCKET_BYTES = 60_000_000
"""Target size of a bucket in bytes of text, which one worker holds in memory: about 10 million words."""

PLAN = "plan.npz"
_CHANCE = 1 / 256  # bytes of different hashes agree
_COUNTS = [(name, "i8") for name in ("split", "place", "documents", "words")]
_PART = np.dtype([*_COUNTS, ("keys", "u8"), ("last", f"S{KEY_BYTES}")])
"""A bucket, or the part of it in a range; the fields of a CorpusPlan. `place`: bytes of the split before the
bucket, over BUCKET_BYTES."""


@dataclass(frozen=True)
class CorpusPlan:
    """Where the documents go."""

    bucket_split: np.ndarray  # (buckets,) number of the split; buckets of a split follow the hash order
    bucket_words: np.ndarray
    bucket_documents: np.ndarray
    bucket_keys: np.ndarray  # (buckets,) uint64: sum of the low halves of the content keys, modulo 2**64
    bucket_last: np.ndarray  # (buckets,) content key of the last document
    source_words: np.ndarray  # (splits, sources)
    valid_last: np.ndarray  # see `SortedCorpus`
    read: np.ndarray  # (2,) documents and words of the corpus, copies included
    duplicates: np.ndarray  # (2,) copies of another document of the corpus or of the stream
    longest: int  # words of the longest document
    near: np.ndarray  # (2,) documents and words of near duplicates that were dropped

    def buckets(self, split: int) -> list[int]:
        """The buckets of a split, in hash order."""
        return np.flatnonzero(self.bucket_split == split).tolist()

    def buckets_of(self, records: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> np.ndarray:
        """(records,) the bucket that each document would be in if it had no copies, or LEFT_OUT."""
        found = np.full(len(records), LEFT_OUT)
        keys, pools = content_keys(records), pools_of(records, wanted, sources, self.valid_last)
        bucket_pool = np.array(wanted.pools)[self.bucket_split]
        for pool in np.unique(pools):
            buckets = np.flatnonzero(bucket_pool == pool)
            buckets = buckets[np.argsort(self.bucket_last[buckets])]
            own = np.flatnonzero(pools == pool)
            found[own] = np.append(buckets, LEFT_OUT)[np.searchsorted(self.bucket_last[buckets], keys[own])]
        return found


def plan_range(space: Workspace, number: int, wanted: Wanted) -> None:
    """Cut the splits into buckets of about BUCKET_BYTES, in hash order; write the files of a range."""
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    pools = placed(records, space, number, wanted, cut)
    left_out = [records[(pools == LEFT_OUT) & (records["words"] > 0)]]  # copies
    source_words = np.zeros((len(wanted.names), len(space.sources)), np.int64)
    parts = []
    for pool, before in enumerate(cut.before[:, number].tolist()):
        own = records[pools == pool]
        running = np.cumsum(own["bytes"], dtype=np.int64) - own["bytes"] + before
        spans = np.flatnonzero(cut.pool == pool)
        stops = np.searchsorted(content_keys(own), cut.last[spans], "right")
        span = np.repeat(spans, np.diff(stops, prepend=0))
        own, running = own[: len(span)], running[: len(span)]  # the others are surplus
        rest = cut.split[span] == LEFT_OUT
        left_out.append(own[rest])
        own, running, span = own[~rest], running[~rest], span[~rest]
        split, place = cut.split[span], (running - cut.start[span]) // BUCKET_BYTES
        np.add.at(source_words, (split, own["source"]), own["words"])
        starts = np.flatnonzero(changes(split) | changes(place))
        part = np.zeros(len(starts), _PART)
        part["split"], part["place"] = split[starts], place[starts]
        part["documents"] = np.diff(starts, append=len(own))
        part["words"] = np.add.reduceat(own["words"], starts, dtype=np.int64)
        part["keys"] = np.add.reduceat(own["low"].astype(np.uint64), starts)
        part["last"] = content_keys(own[starts + part["documents"] - 1])
        parts.append(part)
    with open_items(space.file("dropped", number, "bin")) as file:
        file.write(np.sort(_places(np.concatenate(left_out))).data)
    with atomic_write(space.file("parts", number, "npz"), "wb") as file:
        first, kept = distinct(records, wanted.arrivals(space.sources))
        copies = records[kept & first & near_copies(records, space, number, wanted, cut)]
        np.savez(file, buckets=np.concatenate(parts), source_words=source_words, near=sums_of(copies)[:2])


def keep_entries(space: Workspace, number: int, ranges: int, shards: int, wanted: Wanted) -> None:
    """Write past-NNNNN.bin: an ENTRY for each new document of the stream, and each dropped in its favour.

    What is dropped is kept for documents to come: an addition then drops what a new stream would.
    """
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    entries = entries_between(space, shards, number, ranges)
    pools = placed(records, space, number, wanted, cut)
    batches = range(int(wanted.arrivals(space.sources).max()) + 1)
    last = np.array([np.sort(cut.last[cut.pool == pool])[-1] for pool in batches])
    inside = entries["key"] <= last[entries["arrival"] - wanted.first]
    if len(cut.valid_last):
        inside |= np.isin(entries["key"], content_keys(records[pools == wanted.pools[-1]]).astype(KEY))
    with open_items(space.file("past", number, "bin")) as file:
        file.write(entries[inside].tobytes())


def collect_plan(space: Workspace, wanted: Wanted, ranges: int) -> CorpusPlan:
    """Write plan.npz and return the plan, or the one that is there."""
    if (space.directory / PLAN).exists():
        return load_plan(space)
    cut = load(space.directory / CUT, Cut)
    found = [read_arrays(space.file("parts", number, "npz")) for number in range(ranges)]
    parts = np.concatenate([arrays["buckets"] for arrays in found])
    parts = parts[np.lexsort((parts["place"], parts["split"]))]  # stable: in a bucket, the hash order stays
    starts = np.flatnonzero(changes(parts["split"]) | changes(parts["place"]))
    plan = CorpusPlan(
        **{f"bucket_{name}": np.add.reduceat(parts[name], starts) for name in ("documents", "words", "keys")},
        bucket_split=parts["split"][starts],
        bucket_last=parts["last"][np.append(starts[1:], len(parts)) - 1],
        source_words=np.stack([arrays["source_words"] for arrays in found]).sum(0),
        valid_last=cut.valid_last,
        read=cut.read,
        duplicates=cut.read - cut.kept,
        longest=cut.longest,
        near=np.stack([arrays["near"] for arrays in found]).sum(0),
    )
    save(space.directory / PLAN, plan)
    return plan


def load_plan(space: Workspace) -> CorpusPlan:
    """Read plan.npz."""
    return load(space.directory / PLAN, CorpusPlan)


def dropped(space: Workspace, shard: int, ranges: int) -> np.ndarray:
    """Places of the documents of a shard that are left out."""
    found = []
    for number in range(ranges):
        all_dropped = mapped(space.file("dropped", number, "bin"), np.dtype("<u8"))
        start, stop = np.searchsorted(all_dropped, np.array([shard, shard + 1], np.uint64) << np.uint64(32))
        found.append(all_dropped[start:stop] & np.uint64(2**32 - 1))
    return np.concatenate(found).astype(np.int64)


def write_copies(space: Workspace, number: int, ranges: int, shards: int, wanted: Wanted) -> None:
    """Write copies-NNNNN.jsonl: a line for each document of a range that was dropped as a duplicate."""
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    arrivals = wanted.arrivals(space.sources)
    first, kept = distinct(records, arrivals)
    near = first & kept & near_copies(records, space, number, wanted, cut)
    stays = placed(records, space, number, wanted, cut) != LEFT_OUT
    found = similar(space, number)
    found = found[is_dropped(found, wanted.first, cut.taken)][::-1]  # of several others the first remains
    others = {(key, arrival): (other, equal) for key, arrival, _, other, equal in found.tolist()}
    width = np.dtype(KEY).itemsize
    with atomic_write(space.file("copies", number, "jsonl")) as file:
        for shard in range(shards):
            for piece in slices(space.file("scan", shard, "bin"), RECORD, scan.RUN_DOCUMENTS, number, ranges):
                piece = piece[~np.isin(_places(piece), _places(records[stays]))]
                is_near = np.isin(_places(piece), _places(records[near]))
                keys = content_keys(piece).astype(KEY).tolist()
                for key, by_near, source in zip(keys, is_near, piece["source"].tolist(), strict=True):
                    other, similarity = key, 1.0
                    if by_near:
                        other, equal = others[key, wanted.first + int(arrivals[source])]
                        similarity = (equal / HASHES - _CHANCE) / (1 - _CHANCE)
                    row = {
                        "id": key.ljust(width, b"\0").hex(),
                        "repeats": other.ljust(width, b"\0").hex(),
                        "kind": "near" if by_near else "exact",
                        "similarity": round(similarity, 3),
                        "source": space.sources[source].rpartition("/")[2],
                    }
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _places(records: np.ndarray) -> np.ndarray:
    """(records,) shard and place of each as one number."""
    return records["shard"].astype(np.uint64) << np.uint64(32) | records["place"]


def add_copies(space: Workspace, part: Part, ranges: int, first: int) -> Part:
    """Join the lines in dropped.jsonl, or dropped_NN.jsonl of an addition from mega-batch NN on, a file of
    the first new mega-batch, so that `--verify` checks it."""
    name = f"dropped_{first:02d}.jsonl" if first else "dropped.jsonl"
    join_files(space.finished / name, (space.file("copies", number, "jsonl") for number in range(ranges)))
    part.files[name] = FileInfo.of(space.finished / name)
    return part
