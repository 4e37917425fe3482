"""Near duplicates: MinHash and its bands against exact Jaccard similarities."""

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import near_duplicates as nd
from data_prep.documents import Reader
from data_prep.work import Workspace, open_items

from .conftest import edited, make_documents


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + nd.N]) for i in range(max(1, len(words) - nd.N + 1))}


def jaccard(one: str, other: str) -> float:
    a = grams(one)
    b = grams(other)
    return len(a & b) / len(a | b)


def test_an_exported_number_of_threads_does_not_multiply_the_workers(monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    nd.library()
    assert os.environ["RAYON_NUM_THREADS"] == "1"


@pytest.mark.parametrize("count", range(1, nd.N))
def test_short_documents_that_differ_in_any_word_are_no_duplicates(count):
    """A document of fewer than N words is one n-gram of all its words."""
    words = [f"word{i}" for i in range(count)]
    hashes = nd.n_grams_of([" ".join(words).encode()])[0].tolist()
    for i in range(count):
        other = [*words[:i], "another", *words[i + 1 :]]
        hashes += nd.n_grams_of([" ".join(other).encode()])[0].tolist()
    assert len(set(hashes)) == len(hashes) == 1 + count


def found_near(
    folder, documents: list[tuple[str, int]], files: int = 1, first: int = 0
) -> np.ndarray:
    """Run the stage on (text, mega-batch), spread over files."""
    space = Workspace(folder, 0, Reader(), ())
    for number in range(files):
        path = space.file("entries", number, "bin")
        with open_items(path) as file:
            entries = nd.EntryWriter(file, {str(number): number for _, number in documents})
            for text, arrival in documents[number::files]:
                entries.add(key(text), str(arrival), text.encode())
            entries.finish()
        nd.write_bands(space, number, path)
    ranges = nd.count_ranges(nd.entry_files(space, files, ()))
    for number in range(ranges):
        nd.find_range(space, number, ranges, files, (), first)
    return np.concatenate([nd.near_between(space, ranges, number, 3) for number in range(3)])


def key(text: str) -> bytes:
    return random.Random(text).randbytes(nd.DOCUMENT_BYTES)


def names(near: np.ndarray, documents: list[tuple[str, int]]) -> set[tuple[str, int, str, int]]:
    """Texts and mega-batches of the pairs found."""
    of = {np.array(key(text), nd.KEY)[()]: text for text, _ in documents}
    return {
        (of[row["key"]], row["arrival"], of[row["other"]], row["other_arrival"]) for row in near
    }


@pytest.fixture
def collection() -> list[tuple[str, int]]:
    """Documents of three mega-batches, each with edited copies in its own and in others."""
    rng = random.Random(0)
    documents = []
    for number, text in enumerate(make_documents(7, 25, 60)):
        documents.append((text, number % 3))
        size = len(text.split(" "))
        for share in (0, 0.004, 0.01, 0.02, 0.05, 0.3):
            documents.append((edited(text, round(share * size), number), rng.randrange(3)))
    return list(dict.fromkeys(documents))


def test_pairs_are_those_of_exact_similarity(tmp_path, collection):
    near_names = names(found_near(tmp_path, collection), collection)
    assert near_names
    missed = wrong = 0
    for one, arrival in collection:
        for batch in range(arrival + 1):
            earlier = {
                other: jaccard(one, other)
                for other, at in collection
                if at == batch and other != one and (batch < arrival or key(other) < key(one))
            }
            of_batch = {
                pair[2] for pair in near_names if pair[:2] == (one, arrival) and pair[3] == batch
            }
            assert len(of_batch) <= 1
            assert of_batch <= earlier.keys()
            most = max(earlier.values(), default=0)
            missed += most > 0.9 and not of_batch
            wrong += bool(of_batch) and most < 0.7
            if of_batch:  # the first of them
                near = {other for other, similarity in earlier.items() if similarity > 0.9}
                assert all(key(of_batch.copy().pop()) <= key(other) for other in near)
    assert not missed
    assert not wrong


def test_files_ranges_and_blocks_do_not_matter(tmp_path, collection, monkeypatch):
    whole = found_near(tmp_path, collection)
    for name, value in {
        "RANGE_BANDS": 500,
        "_RUN": 10,
        "_BLOCK": 7,
        "_PAIRS": 5,
        "_CHUNK": 999,
    }.items():
        monkeypatch.setattr(nd, name, value)
    random.Random(1).shuffle(collection)
    assert found_near(tmp_path, collection, files=4).tobytes() == whole.tobytes()


def test_of_a_stream_that_grows_only_new_documents_are_dropped(tmp_path, collection):
    whole = found_near(tmp_path, collection)
    new = found_near(tmp_path, collection, first=2)
    assert new.tobytes() == whole[whole["arrival"] == 2].tobytes()
    assert len(new)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.text("ab \n", min_size=1).map(lambda t: " ".join(t.split())).filter(bool), min_size=1
    )
)
def test_hashes_depend_on_the_text_alone(texts):
    data = [text.encode() for text in texts]
    together = nd.hash_documents(data)
    for text, hashes in zip(data, together, strict=True):
        assert nd.hash_documents([text])[0].tolist() == hashes.tolist()
    for i, one in enumerate(texts):
        for j, other in enumerate(texts[:i]):
            if grams(one) == grams(other):
                assert (together[i] == together[j]).all()


@pytest.mark.parametrize("count", range(1, nd.N + 1))
def test_short_documents_that_differ_in_one_word_are_kept(tmp_path, count):
    """A headline is no copy of another one, whichever of its words differs."""
    words = ["shares", "fell", "again", "on", "Monday"][:count]
    documents = [(" ".join(words), 0)]
    for place in range(count):
        other = [*words[:place], "unlike", *words[place + 1 :]]
        documents.append((" ".join(other), 0))
    assert not len(found_near(tmp_path, documents))


def test_many_documents_in_one_band_are_compared_with_the_first_alone(tmp_path, monkeypatch):
    """A million pages from one template are not compared in pairs."""
    text = make_documents(8, 1, 60)[0]
    documents = list(dict.fromkeys((edited(text, 1, seed), 0) for seed in range(200)))
    pairs = 0
    slices = nd._slices

    def counted(counts):
        nonlocal pairs
        pairs += int(counts.sum())
        return slices(counts)

    monkeypatch.setattr(nd, "_slices", counted)
    near = found_near(tmp_path, documents)
    assert len(np.unique(near["key"])) >= 195
    assert pairs <= nd._FIRST * nd.BANDS * len(documents)
