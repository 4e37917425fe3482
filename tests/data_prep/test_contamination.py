"""Contamination: the share of the held-out text that occurs in the training data before it."""

import pytest

from alma.stream import Stream
from alma.workers import Workers
from data_prep import contamination, similarity
from data_prep.words import hash_bytes, hash_texts

from .conftest import make_documents
from .small_streams import write_stream
from .test_pipeline import texts

FILES = {"dict.txt": "".join(f"\u2581w{i} 1\n" for i in range(50)), "tokenizer.model": "not read"}


def measured(out):
    with Workers(1) as workers:
        return contamination.contamination(Stream.load(out), workers)


def slow(held_out: list[str], training: list[str]) -> tuple[float, float]:
    """The shares of n-grams and of documents, by sets of strings."""

    def grams(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [
            tuple(words[i : i + contamination.N]) for i in range(len(words) - contamination.N + 1)
        ]

    seen = {gram for text in training for gram in grams(text)}
    hits = []
    for text in held_out:
        hits.append([gram in seen for gram in grams(text)])
    flat = [hit for hits_of_text in hits for hit in hits_of_text]
    mostly = [
        sum(hits_of_text) > contamination.MOSTLY * len(hits_of_text)
        for hits_of_text in hits
        if hits_of_text
    ]
    return (sum(flat) / len(flat), sum(mostly) / len(mostly)) if flat else (0, 0)


def test_known_shares(tmp_path, inspected):
    """Of 10 n-grams of valid, 3 are in training, across lines but not documents;
    the tests are 1 of 2."""
    line = list(range(4, 24))
    train = [[line[:7], line[7:10]], [line[10:17]], [line[17:20]]]
    valid = [[line[:17]], [line[:7]]]  # the second has no n-gram
    test = [[line[:5], line[5:10]], [line[::-1]]]
    out = write_stream(tmp_path / "out", [train, [[line[10:]]], valid, test], files=FILES)
    assert measured(out) == {"valid": [0.3, 0], "test": [3 / 16, 0.5]}
    code, text, _ = inspected(out)
    assert code == 0
    rows = [line.split() for line in text[text.index("Contamination") :].splitlines()]
    assert ["valid", "30.0%", "0.0%"] in rows
    assert ["test", "18.8%", "50.0%"] in rows


@pytest.fixture
def overlapping(tmp_path):
    """Three sources, without rare characters; documents of a later one repeat lines of the
    earlier."""
    letters = str.maketrans("0123456789x", "bdfgklmnprs")
    new = []
    for seed in (1, 2, 3):
        new.append([text.translate(letters) for text in make_documents(seed, 60, 12)])
    for number, name in enumerate("abc"):
        before = [text for texts_of_part in new[:number] for text in texts_of_part]
        mixed = [f"{text}\n{old}" for text, old in zip(new[number], before[::2], strict=False)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join([*new[number], *mixed]), "utf-8")
    return [f"{name}={tmp_path / name}.txt" for name in "abc"]


@pytest.mark.parametrize("ordered", [False, True])
def test_it_is_a_slow_count(overlapping, prepare, tmp_path, monkeypatch, ordered):
    words = [*overlapping]
    flags = {"eval_words": 1500}
    if ordered:
        words.append("--ordered")
        flags = {"mega_batches": None, "words": None, "eval_words": 700}
    out = prepare(*words, out=tmp_path / "out", **flags)
    stream = Stream.load(out)
    monkeypatch.setattr(similarity, "_BLOCK", 97)  # words and n-grams cross the borders of blocks
    training = [texts(out, part.prefix) for part in stream.megabatches]
    shares = measured(out)
    parts = [*stream.held_out, *stream.held_out_valid] if ordered else [stream.test, stream.valid]
    assert list(shares) == [part.name for part in parts]
    for part in parts:
        last = int(part.name[-2:]) + 1 if ordered else len(training)
        before = [text for batch in training[:last] for text in batch]
        assert shares[part.name] == pytest.approx(list(slow(texts(out, part.prefix), before)))
    assert shares["test_00"][0] < shares["test_02"][0] if ordered else shares["test"][0] > 0.1


def test_a_large_part_is_sampled(overlapping, prepare, tmp_path, monkeypatch):
    out = prepare(*overlapping, out=tmp_path / "out")
    monkeypatch.setattr(contamination, "SAMPLE", 200)
    looked_up = []
    held_out = contamination.held_out

    def counted(*arguments):
        parts = held_out(*arguments)
        looked_up.append(len(parts[0]))
        return parts

    monkeypatch.setattr(contamination, "held_out", counted)
    measured(out)
    assert set(looked_up) == {100}


def test_words_of_text_and_of_tokens_have_the_same_hashes():
    texts = [b"ab c\nabc", b"a", "\u00e9 ab".encode()]
    hashes, owners = hash_texts(texts)
    assert owners.tolist() == [0, 0, 0, 1, 2, 2]
    words = [b"ab", b"c", b"abc", b"a", "\u00e9".encode(), b"ab"]
    assert hashes.tolist() == [hash_bytes(word) for word in words]
    assert len(set(hashes.tolist())) == 5
