"""The plan: each document in one split, cuts within half a document of their targets,
no duplicates."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep import plan, ranges, scan
from data_prep.cut import Splits
from data_prep.pools import LEFT_OUT, nearest
from data_prep.scan import RECORD

from .plans import build_to_plan, in_hash_order, make_records, plan_of, split_of, write_scans

SOURCES = ("alpha", "web")


@st.composite
def corpora(draw):
    """(records, splits) with enough words in all and in the validation source."""
    words = draw(st.lists(st.integers(1, 40), min_size=20, max_size=120))
    sources = draw(st.lists(st.integers(0, 1), min_size=len(words), max_size=len(words)))
    documents = [
        (key, count, source) for key, (count, source) in enumerate(zip(words, sources, strict=True))
    ]
    web = sum(count for _, count, source in documents if source == 1)
    documents.append((len(words), max(1, 60 - web), 1))
    copies = draw(st.lists(st.integers(0, len(words) - 1), max_size=20))
    again = [(key, documents[key][1], draw(st.integers(documents[key][2], 1))) for key in copies]
    total = sum(count for _, count, _ in documents)
    valid = draw(st.integers(1, 30))
    mega_batches = draw(st.integers(1, 4))
    size = (total - valid - 20) // (mega_batches + 1)
    eval_words = draw(st.integers(max(1, size // 2), max(1, size)))
    splits = Splits(mega_batches, max(1, size), max(1, eval_words), valid, "web")
    shuffled = draw(st.permutations(documents + again))
    return make_records(shuffled), splits


def documents_of(records, split):
    """The distinct documents in hash order: (indices of the copy that is in a split, or of any;
    splits)."""
    order = in_hash_order(records)
    keys = np.stack([records["high"][order], records["low"][order]], 1).astype(np.uint64)
    groups = np.split(order, 1 + np.flatnonzero((keys[1:] != keys[:-1]).any(1)))
    chosen = [group[np.argmax(split[group])] for group in groups]
    assert all((split[group] != LEFT_OUT).sum() <= 1 for group in groups), (
        "a document is twice in the stream"
    )
    return np.array(chosen), split[chosen]


@given(corpora())
@settings(max_examples=12, deadline=None)
def test_every_cut_is_within_half_a_document(corpus):
    records, splits = corpus
    try:
        split = split_of(records, splits, SOURCES)
    except UserError:
        reject()
    valid = splits.mega_batches + 1
    chosen, split_of_document = documents_of(records, split)
    assert (records["source"][split == valid] == SOURCES.index("web")).all()
    words = records["words"][chosen].astype(int)

    pool = split_of_document != valid
    in_split = pool & (split_of_document != LEFT_OUT)
    assert (np.diff(split_of_document[in_split]) >= 0).all()
    running = np.cumsum(words[pool])
    targets = [splits.words * k for k in range(1, splits.mega_batches + 1)]
    targets.append(targets[-1] + splits.eval_words)
    for number, target in enumerate(targets):
        members = np.flatnonzero(split_of_document[pool] == number)
        off = abs(int(running[members[-1]]) - target)
        assert off == np.abs(np.concatenate([[0], running]) - target).min()
        assert off <= words[pool][members[-1] : members[-1] + 2].max() / 2

    first = {}  # a document found in several sources counts for the first
    for low, source in zip(records["low"].tolist(), records["source"].tolist(), strict=True):
        first[low] = min(source, first.get(low, source))
    web = [i for i in chosen if first[int(records["low"][i])] == 1]
    web = sorted(web, key=lambda i: records["second"][i])
    count = nearest(records["words"][web], splits.valid_words)
    assert set(records["low"][web[:count]].tolist()) == set(records["low"][split == valid].tolist())


@given(corpora(), st.integers(1, 200))
@settings(max_examples=12, deadline=None)
def test_buckets_follow_the_hash_order_and_add_up(corpus, bucket_bytes):
    records, splits = corpus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BUCKET_BYTES", bucket_bytes)
        try:
            bucket, planned = plan_of(records, splits, SOURCES, range_documents=60)
        except UserError:
            reject()
    assert (np.diff(planned.bucket_split) >= 0).all()
    order = in_hash_order(records)
    for number in range(splits.mega_batches + 2):
        shuffled = bucket[order][np.isin(bucket[order], planned.buckets(number))]
        assert (np.diff(shuffled) >= 0).all()
        members = np.isin(bucket, planned.buckets(number))
        assert planned.source_words[number].sum() == records["words"][members].sum()
        sizes = [
            records["bytes"][bucket == bucket_number].sum()
            for bucket_number in planned.buckets(number)
        ]
        before = np.cumsum(sizes)[:-1]
        assert (np.diff(before // bucket_bytes) > 0).all()
    for number in range(len(planned.bucket_split)):
        members = bucket == number
        assert planned.bucket_documents[number] == members.sum() > 0
        assert planned.bucket_words[number] == records["words"][members].sum()
        assert planned.bucket_keys[number] == sum(map(int, records["low"][members])) % 2**64
    chosen, _ = documents_of(records, bucket)
    words = records["words"]
    assert planned.duplicates.tolist() == [
        len(records) - len(chosen),
        words.sum() - words[chosen].sum(),
    ]


@given(corpora(), st.data())
@settings(max_examples=12, deadline=None)
def test_ranges_and_runs_do_not_matter(corpus, data):
    """The plan of many small ranges is that of one."""
    records, splits = corpus
    sizes = {
        "range_documents": data.draw(st.integers(8, 60)),
        "run_documents": data.draw(st.integers(3, 200)),
        "shards": data.draw(st.integers(1, 4)),
    }
    same_plan(records, splits, SOURCES, data.draw(st.integers(20, 400)), **sizes)


def same_plan(records, splits, sources, bucket_bytes, known=None, **sizes):
    """Plan in one range and with `sizes`; AssertionError: buckets, numbers or errors differ."""
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BUCKET_BYTES", bucket_bytes)
        for options in ({}, sizes):
            try:
                bucket, planned = plan_of(records, splits, sources, known, **options)
            except UserError as error:
                plans.append(str(error))
                continue
            rows = zip(
                records["low"].tolist(), records["source"].tolist(), bucket.tolist(), strict=True
            )
            numbers = {name: np.array(value).tolist() for name, value in vars(planned).items()}
            plans.append(
                (sorted(rows), numbers | {"valid_last": planned.valid_last["low"].tolist()})
            )
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("documents", "splits", "message"),
    [
        ([(0, 10, 0), (0, 10, 1), (1, 5, 1)], Splits(2, 8, 8, 4, "web"),
         "15 words in 2 documents after dropping 1 duplicates.* "
         "28 are needed: 13 words are missing"),
        ([(0, 10, 0), (1, 5, 1)], Splits(1, 4, 4, 6, "web"),
         "source web has 5 words.*1 words are missing"),
        ([(0, 100, 0), (1, 100, 0), (2, 5, 1)], Splits(4, 30, 30, 5, "web"),
         "longest document has 100"),
        # 59 is nearer to 30 words of validation than none
        ([(0, 59, 1), *((key, 1, 0) for key in range(1, 21))], Splits(1, 14, 7, 30, "web"),
         "20 words are left after validation, 21 are needed"),
    ],
)  # fmt: skip
def test_too_few_words(documents, splits, message):
    with pytest.raises(UserError, match=message):
        plan_of(make_records(documents), splits, SOURCES)


def test_second_hashes_are_compared_to_the_last_bit_and_equal_ones_in_hash_order():
    records = np.zeros(60, RECORD)
    records["high"] = np.random.default_rng(0).permutation(60) * (2**64 // 60)
    records["low"] = np.arange(60)
    records["words"] = 2
    records["second"] = 2**63 + 5
    records["second"][:3] = 2**63 + 4
    split = split_of(records, Splits(1, 40, 20, 25, "alpha"), SOURCES, range_documents=7)
    order = in_hash_order(records)
    expected = [*order[order < 3], *order[order >= 3]][:12]
    assert set(np.flatnonzero(split == 2)) == set(expected)


@given(corpora(), st.randoms())
@settings(max_examples=12, deadline=None)
def test_documents_of_the_stream_are_in_no_new_megabatch(corpus, random):
    """The plan is that of the corpus without the documents that the stream has."""
    records, splits = corpus
    splits = Splits(splits.mega_batches, splits.words, 0, 0, None, first=5)
    old = records[random.sample(range(len(records)), len(records) // 4)].copy()
    had = np.isin(records["low"], old["low"])
    same_plan(records, splits, SOURCES, 300, old, range_documents=30, run_documents=11)
    rest = records[~had]
    try:
        expected = split_of(rest, splits, SOURCES)
    except UserError as error:
        with pytest.raises(UserError, match=str(error).split(" ")[0]):
            plan_of(records, splits, SOURCES, old)
        return
    split = split_of(records, splits, SOURCES, known=old)
    assert (split[had] == LEFT_OUT).all()
    placed, placed_alone = (
        set(zip(rows["low"].tolist(), splits.tolist(), strict=True))
        for rows, splits in ((records[~had], split[~had]), (rest, expected))
    )
    assert {row for row in placed if row[1] >= 0} == {row for row in placed_alone if row[1] >= 0}
    assert splits.names == [f"megabatch_{5 + t:02d}" for t in range(splits.mega_batches)]


def test_keys_that_share_their_first_half_are_different_documents():
    records = np.zeros(40, RECORD)
    records["high"] = 7
    records["low"] = np.repeat(np.arange(20) << 32, 2)[::-1]
    records["words"] = 1
    split = split_of(records, Splits(4, 5, 0, 0, None), SOURCES, range_documents=5)
    chosen = np.flatnonzero(split != LEFT_OUT)
    assert sorted(records["low"][chosen].tolist()) == [key << 32 for key in range(20)]
    assert (chosen % 2 == 0).all()  # the first of two
    assert np.bincount(split[chosen]).tolist() == [5] * 4


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """Not even by 4 bytes a document."""
    monkeypatch.setattr(ranges, "RANGE_DOCUMENTS", 5_000)
    monkeypatch.setattr(scan, "RUN_DOCUMENTS", 10_000)
    peaks = []
    for count in (1_000, 20_000, 80_000):  # the first only imports and caches
        rng = np.random.default_rng(0)
        records = np.zeros(count, RECORD)
        for name in ("high", "low", "second"):
            records[name] = rng.integers(0, 2**64, count, np.uint64)
        records["words"] = rng.integers(1, 1000, count)
        records[: count // 10] = records[count // 2 :][: count // 10]
        size = int(records["words"].sum()) // 8
        (tmp_path / str(count)).mkdir()
        space, _ = write_scans(tmp_path / str(count), records, SOURCES, 2)
        splits = Splits(5, size, size, size // 9, "alpha")
        tracemalloc.start()
        build_to_plan(space, splits, 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 4 * 60_000, peaks


def test_memory_does_not_grow_with_the_copies_of_a_text(tmp_path, monkeypatch):
    """A range has one record for each run of the scan that has the text."""
    monkeypatch.setattr(scan, "RUN_DOCUMENTS", 1_000)
    records = make_records([(0, 3, 0)] * 2_500 + [(key, 3, 1) for key in range(1, 500)])
    space, _ = write_scans(tmp_path, records, SOURCES, 1)
    splits = Splits(1, 600, 300, 100, "web")
    build_to_plan(space, splits, 1)
    assert len(ranges.sorted_records(space, 0)) == 3 + 499
    bucket, planned = plan_of(records, splits, SOURCES)
    assert (bucket[:2_500] != LEFT_OUT).sum() <= 1
    assert (planned.read.tolist(), planned.duplicates.tolist()) == ([2_999, 8_997], [2_499, 7_497])
