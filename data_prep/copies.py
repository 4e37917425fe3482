"""Stage copies, of --write-dropped: which documents were dropped as duplicates, and of which."""

import json

import numpy as np

from alma.files import atomic_write
from alma.stream import FileInfo, Part
from data_prep.cut import CUT, Cut, Wanted, load, near_copies, placed
from data_prep.near_duplicates import HASHES, is_dropped, similar
from data_prep.pools import LEFT_OUT
from data_prep.ranges import distinct, sorted_records
from data_prep.scan import RECORD, RUN_DOCUMENTS, content_keys
from data_prep.work import DOCUMENT_BYTES, Workspace, join_files, slices

_CHANCE = 1 / 256  # bytes of different hashes agree


def write_copies(space: Workspace, number: int, ranges: int, shards: int, wanted: Wanted) -> None:
    """Write copies-NNNNN.jsonl: a line for each document of a range that was dropped as a duplicate."""
    cut = load(space.directory / CUT, Cut)
    records = sorted_records(space, number)
    arrivals = wanted.arrivals(space.sources)
    first, kept = distinct(records, arrivals)
    near = first & kept & near_copies(records, space, number, wanted, cut)
    stays = placed(records, space, number, wanted, cut) != LEFT_OUT
    found = similar(space, number)
    found = found[is_dropped(found, wanted.first, cut.taken)]
    others = {
        (key, arrival): (other, equal) for key, arrival, _, other, equal in reversed(found.tolist())
    }  # of several the first
    with atomic_write(space.file("copies", number, "jsonl")) as file:
        for shard in range(shards):
            for piece in slices(space.file("scan", shard, "bin"), RECORD, RUN_DOCUMENTS, number, ranges):
                piece = piece[~np.isin(_places(piece), _places(records[stays]))]
                is_near = np.isin(_places(piece), _places(records[near]))
                keys = content_keys(piece).astype(f"S{DOCUMENT_BYTES}").tolist()
                for key, by_near, source in zip(keys, is_near, piece["source"].tolist(), strict=True):
                    other, similarity = key, 1.0
                    if by_near:
                        other, equal = others[key, wanted.first + int(arrivals[source])]
                        similarity = (equal / HASHES - _CHANCE) / (1 - _CHANCE)
                    row = {
                        "id": key.ljust(DOCUMENT_BYTES, b"\0").hex(),
                        "repeats": other.ljust(DOCUMENT_BYTES, b"\0").hex(),
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
