"""--append: adds mega-batches of new documents to a finished stream."""

from pathlib import Path

import pytest

from alma.files import LOCK
from alma.stream import Stream

from .conftest import make_documents
from .test_pipeline import digests, texts

NEW = {"mega_batches": None, "words": None, "valid_words": None, "vocab_size": None}


@pytest.fixture
def stream(corpus, prepare, tmp_path) -> Path:
    """Three mega-batches of 1,500 words."""
    return prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "stream")


@pytest.fixture
def documents(corpus, tmp_path) -> Path:
    """600 new documents and the whole corpus of the stream."""
    old = "\n\n".join(path.read_text("utf-8") for path in sorted(corpus.iterdir()))
    new = make_documents(3, 600)
    path = tmp_path / "more.txt"
    path.write_text("\n\n".join([*new[:300], old, *new[300:], *new[:7]]), "utf-8")
    return path


def test_new_documents_alone_are_added(stream, documents, prepare, capsys):
    before = {path: path.stat().st_mtime_ns for path in stream.rglob("[!.]*") if path.is_file()}
    old = digests(stream)
    had = [text for part in Stream.load(stream).parts for text in texts(stream, part.prefix)]
    capsys.readouterr()
    prepare(documents, "--append", out=stream, **NEW | {"mega_batches": 2})
    printed = capsys.readouterr().out
    now = digests(stream)
    assert now.items() >= old.items()
    changed = {path for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed - {stream / LOCK} == {stream / "stream.json"}
    longer = Stream.load(stream)
    assert [part.name for part in longer.megabatches] == [f"megabatch_{t:02d}" for t in range(5)]
    added = [text for part in longer.megabatches[3:] for text in texts(stream, part.prefix)]
    assert not set(added) & set(had)
    assert len(added) == len(set(added)) == sum(part.documents for part in longer.megabatches[3:])
    assert set(added) & set(make_documents(3, 600))
    # the surplus of alpha and web was in no part, so it may be added
    assert set(added) <= {*make_documents(3, 600), *make_documents(1, 300), *make_documents(2, 200)}
    for part in longer.megabatches[3:]:
        longest = max(len(text.split()) for text in added)
        assert abs(part.words - 1500) <= longest / 2 + 1
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows[1:8]] == [part.name for part in longer.parts]
    assert rows[0][-3:] == ["alpha", "more", "web"]
