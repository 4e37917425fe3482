"""The recipes of `alma corpus`, and how one of them is written."""

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from data_prep.corpus import debian_changelogs, git, pydoc
from data_prep.corpus.writer import Written, omissions, write
from data_prep.fields import DatedText

STDOUT = "-"


class Recipe(NamedTuple):
    """A kind of text."""

    documents: Callable[[str, Counter[str]], Generator[DatedText, None, None]]
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


def make(recipe: str, source: str, out: str, most_words: int | None = None) -> tuple[Written, Counter[str]]:
    """Write the documents of a recipe; also returns how many of what were left out.

    A file with the same bytes stays untouched: a stream made from it would not match a newer one. UserError:
    a bad source or `out`, or no document.
    """
    from tqdm import tqdm

    left_out: Counter[str] = Counter()
    hidden = True if out == STDOUT and sys.stdout.isatty() else None  # None: if stderr is no terminal
    found = RECIPES[recipe].documents(source, left_out)
    with (
        closing(found),
        tqdm(found, unit=" documents", disable=hidden, leave=False) as documents,
        _opened(out) as file,
    ):
        written = write(documents, file, left_out, most_words)
        if not written.documents:
            raise UserError(
                f"{source or recipe}: no document to write (left out: {omissions(left_out) or 'none'})"
            )
    return written, left_out


@contextmanager
def _opened(out: str) -> Iterator[IO[bytes]]:
    if out == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    make_directory(Path(out).parent)
    with atomic_write(out, "wb", keep_same=True) as file:
        yield file
