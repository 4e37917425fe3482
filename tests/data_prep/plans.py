"""Records written by hand, and the plan that the stages make of them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data_prep import ranges, scan
from data_prep.build import Build
from data_prep.cut import Splits
from data_prep.documents import Reader
from data_prep.plan import CorpusPlan
from data_prep.pools import LEFT_OUT
from data_prep.scan import RECORD, content_keys
from data_prep.settings import StreamSettings
from data_prep.shuffle import planned_documents
from data_prep.stages import CutSplits, PlanBuckets, ReadPastKeys, SortRecords
from data_prep.work import Work, Workspace, open_items


def make_records(documents) -> np.ndarray:
    """Records of (key, words, source) triples; equal keys are equal documents."""
    records = np.zeros(len(documents), RECORD)
    for record, (key, words, source) in zip(records, documents, strict=True):
        rng = np.random.default_rng(key)
        record["high"], record["low"], record["second"] = rng.integers(0, 2**64, 3, np.uint64)
        record["words"] = words
        record["bytes"] = 3 * words
        record["source"] = source
    return records


def plan_of(
    records: np.ndarray,
    splits: Splits,
    sources: tuple[str, ...],
    known: np.ndarray | None = None,
    shards: int = 2,
    range_documents: int = 1 << 20,
    run_documents: int = 1 << 18,
) -> tuple[np.ndarray, CorpusPlan]:
    """Run the stages from sort to plan; (records,) the split of each record or LEFT_OUT,
    and the plan.

    The split is that of the bucket that the shuffle puts the document in. `known`:
    records of documents that the stream has.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(ranges, "RANGE_DOCUMENTS", range_documents)
        patch.setattr(scan, "RUN_DOCUMENTS", run_documents)
        patch.setattr("os.fsync", lambda descriptor: None)
        directory = Path(name)
        space, pieces = write_scans(directory, records, sources, shards)
        keys = []
        if known is not None:
            keys = [directory / "odd.keys", directory / "even.keys"]
            for number, path in enumerate(keys):
                content_keys(known[number::2]).tofile(path)
        build = build_to_plan(space, splits, shards, keys)
        split_of_record = []
        for shard, piece in enumerate(pieces):
            documents = list(planned_documents(space, shard, build.plan, splits, build.ranges))
            assert [key for key, _ in documents] == [row.tobytes()[:16] for row in piece]
            split_of_record += [bucket for _, bucket in documents]
        return np.array(split_of_record), build.plan


def build_to_plan(
    space: Workspace, splits: Splits, shards: int, keys: Sequence[Path] = ()
) -> Build:
    """Run the stages from keys to plan after the scan of `shards` shards; `keys`: .keys files."""
    settings = StreamSettings([], splits, space.seed, space.reader, 1, {})
    build = Build(settings=settings, space=space, shards=[()] * shards, past_keys=keys)
    work = Work(1)
    for stage in (ReadPastKeys(), SortRecords(), CutSplits(), PlanBuckets()):
        if stage.is_needed(build):
            stage.run(build, work)
    return build


def write_scans(
    directory: Path, records: np.ndarray, sources: tuple[str, ...], shards: int
) -> tuple[Workspace, list[np.ndarray]]:
    """Write the records as the scan of `shards` shards;
    the workspace, and the records of each shard."""
    space = Workspace(directory, 0, Reader(), sources)
    pieces = np.array_split(records, shards)
    for shard, piece in enumerate(pieces):
        piece["shard"] = shard
        piece["place"] = np.arange(len(piece))
        with open_items(space.file("scan", shard, "bin")) as file:
            for start in range(0, len(piece), scan.RUN_DOCUMENTS):
                scan.write_run(file, piece[start : start + scan.RUN_DOCUMENTS])
    return space, pieces


def split_of(
    records: np.ndarray, splits: Splits, sources: tuple[str, ...], **options
) -> np.ndarray:
    """(records,) the split of each record, or LEFT_OUT; see `plan_of`."""
    bucket, plan = plan_of(records, splits, sources, **options)
    return np.where(bucket == LEFT_OUT, LEFT_OUT, plan.bucket_split[bucket])


def in_hash_order(records: np.ndarray) -> np.ndarray:
    """Indices of the records in the order of their content keys."""
    return np.lexsort((records["low"], records["high"]))
