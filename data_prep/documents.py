"""Corpus files cut into shards, and the documents of a shard: the input of stages scan and shuffle.

A document is normalised text: lines without leading or trailing space, a single space for every run of white
space, no empty lines, no byte order marks.
"""

import contextlib
import fnmatch
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alma.dates import Dates, LeftOut
from alma.errors import UserError, require_package
from alma.files import walk
from data_prep.compressed import Document, Segment, Skipped
from data_prep.formats import KNOWN, Keys, kind, raw_documents, segment_starts

SHARD_BYTES = 64 << 20
"""Target size of a shard in bytes of input; fixed, so that shards never depend on the number of workers."""

Shard = tuple[Segment, ...]  # a slice of the input, read by one task

_SPACES = [space for space in map(chr, range(0x3001)) if space.isspace() and space not in " \n"]
_ASCII_SPACES = [space for space in _SPACES if space.isascii()]
_LOOSE_LINE = re.compile(r"\n(?:[ \n]|(?<= \n))")  # a newline beside a space or another newline
_LINE = re.compile(r"[^\n]+")


@dataclass(frozen=True)
class Reader:
    """How documents are found in files and normalised. stream.json records the fields by name."""

    documents: str = "blank-line"
    """What a document of a .txt or .md file is, a key of `formats.MODES`. `blank-line`: text between lines of
    ASCII white space; `file`; `line`; `wikiextractor`: text between <doc id=...> and </doc>."""
    max_document_words: int = 0  # `split` cuts longer documents between lines; 0: never
    documents_of: dict[str, str] = field(default_factory=dict)  # `documents` for single sources
    text_key: str = "text"  # the field of .jsonl and .parquet files that holds the text
    on_bad_input: str = "error"  # `error`: raise a UserError; `skip`: report and continue
    dates: Dates | None = None
    """The periods of a dated stream, whose sources are PERIOD/SOURCE; None: dates are not read."""

    def record(self) -> dict[str, Any]:
        """The fields as stream.json keeps them."""
        record = asdict(self)
        if self.dates:
            del record["dates"]["after"]  # given by the stream
        else:
            del record["dates"]
        return record

    def read(
        self, shard: Shard, skipped: Callable[[Skipped], None] | None = None
    ) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) of each document with at least one word, in the order of the shard.

        Bad input is passed to `skipped` with on_bad_input="skip", otherwise it is a UserError.
        """
        for source, raw in self.raw(shard, skipped):
            if text := normalise(raw):
                yield source, text, count_words(text)

    def raw(
        self,
        shard: Shard,
        skipped: Callable[[Skipped], None] | None = None,
        left_out: Callable[[LeftOut, str, Document], None] | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Yield source and text, not normalised, of each document.

        `skipped`: see `read`. `left_out` gets what has no period: why, its file, and the document.
        """
        keys = Keys(self.text_key, self.dates.key if self.dates else "")
        for segment in shard:
            for raw in raw_documents(segment, self.documents_of.get(segment.source, self.documents), keys):
                if isinstance(raw, Skipped):
                    if self.on_bad_input == "error":
                        raise UserError(f"{raw}; {raw.remedy}")
                    if skipped:
                        skipped(raw)
                elif not self.dates:
                    yield segment.source, raw.text
                elif raw.text and not raw.text.isspace():  # else no document, so its date does not matter
                    period = self.dates.period(raw.date)
                    if isinstance(period, int):
                        yield f"{period}/{segment.source}", raw.text
                    elif left_out:
                        left_out(period, segment.path, raw)

    def split(self, text: str, words: int) -> Iterator[tuple[str, int]]:
        """(text, words) of a document of `read`, or of each of its pieces if it is too long."""
        if not self.max_document_words or words <= self.max_document_words:
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


def count_words(text: str) -> int:
    """Words of a normalised text, which is not empty."""
    return text.count(" ") + text.count("\n") + 1


