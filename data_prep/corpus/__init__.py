"""Text that every machine has, as JSON lines for `alma data`: `alma corpus RECIPE`."""

from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple

from data_prep.compressed import Document
from data_prep.corpus import debian_changelogs, git, pydoc


class Recipe(NamedTuple):
    """A kind of text."""

    documents: Callable[[str, Counter[str]], Generator[Document, None, None]]
    """Yields each document; arguments: SOURCE, and the counts of what is left out."""
    name: str
    """Of the source in `alma data`."""
    default: str | None
    """SOURCE if it is not given; None: it must be."""


RECIPES = {
    "git": Recipe(git.documents, "git", None),
    "debian-changelogs": Recipe(debian_changelogs.documents, "changelogs", debian_changelogs.FOLDER),
    "pydoc": Recipe(pydoc.documents, "pydoc", ""),
}
"""The recipes by name."""
