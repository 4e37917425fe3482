"""`--max-document-words`: all pieces of a document go to one part of the stream."""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import Stream
from data_prep.cut import Splits
from data_prep.order import Ordered
from data_prep.pools import LEFT_OUT
from data_prep.scan import RECORD

from .conftest import FEW
from .plans import in_hash_order, split_of
from .test_pipeline import past, texts

LIMIT = 12
IID = {"mega_batches": 3, "words": 1000, "eval_words": 400, "valid_words": 200, "vocab_size": 60}
ORDERED = IID | {"mega_batches": None, "words": 700, "eval_words": 150, "valid_words": 100}
APPEND = dict.fromkeys(IID)


def long_documents(seed: int, number: int) -> list[str]:
    """Documents of 1 to 20 lines of 6 words, each line with the name of its document."""
    rng = random.Random(seed)

    def line(name: str) -> str:
        return " ".join([name, *("".join(rng.choices("abcdefghijx", k=3)) for _ in range(5))])

    letters = str.maketrans("0123456789", "abcdefghij")  # the tokenizer knows them all
    names = [f"{seed}x{n}".translate(letters) for n in range(number)]
    documents = []
    for name in names:
        documents.append("\n".join(line(name) for _ in range(rng.randint(1, 20))))
    return documents


@pytest.fixture
def corpus(tmp_path) -> Path:
    """a.txt, b.txt and c.txt of about 4,700 words each; each repeats documents of the one
    before."""
    folder = tmp_path / "long"
    folder.mkdir()
    old: list[str] = []
    for number, name in enumerate("abc"):
        new = long_documents(number, 75)
        (folder / f"{name}.txt").write_text("\n\n".join([*new, *old[:10], *new[:3]]), "utf-8")
        old = new
    return folder


def files_of(corpus: Path) -> list[Path]:
    return sorted(corpus.iterdir())


def names_in(out: Path, prefixes: Iterable[str]) -> set[str]:
    """The documents of which a part has a piece."""
    return {text.split()[0] for prefix in prefixes for text in texts(out, prefix)}


def assert_whole(out: Path) -> Stream:
    """No document is in two parts but the mixed ones, and pieces follow each other as in the
    text."""
    stream = Stream.load(out)
    mixed = (stream.test, stream.valid) if stream.ordered else ()
    owner: dict[str, str] = {}
    for part in stream.parts:
        names = [text.split()[0] for text in texts(out, part.prefix)]
        assert len(names) > len(set(names)), "documents are split"
        changes = [
            name for name, before in zip(names, [None, *names], strict=False) if name != before
        ]
        assert len(changes) == len(set(changes)) or part in mixed, "pieces are neighbours"
        for name in set(names) if part not in mixed else ():
            assert owner.setdefault(name, part.name) == part.name
    for split, parts in ((stream.test, stream.held_out), (stream.valid, stream.held_out_valid)):
        if stream.ordered and not stream.appended:
            assert names_in(out, [split.prefix]) <= names_in(out, [part.prefix for part in parts])
    return stream


@pytest.mark.parametrize("flags", [IID, ORDERED], ids=["iid", "ordered"])
def test_a_document_is_in_one_part_and_parts_have_their_size(
    corpus, prepare, inspected, tmp_path, flags
):
    ordered = ["--ordered"] if flags is ORDERED else []
    out = prepare(
        *files_of(corpus), *ordered, out=tmp_path / "out", max_document_words=LIMIT, **flags
    )
    stream = assert_whole(out)
    for part in stream.parts:
        target = {"m": flags["words"], "t": flags["eval_words"], "v": flags["valid_words"]}[
            part.name[0]
        ]
        pieces = 3 if stream.ordered and part in (stream.test, stream.valid) else 1
        assert abs(part.words - target) <= LIMIT * pieces, part.name
    assert inspected(out, "--verify")[0] == 0
    shown = inspected(out)[1]
    column = (
        shown.splitlines()[0].split().index("documents") + 1
    )  # the names of the parts have no header
    for part in stream.parts:
        row = next(line.split() for line in shown.splitlines() if line.startswith(f"{part.name} "))
        assert int(row[column]) == len(names_in(out, [part.prefix])), (
            "inspect counts whole documents"
        )


