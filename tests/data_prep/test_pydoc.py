"""The corpus of installed documentation: the same bytes every time, prose only."""

import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest

from data_prep.corpus import pydoc
from data_prep.corpus.pydoc import docstrings, prose

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


def test_docstrings_are_reflowed_in_source_order_without_code(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert docstrings(tmp_path / "module.py") == [
        "First paragraph of the module on two lines.",
        "What the inner one says.",
        "What the thing says.",
        "What the method says.",
    ]


def test_what_is_no_prose_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("print 'Python 2'")
    assert docstrings(tmp_path / "module.py") == []
    text = (
        "A title that stays\n==================\n\n1 2 3 4 5\n\nx y\n\n"
        "Plain words read as a paragraph."
    )
    assert prose(text) == ["A title that stays", "Plain words read as a paragraph."]


def first_documents(part: str) -> list[str]:
    return [text for text, *_ in itertools.islice(pydoc.documents(part, Counter()), 30)]


@pytest.mark.parametrize("part", pydoc.PARTS)
def test_documents_are_long_enough_and_the_same_every_time(part: str, monkeypatch) -> None:
    monkeypatch.setattr(pydoc, "PACKAGES", ("scipy",))  # its modules are small
    documents = first_documents(part)
    assert len(documents) == 30
    assert min(len(text.split()) for text in documents) >= pydoc.LEAST_WORDS
    assert not any(">>>" in text for text in documents)
    lines = [line for text in documents for line in text.split("\n")]
    assert len(set(lines)) == len(lines) > 30
    monkeypatch.setattr(pydoc.os, "sched_getaffinity", lambda _: {0})
    assert first_documents(part) == documents


def test_packages_are_found_where_an_import_finds_them(tmp_path: Path, monkeypatch) -> None:
    """Also those of another environment; a folder of that name that no import finds is not one."""
    folders = tmp_path / "seen/flowers", tmp_path / "unseen/trees"
    for folder in folders:
        folder.mkdir(parents=True)
        text = " ".join(f"A sentence about {folder.name} in a park." for _ in range(5))
        (folder / "__init__.py").write_text(f'"""{text}"""')
    monkeypatch.syspath_prepend(tmp_path / "seen")
    monkeypatch.chdir(tmp_path / "unseen")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.setattr(pydoc, "PACKAGES", ("flowers", "trees"))
    (document,) = pydoc.documents("packages", Counter())
    assert document.text.startswith("A sentence about flowers")
