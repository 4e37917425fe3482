"""The plan of an ordered stream: causal, free of duplicates, and of the sizes asked for."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep.order import Ordered, from_corpus
from data_prep.pools import nearest

from .plans import in_hash_order, make_records, plan_of, split_of
from .test_plan import same_plan

SOURCES = ("b", "a", "d", "c")
"""Sorted by mega-batch, then by name."""
ORDER = [["b"], ["a", "d"], ["c"]]


def splits_of(
    words: int = 0, eval_words: int = 40, valid_words: int = 30, order=ORDER, first: int = 0
):
    return Ordered(len(order), words, eval_words, valid_words, None, first, order)


@st.composite
def corpora(draw):
    """(records, splits); equal documents are in one or in several sources."""
    rng = draw(st.randoms(use_true_random=False))
    words = [rng.randint(1, 20) for _ in range(draw(st.integers(60, 120)))]
    documents = [(key, count, rng.randrange(4)) for key, count in enumerate(words)]
    again = [rng.randrange(len(words)) for _ in range(draw(st.integers(0, 40)))]
    documents += [(key, words[key], rng.randrange(4)) for key in again]
    rng.shuffle(documents)
    splits = splits_of(
        draw(st.sampled_from([0, 60])), draw(st.integers(10, 40)), draw(st.integers(10, 40))
    )
    return make_records(documents), splits


def parts_of(
    records: np.ndarray, splits: Ordered, known: np.ndarray | None = None
) -> dict[str, list[int]]:
    """The keys of each part, in the order of its file. Rejects corpora that are too small."""
    sources = tuple(sorted((name for names in splits.order for name in names), key=splits.rank))
    try:
        split = split_of(records, splits, sources, known=known, range_documents=50)
    except UserError:
        reject()
    order = in_hash_order(records)
    keys = {}
    for name, numbers in splits.parts.items():
        places = [i for number in numbers for i in order[split[order] == number]]
        keys[name] = [int(records["low"][i]) for i in places]
    return keys


@given(corpora(), st.data())
@settings(max_examples=12, deadline=None)
def test_ranges_and_runs_do_not_matter(corpus, data):
    """The plan of many small ranges is that of one, with documents of a stream and without."""
    records, splits = corpus
    old = (
        records[data.draw(st.sampled_from([0, 1, 2])) :: 5].copy()
        if data.draw(st.booleans())
        else None
    )
    sizes = {
        "range_documents": data.draw(st.integers(8, 60)),
        "run_documents": data.draw(st.integers(3, 200)),
        "shards": data.draw(st.integers(1, 4)),
    }
    same_plan(records, splits, SOURCES, data.draw(st.integers(10, 200)), old, **sizes)


@given(corpora())
@settings(max_examples=12, deadline=None)
def test_the_past_is_that_of_a_stream_without_the_future(corpus):
    records, splits = corpus
    whole = parts_of(records, splits)
    for count in (1, 2):
        order = ORDER[:count]
        sources = sum(map(len, order))
        past = splits_of(splits.words, splits.eval_words, splits.valid_words, order)
        for name, keys in parts_of(records[records["source"] < sources], past).items():
            if name not in ("test", "valid"):
                assert whole[name] == keys, name


@given(corpora())
@settings(max_examples=12, deadline=None)
def test_an_addition_is_that_of_a_stream_of_everything(corpus):
    records, splits = corpus
    whole = parts_of(records, splits)
    before = {key for name, keys in whole.items() if name.endswith(("00", "01")) for key in keys}
    old = records[np.isin(records["low"], list(before))]
    added = records[records["source"] == 3].copy()
    added["source"] = 0
    last = splits_of(splits.words, splits.eval_words, splits.valid_words, [["c"]], first=2)
    parts = parts_of(added, last, old)
    assert parts.keys() == {"megabatch_02", "test_02", "valid_02"}
    for name, keys in parts.items():
        assert keys == whole[name], name


@given(corpora())
@settings(max_examples=12, deadline=None)
def test_a_document_belongs_to_the_first_megabatch_that_has_it(corpus):
    records, splits = corpus
    parts = parts_of(records, splits)
    test = parts.pop("test")
    valid = parts.pop("valid")
    everything = [key for keys in parts.values() for key in keys]
    assert len(set(everything)) == len(everything)
    megabatch = np.array([0, 1, 1, 2])[records["source"]]
    earliest = {}
    for key, t in zip(records["low"].tolist(), megabatch.tolist(), strict=True):
        earliest[key] = min(t, earliest.get(key, t))
    for name, keys in parts.items():
        number = int(name[-2:])
        if not splits.words:  # taken whole, so each document is where it came first
            assert {earliest[key] for key in keys} == {number}
        assert all(earliest[key] <= number for key in keys)
    if not splits.words:
        assert set(everything) == set(earliest)
    for mixed, name in ((test, "test"), (valid, "valid")):
        at = 0
        for t in range(3):  # of each held-out part the beginning
            keys = parts[f"{name}_{t:02d}"]
            shared = [key for key in mixed if key in keys]
            assert shared == keys[: len(shared)] == mixed[at : at + len(shared)]
            assert shared
            at += len(shared)
        assert at == len(mixed)


@given(corpora())
@settings(max_examples=12, deadline=None)
def test_the_mixed_parts_are_nearest_to_their_share(corpus):
    """Counted from the documents that the held-out part has,
    not from the words that were asked for."""
    records, splits = corpus
    parts = parts_of(records, splits)
    words = dict(zip(records["low"].tolist(), records["words"].tolist(), strict=True))
    for mixed, size in (("test", splits.eval_words), ("valid", splits.valid_words)):
        for t in range(3):
            keys = parts[f"{mixed}_{t:02d}"]
            count = nearest(np.array([words[key] for key in keys]), size // 3)
            assert set(keys) & set(parts[mixed]) == set(keys[: max(count, 1)])


def test_all_megabatches_that_are_too_small_are_named():
    documents = [(key, 10, key % 2) for key in range(30)] + [(0, 10, 3), (30, 10, 3)]
    with pytest.raises(UserError) as error:
        plan_of(
            make_records(documents), splits_of(words=200, eval_words=30, valid_words=20), SOURCES
        )
    # megabatch_00 took none
    assert str(error.value) == (
        "3 of 3 mega-batches have fewer than the 250 words of their parts "
        "(30 test + 20 validation + 200 training) after dropping duplicates: "
        "megabatch_00 (b) has 150, megabatch_01 (a, d) has 150, megabatch_02 (c) has 20; "
        "add text or ask for fewer words"
    )


def test_the_order_of_the_command_line():
    pairs = [("2023", False), ("2024", False), ("books", True), ("2024", True), ("2025", False)]
    assert from_corpus(pairs) == [["2023"], ["2024", "books"], ["2025"]]
    with pytest.raises(UserError) as error:
        from_corpus(
            [("a", True), ("b", False), ("c", False), ("b", False), ("c", False), ("b", True)]
        )
    assert str(error.value).startswith(
        "a+=: the first source begins a mega-batch; write a=; b: in two"
    )
    assert "c: in two mega-batches" in str(error.value)