def normalise(text: str) -> str:
    """A single space for every run of white space, no space at the ends of lines, no empty lines, no U+FEFF.

    Equals `" ".join(line.split())` for each line, but works on the whole text: faster, and without a list of
    all words, which takes gigabytes for the longest documents.
    """
    text = text.replace("\ufeff", "")
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
    """The corpus files of `path`: a file, a directory with all below it, or a glob pattern (with **).

    Sorted; links are followed, and each file is there once. Names that begin with . or _ are ignored, except
    those in `path` itself. UserError: no files, a dangling link, or a file of unknown format.
    """
    if os.path.exists(path):
        roots = [path]
    elif glob.has_magic(path):
        # glob itself ignores .*; links may lead in circles, so that the shortest way to each name counts.
        named = [part for part in Path(path).parts if part.startswith("_")]
        matches: dict[tuple[str, str], str] = {}
        for match in sorted(glob.glob(path, recursive=True), key=lambda match: (match.count("/"), match)):
            hidden = [part for part in Path(match).parts if part.startswith("_")]
            if all(any(fnmatch.fnmatchcase(part, name) for name in named) for part in hidden):
                matches.setdefault((os.path.realpath(os.path.dirname(match)), Path(match).name), match)
        roots = sorted(matches.values())
    else:
        raise UserError(f"{path}: no such file or directory")
    found: dict[str, str] = {}
    left_out: list[str] = []
    for file in (file for root in roots for file in _paths_below(root, left_out)):
        if file.is_file():
            found.setdefault(os.path.realpath(file), str(file.absolute()))
        elif not file.exists():
            target = f" (a link to {os.readlink(file)}, which is missing)" if file.is_symlink() else ""
            raise UserError(f"{file}: no file or directory{target}; fetch it, or remove the link")
        else:
            raise UserError(f"{file}: a pipe, socket or device; text is read twice, so write it to a file")
    files = sorted(found.values())
    if not files:
        where = "an empty directory" if os.path.isdir(path) else "matches no file"
        raise UserError(f"{path}: {where} (names that begin with . or _ are ignored); expected {KNOWN}")
    for name in files:
        if not kind(name):
            raise UserError(f"{name}: unknown kind of file; known are {KNOWN}")
        if kind(name) == ".parquet":
            require_package("pyarrow", f"{name}:")
    cards = [name for name in files if Path(name).name.lower() == "readme.md"]
    records = [name for name in files if kind(name) not in ("text", "wiki")]
    if cards and records:  # such as a snapshot of Hugging Face
        pattern = f"{Path(cards[0]).parent}/**/*{Path(records[0]).suffix}"
        raise UserError(f"{cards[0]}: would be text beside {records[0]}; name the data alone: '{pattern}'")
    if left_out:
        print(f"{path}: left out: {len(left_out):,} names that begin with . or _", file=sys.stderr)
    return files


def _paths_below(root: str, hidden: list[str]) -> Iterator[Path]:
    """`root`, or what is in a directory and those below; names that begin with . or _ go to `hidden`."""
    if not os.path.isdir(root):
        yield Path(root)
        return
    for folder, below, names in walk(root):
        hidden += [name for name in (*below, *names) if name.startswith((".", "_"))]
        below[:] = [name for name in below if not name.startswith((".", "_"))]
        yield from (Path(folder, name) for name in names if not name.startswith((".", "_")))


def make_shards(files: list[tuple[str, str]], reader: Reader, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Cut files, given as (source, path), into shards of about `shard_bytes`; small files share a shard."""
    shards: list[Shard] = []
    shard: list[Segment] = []
    held = 0
    for source, path in files:
        size, starts = 0, [0]
        mode = reader.documents_of.get(source, reader.documents)
        with contextlib.suppress(OSError):  # reported when the documents are read
            size = os.path.getsize(path)
            starts = segment_starts(path, mode, size, shard_bytes)
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            if shard and held + end - start > shard_bytes:
                shards.append(tuple(shard))
                shard, held = [], 0
            shard.append(Segment(source, path, start, end))
            held += end - start
    return [*shards, tuple(shard)] if shard else shards


def changed(shard: Shard) -> UserError:
    """The error of a shard whose documents are not those of an earlier stage."""
    files = " ".join(sorted({segment.path for segment in shard})[:3])
    return UserError(f"{files}: changed since it was scanned; run again when the input is complete")
