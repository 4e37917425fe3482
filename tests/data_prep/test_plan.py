"""The plan: each document in one split, cuts within half a document of their targets, no duplicates."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep import plan
from data_prep.plan import LEFT_OUT, Wanted, assign_splits, make_plan
from data_prep.scan import RECORD

SOURCES = ("alpha", "web")


def make_records(documents):
    """Records of (key, words, source) triples; equal keys are equal documents."""
    records = np.zeros(len(documents), RECORD)
    for record, (key, words, source) in zip(records, documents, strict=True):
        rng = np.random.default_rng(key)
        record["high"], record["low"], record["second"] = rng.integers(0, 2**63, 3)
        record["words"], record["source"] = words, source
    return records


@st.composite
def corpora(draw):
    """(records, wanted) with enough words in all and in the validation source."""
    words = draw(st.lists(st.integers(1, 40), min_size=20, max_size=120))
    sources = draw(st.lists(st.integers(0, 1), min_size=len(words), max_size=len(words)))
    documents = [(key, count, source) for key, (count, source) in enumerate(zip(words, sources, strict=True))]
    web = sum(count for _, count, source in documents if source == 1)
    documents.append((len(words), max(1, 60 - web), 1))
    copies = draw(st.lists(st.integers(0, len(words) - 1), max_size=20))
    again = [(key, documents[key][1], draw(st.integers(documents[key][2], 1))) for key in copies]
    total = sum(count for _, count, _ in documents)
    valid = draw(st.integers(1, 30))
    mega_batches = draw(st.integers(1, 4))
    size = (total - valid - 20) // (mega_batches + 1)
    eval_words = draw(st.integers(max(1, size // 2), max(1, size)))
    wanted = Wanted(mega_batches, max(1, size), max(1, eval_words), valid, "web")
    shuffled = draw(st.permutations(documents + again))
    return make_records(shuffled), wanted


def test_a_long_validation_document_that_leaves_too_few_words_is_an_error():
    """20 documents of 1 word and one of 59, which is nearer to 30 words of validation than none."""
    records = np.zeros(21, RECORD)
    records["high"], records["low"] = np.arange(1, 22), np.arange(1, 22)
    records["second"], records["words"] = np.arange(1, 22), 1
    records["words"][-1], records["source"][-2:], records["second"][-1] = 59, 1, 0
    wanted = Wanted(mega_batches=1, words=14, eval_words=7, valid_words=30, valid_source="web")
    with pytest.raises(UserError, match="20 words are left after validation, 21 are needed"):
        assign_splits(records, wanted, SOURCES)


@given(corpora())
@settings(max_examples=60, deadline=None)
def test_every_cut_is_within_half_a_document(corpus):
    records, wanted = corpus
    try:
        split, kept = assign_splits(records, wanted, SOURCES)
    except UserError:
        reject()
    valid = wanted.mega_batches + 1
    chosen = np.flatnonzero(split != LEFT_OUT)
    keys = list(zip(records["high"][chosen], records["low"][chosen], strict=True))
    assert len(set(keys)) == len(keys)
    assert set(chosen) <= set(kept)
    assert (records["source"][split == valid] == SOURCES.index("web")).all()

    pool = kept[split[kept] != valid]
    pool = pool[np.argsort(records["high"][pool], kind="stable")]
    assert (np.diff(split[pool][split[pool] != LEFT_OUT]) >= 0).all()
    running = np.cumsum(records["words"][pool].astype(int))
    targets = [wanted.words * k for k in range(1, wanted.mega_batches + 1)]
    targets.append(targets[-1] + wanted.eval_words)
    for number, target in enumerate(targets):
        members = np.flatnonzero(split[pool] == number)
        off = abs(int(running[members[-1]]) - target)
        assert off == np.abs(np.concatenate([[0], running]) - target).min()
        around = records["words"][pool[members[-1] : members[-1] + 2]]
        assert off <= around.max() / 2


@given(corpora(), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_buckets_follow_the_hash_order_and_add_up(corpus, bucket_words):
    records, wanted = corpus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BUCKET_WORDS", bucket_words)
        try:
            bucket, planned = make_plan(records, wanted, SOURCES)
        except UserError:
            return
    split, kept = assign_splits(records, wanted, SOURCES)
    inside = np.flatnonzero(bucket != LEFT_OUT)
    assert (planned.bucket_split[bucket[inside]] == split[inside]).all()
    assert ((bucket != LEFT_OUT) == (split != LEFT_OUT)).all()
    for number in range(wanted.mega_batches + 2):
        members = np.flatnonzero(split == number)
        ordered = members[np.argsort(records["high"][members])]
        assert (np.diff(bucket[ordered]) >= 0).all()
        assert planned.source_words[number].sum() == records["words"][members].sum()
    for number in range(len(planned.bucket_split)):
        members = bucket == number
        assert planned.bucket_documents[number] == members.sum() > 0
        assert planned.bucket_words[number] == records["words"][members].sum()
        assert planned.bucket_keys[number] == sum(map(int, records["low"][members])) % 2**64
    assert planned.duplicate_documents == len(records) - len(kept)


@given(corpora(), st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_of_reading_does_not_matter(corpus, random):
    records, wanted = corpus
    order = list(range(len(records)))
    random.shuffle(order)
    found = []
    for candidate in (records, records[order]):
        try:
            split, _ = assign_splits(candidate, wanted, SOURCES)
        except UserError:
            found.append(None)
            continue
        rows = zip(candidate["high"].tolist(), candidate["source"].tolist(), split.tolist(), strict=True)
        found.append({row for row in rows if row[-1] != LEFT_OUT})
    assert found[0] == found[1]


def test_too_few_words_says_how_many_are_missing():
    records = make_records([(0, 10, 0), (0, 10, 1), (1, 5, 1)])
    with pytest.raises(
        UserError,
        match=r"15 words in 2 documents after dropping 1 duplicates.* 28 are needed: 13 words are missing",
    ):
        assign_splits(records, Wanted(2, 8, 8, 4, "web"), SOURCES)
    with pytest.raises(UserError, match=r"source web has 5 words.*1 words are missing"):
        assign_splits(records, Wanted(1, 4, 4, 6, "web"), SOURCES)


def test_a_document_longer_than_a_megabatch_is_refused():
    records = make_records([(0, 100, 0), (1, 100, 0), (2, 5, 1)])
    with pytest.raises(UserError, match="would be empty: the longest document has 100 words"):
        assign_splits(records, Wanted(4, 30, 30, 5, "web"), SOURCES)


@given(corpora(), st.randoms())
@settings(max_examples=40, deadline=None)
def test_documents_of_the_stream_are_in_no_new_megabatch(corpus, random):
    """The plan is that of the corpus without the documents that the stream has."""
    records, wanted = corpus
    wanted = Wanted(wanted.mega_batches, wanted.words, 0, 0, None, first=5)
    old = records[random.sample(range(len(records)), len(records) // 4)].copy()
    keys = set(zip(old["high"].tolist(), old["low"].tolist(), strict=True))
    had = np.array([(row["high"], row["low"]) in keys for row in records])
    old["words"] = old["source"] = old["second"] = 0  # only their keys are known
    try:
        expected, _ = assign_splits(records[~had], wanted, SOURCES)
    except UserError as error:
        with pytest.raises(UserError, match=str(error).split(" ")[0]):
            assign_splits(np.concatenate([old, records]), wanted, SOURCES, len(old))
        return
    split, kept = assign_splits(np.concatenate([old, records]), wanted, SOURCES, len(old))
    assert (split[: len(old)] == LEFT_OUT).all()
    assert (split[len(old) :][had] == LEFT_OUT).all()
    assert (split[len(old) :][~had] == expected).all()
    bucket, planned = make_plan(np.concatenate([old, records]), wanted, SOURCES, len(old))
    assert len(bucket) == planned.documents == len(records)
    assert planned.duplicate_documents == len(records) - len(kept)
    assert wanted.names == [f"megabatch_{5 + t:02d}" for t in range(wanted.mega_batches)]


def test_keys_that_share_their_first_half_are_different_documents():
    records = np.zeros(40, RECORD)
    records["high"], records["low"], records["words"] = 7, np.repeat(np.arange(20), 2)[::-1], 1
    split, kept = assign_splits(records, Wanted(4, 5, 0, 0, None), SOURCES)
    assert records["low"][kept].tolist() == list(range(20))
    assert (kept % 2 == 0).all()  # the first of two
    assert np.bincount(split[kept]).tolist() == [5] * 4


def test_a_plan_takes_less_than_100_bytes_a_document():
    count = 300_000
    rng = np.random.default_rng(0)
    records = np.zeros(count, RECORD)
    for name in ("high", "low", "second"):
        records[name] = rng.integers(0, 2**63, count)
    records["words"] = rng.integers(1, 1000, count)
    records[: count // 10] = records[count // 2 :][: count // 10]
    size = int(records["words"].sum()) // 8
    tracemalloc.start()
    make_plan(records, Wanted(5, size, size, size // 9, "alpha"), SOURCES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / count + RECORD.itemsize < 100
