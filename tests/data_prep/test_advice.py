"""The table of a stream, and the warnings before hours of work."""

from pathlib import Path

import pytest

from alma.stream import Stream
from data_prep import shuffle
from data_prep.advice import books as books_warnings
from data_prep.documents import Reader

from .conftest import make_documents

SIZES = {"mega_batches": 1, "words": 4000, "eval_words": 4000, "valid_words": 2000}


@pytest.fixture
def books(tmp_path) -> Path:
    """Three files of 200 paragraphs, about 6,000 words each."""
    folder = tmp_path / "books"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.txt").write_text("\n\n".join(make_documents(n, 200)), "utf-8")
    return folder


def test_books_cut_at_blank_lines_are_a_warning(books, prepare, tmp_path, capsys):
    out = prepare(books, out=tmp_path / "out", **SIZES)
    average = Stream.load(out).corpus["words"] / 600
    said = (
        f"warning: books: cut at blank lines, 3 files gave 600 documents of {average:.0f} words on average; "
        "if each file is one document, such as a book, use --documents books=file"
    )
    captured = capsys.readouterr()
    assert said in captured.err
    assert said in captured.out
    prepare(books, out=out, **SIZES)
    assert said in capsys.readouterr().out


def test_only_books_are_taken_for_books(books):
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
    assert not warned(paths, 600, 50_000, Reader(documents_of={"books": "blank-line"}))
    assert warned(paths, 600, 50_000, Reader(documents_of={"web": "file"}))


def test_long_documents_are_a_warning_before_the_shuffle(corpus, prepare, tmp_path, capsys, monkeypatch):
    (corpus / "long.txt").write_text("\n".join(f"long word{n}" for n in range(400)), "utf-8")
    monkeypatch.setattr(shuffle, "shuffle_shard", lambda *_: pytest.fail("too late"))
    with pytest.raises(pytest.fail.Exception):
        prepare(corpus, out=tmp_path / "out", max_document_words=12)
    said = "warning: the longest document has 800 words, valid is to have 300: all pieces"
    assert capsys.readouterr().err.count(said) == 1


def test_the_advice_for_parts_off_their_target_helps(prepare, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join(make_documents(0, 60, longest=200)), "utf-8")
    sizes = {"mega_batches": 2, "words": 8000, "valid_words": 6000}
    prepare(tmp_path / "a.txt", out=tmp_path / "out", **sizes)
    line = capsys.readouterr().out.split("off target: ")[1].splitlines()[0]
    assert "parts end between documents; --max-document-words N splits them" in line
    prepare(tmp_path / "a.txt", out=tmp_path / "better", max_document_words=60, **sizes)
    assert "off target: " not in capsys.readouterr().out
