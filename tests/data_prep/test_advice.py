"""Advice on books cut at blank lines and on parts that miss their target size."""

import dataclasses
from pathlib import Path

import pytest

from alma.stream import Stream
from data_prep import compressed
from data_prep.advice import books as books_warnings
from data_prep.advice import summary
from data_prep.documents import Reader

from .conftest import make_documents


@pytest.fixture
def books(tmp_path) -> Path:
    """Three files of 200 paragraphs, about 6,000 words each."""
    folder = tmp_path / "books"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.txt").write_text("\n\n".join(make_documents(n, 200)), "utf-8")
    return folder


SIZES = {"mega_batches": 1, "words": 4000, "eval_words": 4000, "valid_words": 2000}


def test_books_cut_at_blank_lines_are_a_warning(books, prepare, tmp_path, capsys):
    out = prepare(books, out=tmp_path / "out", **SIZES)
    corpus = Stream.load(out).corpus
    said = (
        "warning: books: cut at blank lines, 3 files gave 600 documents of "
        f"{corpus['words'] / 600:.0f} words on average; if each file is one document, such as a book, use "
        "--documents books=file"
    )
    captured = capsys.readouterr()
    assert said in captured.err, "early: encoding may take hours"
    assert said in captured.out
    prepare(books, out=out, **SIZES)
    assert said in capsys.readouterr().out
    for number, documents in enumerate(("file", "books=file", "books=blank-line")):
        name = tmp_path / f"{number}"
        prepare(books, out=name, documents=documents, **SIZES | {"eval_words": 5000, "valid_words": 5000})
        assert "at blank lines" not in "".join(capsys.readouterr())


def test_only_books_are_taken_for_books(books, monkeypatch):
    def warned(paths, documents, words, reader=None) -> bool:
        files = [("books", str(path)) for path in paths]
        return bool(books_warnings(files, reader or Reader(), {"books": (documents, words)}))

    paths = sorted(books.iterdir())
    assert warned(paths, 600, 50_000)
    assert not warned(paths, 600, 70_000), "long documents"
    assert not warned(paths, 200, 10_000), "short files"
    assert not warned(paths[:1], 600, 50_000), "one file"
    assert not warned([*paths, books / "a.jsonl"], 600, 50_000)
    assert not warned(paths, 600, 50_000, Reader("line"))
    assert not warned(paths, 600, 50_000, Reader(documents_of={"books": "file"}))
    assert warned(paths, 600, 50_000, Reader(documents_of={"web": "file"}))
    notes = [path.rename(path.with_suffix(".md")) for path in paths]
    assert warned(notes, 600, 50_000)
    monkeypatch.setattr(compressed, "MAX_DOCUMENT_BYTES", 1000)
    assert not warned(notes, 600, 50_000), "too long for a document"


NO_MORE = "only more words for each part bring them nearer"


LINES = "{} 10 instead of 300 splits them between lines (no line is split)"


@pytest.mark.parametrize(
    ("given", "longest", "words", "off", "between", "advice"),
    [
        (0, 500, {"valid": 1090}, "valid +9.0%", "documents of up to 500 words", "{} 10 splits them"),
        (0, 0, {"valid": 1090}, "valid +9.0%", "documents", "{} 10 splits them"),
        (0, 500, {"megabatch_00": 9850}, "megabatch_00 -1.5%", "of up to 500 words", "{} 100 splits them"),
        (300, 300, {"valid": 1090}, "valid +9.0%", "documents of up to 300 words", LINES),
        (300, 999, {"valid": 1090}, "valid +9.0%", "lines of up to 999 words", NO_MORE),
        (10, 0, {"valid": 900, "test": 19000}, "valid -10.0%, test -5.0%", "lines", NO_MORE),
        (300, 40, {"valid": 1090}, "valid +9.0%", "", "too few words are left over to cut inside documents"),
        (300, 30, {"valid": 1015}, "valid +1.5%", "documents of up to 30 words", LINES),
        (0, 500, {"valid": 990, "test": 20100}, "", "", ""),
        (10, 10, {}, "", "", ""),
    ],
)
def test_advice_only_where_it_helps(iid_stream, given, longest, words, off, between, advice):
    stream = Stream.load(iid_stream)
    targets = {f"megabatch_{t:02d}": 10_000 for t in range(3)} | {"valid": 1000, "test": 20_000}
    settings = {"words": 10_000, "mega_batches": 3, "valid_words": 1000, "eval_words": 20_000}
    parts = [
        dataclasses.replace(part, words=words.get(part.name, targets[part.name]), sources={"web": 1})
        for part in stream.parts
    ]
    made = dataclasses.replace(
        stream,
        megabatches=tuple(parts[:3]),
        valid=parts[3],
        test=parts[4],
        settings=settings | {"max_document_words": given},
        corpus=dict.fromkeys(("words", "documents", "duplicate_documents", "duplicate_words"), 1)
        | {"surplus_words": 0, "spread": 0.02}
        | ({"longest_document": longest} if longest else {}),
    )
    lines = summary(made).splitlines()
    if off:
        told = advice.format("--max-document-words")
        assert lines[-1].startswith(f"off target: {off}: ")
        assert between in lines[-1]
        assert told in lines[-1]
    else:
        assert lines[-1].startswith("read ")


def test_pieces_shorter_than_a_line_are_not_advised(prepare, tmp_path, capsys):
    """1% of 200 words are 2, but lines are never split."""
    (tmp_path / "a.txt").write_text("\n\n".join(make_documents(0, 60)), "utf-8")
    prepare(tmp_path / "a.txt", out=tmp_path / "out", mega_batches=2, words=400, valid_words=200)
    line = capsys.readouterr().out.split("off target: ")[1].splitlines()[0]
    assert "--max-document-words" not in line
    assert "only more words" in line


def test_the_advice_helps(prepare, tmp_path, capsys):
    """Long documents: with the recommended flag, every part is within 1%."""
    (tmp_path / "a.txt").write_text("\n\n".join(make_documents(0, 60, longest=200)), "utf-8")
    sizes = {"mega_batches": 2, "words": 8000, "valid_words": 6000}
    prepare(tmp_path / "a.txt", out=tmp_path / "out", **sizes)
    line = capsys.readouterr().out.split("off target: ")[1].splitlines()[0]
    advised = line.split("--max-document-words ")[1].split()[0]
    prepare(tmp_path / "a.txt", out=tmp_path / "better", max_document_words=advised, **sizes)
    assert "off target: " not in capsys.readouterr().out