@given(seed=st.integers(0, 10**6))
@FEW
def test_append_is_one_go_and_knows_documents_of_which_it_has_a_piece(
    corpus, prepare, tmp_path_factory, seed
):
    """The appended corpus repeats documents of which the stream has all pieces, some or none."""
    folder = tmp_path_factory.mktemp("append")
    first, *others = files_of(corpus)
    rng = random.Random(seed)
    again = folder / "again.txt"
    old = [text for path in files_of(corpus) for text in path.read_text("utf-8").split("\n\n")]
    again.write_text("\n\n".join(rng.sample(old, 150) + long_documents(seed + 5, 60)), "utf-8")
    flags = ORDERED | {"max_document_words": LIMIT, "seed": seed}
    one = prepare(*files_of(corpus), again, "--ordered", out=folder / "one", **flags)
    out = prepare(first, others[0], "--ordered", out=folder / "out", **flags)
    for path in (others[1], again):
        prepare(path, "--append", out=out, **APPEND)
    assert past(out) == past(one)
    assert_whole(out)
    iid = prepare(
        *files_of(corpus)[:2], out=folder / "iid", max_document_words=LIMIT, **IID | {"words": 500}
    )
    prepare(*others, again, "--append", out=iid, **APPEND)
    assert_whole(iid)


# The rule, on records


def records_of(documents: list[list[int]], sources: Iterable[int]) -> np.ndarray:
    """A record for each piece, given by its words, of each document."""
    records = np.zeros(sum(map(len, documents)), RECORD)
    at = 0
    for key, (pieces, source) in enumerate(zip(documents, sources, strict=True)):
        piece_records = records[at : at + len(pieces)]
        high, low, second = np.random.default_rng(key).integers(0, 2**64, 3, np.uint64).tolist()
        piece_records["high"] = high
        piece_records["low"] = (low >> 32 << 32) + np.arange(len(pieces), dtype=np.uint64)
        piece_records["second"] = second
        piece_records["words"] = pieces
        piece_records["bytes"] = pieces
        piece_records["source"] = source
        at += len(pieces)
    return records


@st.composite
def corpora(draw):
    rng = draw(st.randoms(use_true_random=False))
    streams = []
    for _ in range(draw(st.integers(20, 80))):
        streams.append([rng.randint(1, 9) for _ in range(rng.choice([1, 1, 2, 9]))])
    records = records_of(streams, [rng.randrange(2) for _ in streams])
    copies = np.array([rng.random() < 0.2 for _ in streams])[
        np.cumsum(records["low"] % 2**32 == 0) - 1
    ]
    again = records[copies].copy()
    again["source"] = 1
    return np.concatenate([records, again]).astype(RECORD), rng.choice([0.5, 0.8, 0.95])


@pytest.mark.parametrize("kind", ["iid", "ordered"])
@given(corpus=corpora(), valid=st.integers(1, 30))
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
def test_pieces_stay_together(kind, corpus, valid):
    records, share = corpus
    total = int(records["words"][records["source"] == 0].sum())
    size = max(1, int(share * total - 2 * valid) // 3)
    if kind == "iid":
        splits = Splits(2, size, size, valid, "a")
    else:
        splits = Ordered(1, size, size, valid, None, 0, [["a", "b"]])
    try:
        split = split_of(records, splits, ("a", "b"), range_documents=40)
    except UserError:
        return
    owner: dict[int, str] = {}
    for high, number in zip(records["high"].tolist(), split.tolist(), strict=True):
        if number != LEFT_OUT:
            assert owner.setdefault(high, splits.names[number]) == splits.names[number]
    taken = [
        row[:2]
        for row, number in zip(records.tolist(), split.tolist(), strict=True)
        if number != LEFT_OUT
    ]
    assert len(taken) == len(set(taken)), "an exact duplicate is dropped"


def test_a_cut_leaves_out_the_rest_of_a_document_or_is_at_the_nearest():
    """Eight documents of 10 pieces of 1 word: splits of 24 words leave out 6 words of a
    document."""
    records = records_of([[1] * 10] * 8, [0] * 8)
    order = in_hash_order(records)
    splits = split_of(records, Splits(2, 24, 12, 0, None), ("a",))[order].tolist()
    assert splits == [0] * 24 + [-1] * 6 + [1] * 24 + [-1] * 6 + [2] * 12 + [-1] * 8
    # 72 + 6 of 80 words: the first rest may be left out, the second may not
    splits = split_of(records, Splits(2, 24, 24, 0, None), ("a",))[order].tolist()
    assert splits == [0] * 24 + [-1] * 6 + [1] * 20 + [2] * 28 + [-1] * 2
