"""The corpus of installed documentation: the same bytes every time, prose only."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from alma.errors import UserError
from data_prep.corpus import pydoc
from data_prep.corpus.pydoc import LEAST_WORDS, PARTS, docstrings, prose
from data_prep.corpus.writer import write

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
    """A small corpus of the installed documentation, a file for each part."""
    return write_parts(tmp_path_factory.mktemp("corpus"), 20_000)


def write_parts(out: Path, words: int) -> Path:
    for part in PARTS:
        left_out: Counter[str] = Counter()
        write(pydoc.documents(part, left_out), str(out / f"{part}.jsonl"), left_out, words)
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
    for part in PARTS:
        records = [json.loads(line) for line in (corpus / f"{part}.jsonl").read_bytes().splitlines()]
        sizes = [len(record["text"].split()) for record in records]
        assert all(record.keys() == {"text"} and ">>>" not in record["text"] for record in records)
        assert len(records) > 5
        assert min(sizes) >= LEAST_WORDS
        assert 10_000 < sum(sizes) <= 20_000
        lines = [line for record in records for line in record["text"].split("\n")]
        assert len(set(lines)) == len(lines) > 100


def test_same_bytes_every_time(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pydoc.os, "sched_getaffinity", lambda _: {0})
    for path in write_parts(tmp_path, 20_000).iterdir():
        assert path.read_bytes() == (corpus / path.name).read_bytes()


def test_an_unknown_part_gets_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean stdlib"):
        next(pydoc.documents("stdlibs", Counter()))


def test_packages_are_found_where_an_import_finds_them(tmp_path: Path, monkeypatch) -> None:
    """Also those of another environment; a folder of that name that no import finds is not one."""
    folders = tmp_path / "seen/flowers", tmp_path / "unseen/trees"
    for folder in folders:
        folder.mkdir(parents=True)
        text = " ".join(f"A sentence about {folder.name} in a park." for _ in range(5))
        (folder / "__init__.py").write_text(f'"""{text}"""')
    monkeypatch.syspath_prepend(tmp_path / "seen")
    monkeypatch.chdir(tmp_path / "unseen")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr(pydoc, "PACKAGES", ("flowers", "trees"))
    (document,) = pydoc.documents("packages", Counter())
    assert document.text.startswith("A sentence about flowers")
