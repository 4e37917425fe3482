"""--near-duplicates drop: what it drops does not depend on files, workers, restarts or later
data."""

import pytest

from alma.stream import Stream

from .conftest import LETTERS, make_documents
from .test_near_duplicates import jaccard
from .test_pipeline import IID, ORDERED, past, texts

DROP = {"near_duplicates": "drop"}
APPEND = dict.fromkeys(ORDERED | DROP)


def held(out) -> list[list[str]]:
    """The documents of all parts: of an i.i.d. stream in one list, of an ordered one by
    mega-batch."""
    stream = Stream.load(out)
    if not stream.ordered:
        return [[text for part in stream.parts for text in texts(out, part.prefix)]]
    groups = zip(stream.held_out, stream.held_out_valid, stream.megabatches, strict=True)
    documents = []
    for group in groups:
        documents.append([text for part in group for text in texts(out, part.prefix)])
    return documents


def survivors(out) -> list[float]:
    """For each document its highest similarity to another of its mega-batch or of an earlier
    one."""
    before: list[str] = []
    similarities = []
    for batch in held(out):
        for number, text in enumerate(batch):
            similarities.append(
                max((jaccard(text, earlier) for earlier in before + batch[:number]), default=0)
            )
        before += batch
    return similarities


def near_of(out) -> int:
    return Stream.load(out).corpus["near_duplicate_documents"]


def test_no_near_duplicate_is_left(near, prepare, tmp_path, capsys, inspected):
    keep = prepare(*near, out=tmp_path / "keep", **IID)  # the default
    assert "near dup" not in capsys.readouterr().out
    assert not list(keep.rglob("*.near"))
    assert "near" not in (keep / "stream.json").read_text()
    out = prepare(*near, out=tmp_path / "drop", **IID, **DROP)
    printed = capsys.readouterr().out
    assert max(survivors(keep)) > 0.9
    assert max(survivors(out)) < 0.9
    record = Stream.load(out).corpus
    assert f"of which {record['near_duplicate_documents']} near duplicates" in printed
    assert near_of(out) > 40
    assert f"Dropped: {near_of(out)} near duplicates" in inspected(out)[1]
    assert "Near duplicates were kept" in inspected(keep)[1]
    assert inspected(out, "--verify")[0] == 0


def test_in_order_the_first_mega_batch_keeps_its_documents(near, prepare, tmp_path):
    flags = ORDERED | {"words": 1200}
    keep = prepare(*near, "--ordered", out=tmp_path / "keep", **flags)
    out = prepare(*near, "--ordered", out=tmp_path / "drop", **flags, **DROP)
    assert max(survivors(keep)) > 0.9
    assert max(survivors(out)) < 0.9
    first, *_ = held(out)
    alone = prepare(near[0], "--ordered", out=tmp_path / "alone", **flags, **DROP)
    assert set(held(alone)[0]) == set(first)


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_near_duplicate_of_surplus_is_kept(prepare, tmp_path, limit):
    """What the first mega-batch leaves out drops nothing in the second; all that it takes does."""
    old = [text.translate(LETTERS) for text in make_documents(1, 60, 30)]
    new = [f"{text} kept" for text in old]
    for name, documents in (("a", old), ("b", new)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents), "utf-8")
    flags = ORDERED | {"words": 1500, "max_document_words": limit}
    out = prepare(
        tmp_path / "a.txt", tmp_path / "b.txt", "--ordered", out=tmp_path / "out", **flags, **DROP
    )
    one, other = held(out)
    assert max(survivors(out)) < 0.9
    assert len(one) < 40
    assert len(other) > 10
    assert not {f"{text} kept" for text in one} & set(other)


def test_append_is_one_go(near, prepare, tmp_path):
    flags = ORDERED | DROP | {"words": 1200, "max_document_words": 20}
    whole = prepare(*near, "--ordered", out=tmp_path / "whole", **flags)
    out = prepare(near[0], "--ordered", out=tmp_path / "out", **flags)
    for source in near[1:]:
        prepare(source, "--append", out=out, **APPEND | {"max_document_words": None})
    assert past(out) == past(whole)
    stream = Stream.load(out)
    added = [addition["corpus"] for addition in stream.appended]
    dropped = sum(corpus["duplicate_documents"] for corpus in (stream.corpus, *added))
    assert dropped == Stream.load(whole).corpus["duplicate_documents"]
    assert all(addition["near_duplicate_documents"] for addition in added)


def test_an_addition_has_no_near_copy_of_what_models_are_tested_on(prepare, tmp_path):
    """Nor of the validation set, which is taken in another order than the rest."""
    old = [text.translate(LETTERS) for text in make_documents(1, 120, 30)]
    (tmp_path / "a.txt").write_text("\n\n".join(old), "utf-8")
    sizes = IID | {"mega_batches": 1, "words": 2000, "eval_words": 1000, "valid_words": 2000}
    out = prepare(tmp_path / "a.txt", out=tmp_path / "out", **sizes, **DROP)
    stream = Stream.load(out)
    held_out = [text for part in (stream.test, stream.valid) for text in texts(out, part.prefix)]
    assert len(texts(out, stream.valid.prefix)) > 3
    new = [text.translate(LETTERS) for text in make_documents(2, 40, 30)]
    (tmp_path / "b.txt").write_text("\n\n".join([*new, *(f"{t} more" for t in old)]), "utf-8")
    prepare(tmp_path / "b.txt", "--append", out=out, **APPEND | {"mega_batches": 1, "words": 3000})
    added = texts(out, Stream.load(out).megabatches[1].prefix)
    long_copies = {f"{text} more" for text in held_out if len(text.split()) > 60}
    assert len(added) > 20
    assert not long_copies & set(added)


def test_append_to_mega_batches_that_are_iid(near, prepare, tmp_path):
    out = prepare(*near[:2], out=tmp_path / "out", **IID | {"words": 1000}, **DROP)
    prepare(near[2], "--append", out=out, **APPEND | {"mega_batches": 1, "words": 1000})
    assert max(survivors(out)) < 0.9
    assert Stream.load(out).appended[0]["corpus"]["near_duplicate_documents"]
