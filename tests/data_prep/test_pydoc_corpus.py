"""The corpus of installed documentation: the same bytes every time, prose only."""

from pathlib import Path

import pytest

from alma.errors import UserError
from data_prep import pydoc_corpus
from data_prep.documents import Reader, Segment
from data_prep.pydoc_corpus import LEAST_WORDS, docstrings, prose, write_corpus

MODULE = '''
"""First paragraph of the module
on two lines.

    >>> print("a line of code that a reader would type at a prompt")
    something that the interpreter would answer to the reader
"""


def outer():
    def inner():
        """What the inner one says."""


class Thing:
    """What the thing says."""

    if True:

        async def method(self):
            """What the method says."""
'''


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A small corpus of the installed documentation."""
    out = tmp_path_factory.mktemp("corpus")
    write_corpus(out, 20_000)
    return out


def test_docstrings_are_reflowed_in_source_order_without_code(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert docstrings(tmp_path / "module.py") == [
        "First paragraph of the module on two lines.",
        "What the inner one says.",
        "What the thing says.",
        "What the method says.",
    ]


def test_a_module_that_cannot_be_parsed_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("print 'Python 2'")
    assert docstrings(tmp_path / "module.py") == []


def test_tables_and_rulers_are_left_out() -> None:
    text = "A title that stays\n==================\n\n1 2 3 4 5\n\nx y\n\nPlain words read as a paragraph."
    assert prose(text) == ["A title that stays", "Plain words read as a paragraph."]


def test_every_document_is_long_enough_and_none_holds_a_prompt(corpus: Path) -> None:
    for name in ("topics", "stdlib", "packages"):
        path = corpus / f"{name}.txt"
        assert ">>>" not in path.read_bytes().decode("utf-8")
        segment = Segment(name, str(path), 0, path.stat().st_size)
        documents = list(Reader("blank-line").read((segment,)))
        assert len(documents) > 5
        assert min(words for _, _, words in documents) >= LEAST_WORDS
        assert 10_000 < sum(words for _, _, words in documents) <= 20_000
        assert sum(text.count("\n") + 1 for _, text, _ in documents) == len(
            [line for line in path.read_text("utf-8").split("\n") if line]
        )


def test_same_bytes_every_time(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pydoc_corpus.os, "sched_getaffinity", lambda _: {0})
    counts = write_corpus(tmp_path, 20_000)
    assert sorted(counts) == ["packages", "stdlib", "topics"]
    for path in corpus.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_writing_the_same_again_leaves_the_files_untouched(tmp_path: Path) -> None:
    write_corpus(tmp_path, 1000)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_corpus(tmp_path, 1000)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    write_corpus(tmp_path, 200)
    assert (tmp_path / "stdlib.txt").stat().st_mtime_ns != before[tmp_path / "stdlib.txt"]


def test_a_file_in_the_way_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="cannot become one"):
        write_corpus(tmp_path / "out")
