"""Documents out of corpus files, cut into fixed units of work.

A document is normalised text: lines without leading or trailing space, every run of white space one space,
no empty lines, joined by newlines.
"""

import fnmatch
import glob
import html
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from alma.errors import UserError
from data_prep.blocks import Segment, Skipped, border_after
from data_prep.formats import KNOWN, border_of, raw_documents, require_known

UNIT_BYTES = 64 << 20
"""Input bytes a unit of work aims at; fixed, so that units never depend on the number of workers."""

Unit = tuple[Segment, ...]

_ASCII_SPACES = "\t\v\f\r\x1c\x1d\x1e\x1f"
_SPACES = (
    _ASCII_SPACES
    + "\x85\xa0\u1680"
    + "".join(map(chr, range(0x2000, 0x200B)))
    + "\u2028\u2029\u202f\u205f\u3000"
)
_LOOSE_LINE = re.compile(r"\n(?:[ \n]|(?<= \n))")
_LINE = re.compile(r"[^\n]+")
_CONTROL = re.compile("[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class Reader:
    """How documents are cut out of text."""

    documents: str = "blank-line"
    """What a document of a .txt or .md file is. `blank-line`: blank lines (nothing but ASCII white space)
    separate them; `file`, `line`: one each; `wikiextractor`: what is between <doc id=...> and </doc>."""
    max_document_words: int = 0
    """Documents longer than this many words are split between lines; 0: never."""
    documents_of: dict[str, str] = field(default_factory=dict)
    """The same as `documents` for sources that differ."""
    text_key: str = "text"
    """The field of .jsonl and .parquet files that holds the text."""
    on_bad_input: str = "error"
    """`error`: raise; `skip`: report it and go on."""
    unescape_html: bool = False
    """Whether `&amp;` and the like become the characters they stand for."""
    strip_control: bool = False
    """Whether control characters (C0, C1, U+FEFF, U+FFFE, U+FFFF) are removed; white space stays."""

    def read(
        self, unit: Unit, skipped: Callable[[Skipped], None] | None = None
    ) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) for each document with at least one word, in the unit's order.

        Bad input goes to `skipped`, if it is to be skipped; else it is a UserError.
        """
        for segment in unit:
            for raw in raw_documents(segment, self.documents_in(segment.source), self.text_key):
                if isinstance(raw, str):
                    for text, words in self._split(self._normalise(raw)):
                        yield segment.source, text, words
                elif self.on_bad_input == "error":
                    raise UserError(f"{raw}; mend or remove it, or go on without it: --on-bad-input skip")
                elif skipped:
                    skipped(raw)

    def documents_in(self, source: str) -> str:
        """What a document of the source's .txt and .md files is."""
        return self.documents_of.get(source, self.documents)

    def _normalise(self, text: str) -> str:
        if self.unescape_html:
            text = html.unescape(text)
        if self.strip_control:
            text = _CONTROL.sub("", text)
        return normalise(text)

    def _split(self, text: str) -> Iterator[tuple[str, int]]:
        """A normalised document and its words, in several pieces if it is too long."""
        words = text.count(" ") + text.count("\n") + 1 if text else 0
        if not self.max_document_words or words <= self.max_document_words:
            if words:
                yield text, words
            return
        start = end = words = 0
        for match in _LINE.finditer(text):
            count = match[0].count(" ") + 1
            if words and words + count > self.max_document_words:
                yield text[start:end], words
                start, words = match.start(), 0
            words += count
            end = match.end()
        yield text[start:], words


def normalise(text: str) -> str:
    """One space for every run of white space, no space at the ends of lines, no empty lines.

    What `" ".join(line.split())` gives for each line, in steps over the whole text: faster, and without a
    list of all words, which takes gigabytes for the longest documents.
    """
    for space in _ASCII_SPACES if text.isascii() else _SPACES:
        text = text.replace(space, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    if _LOOSE_LINE.search(text):
        text = text.replace(" \n", "\n").replace("\n ", "\n")
        while "\n\n" in text:
            text = text.replace("\n\n", "\n")
    return text.strip(" \n")


def find_files(path: str) -> list[str]:
    """The corpus files at `path`: a file, all below a directory, or what a glob pattern (with **) matches.

    Sorted, each once. Names that begin with . or _ are passed over, except in `path` itself. UserError:
    nothing there, or an unknown kind of file.
    """
    if os.path.exists(path):
        roots = [Path(path)]
    elif glob.has_magic(path):
        roots = [Path(match) for match in sorted(glob.glob(path, recursive=True)) if _named(match, path)]
    else:
        raise UserError(f"{path}: no such file or directory")
    files = {str(file.absolute()) for root in roots for file in _files_below(root)}
    if not files:
        where = "an empty directory" if os.path.isdir(path) else "matches no file"
        raise UserError(f"{path}: {where} (names that begin with . or _ do not count); expected {KNOWN}")
    for file in sorted(files):
        require_known(file)
    return sorted(files)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _named(match: str, pattern: str) -> bool:
    """Whether the pattern names all parts of the match that begin with _; glob leaves out .*."""
    named = [part for part in Path(pattern).parts if part.startswith("_")]
    parts = [part for part in Path(match).parts if part.startswith("_")]
    return all(any(fnmatch.fnmatchcase(part, name) for name in named) for part in parts)


def _files_below(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename}: unreadable ({error.strerror})")

    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise UserError(f"{root}: no file or directory")
    for folder, below, names in os.walk(root, onerror=fail):
        below[:] = [name for name in below if not _hidden(name)]
        for name in names:
            if (file := Path(folder, name)).is_file() and not _hidden(name):
                yield file


def make_units(sources: list[tuple[str, str]], reader: Reader, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Cut the files, given as (source, path), into units of about `unit_bytes`; small files share a unit."""
    units: list[Unit] = []
    unit: list[Segment] = []
    size = 0
    for source, path in sources:
        for segment in _segments(source, path, reader, unit_bytes):
            if unit and size + segment.end - segment.start > unit_bytes:
                units.append(tuple(unit))
                unit, size = [], 0
            unit.append(segment)
            size += segment.end - segment.start
    return [*units, tuple(unit)] if unit else units


def _segments(source: str, path: str, reader: Reader, unit_bytes: int) -> Iterator[Segment]:
    size, starts = 0, [0]
    try:
        size = os.path.getsize(path)
        if path.endswith(".parquet"):  # a segment has the row groups that begin in it
            starts = list(range(0, size, unit_bytes)) or [0]
        elif border := border_of(path, reader.documents_in(source)):
            with open(path, "rb") as file:
                while (start := border_after(file, starts[-1] + unit_bytes, border)) < size:
                    starts.append(start)
    except OSError:  # the reader says what is wrong
        starts = [0]
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        yield Segment(source, path, start, end)


def skipped_summary(skips: list[Skipped], shown: int = 3) -> str:
    """What was skipped, for the reader of a terminal: how many for each reason, and the first of them."""
    skips = sorted(set(skips))
    reasons = Counter(skip.reason.split(" (")[0] for skip in skips)
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    more = ", ..." if len(skips) > shown else ""
    return f"skipped bad input: {counts}; " + ", ".join(map(str, skips[:shown])) + more
