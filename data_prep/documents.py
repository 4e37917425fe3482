"""Corpus files cut into shards, and the documents of a shard: the input of stages scan and shuffle.

A document is normalised text: lines without leading or trailing space, a single space for every run
of white space, no empty lines, no byte order marks.
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
from data_prep import columns, data_sets
from data_prep.chat import Chat
from data_prep.compressed import Document, Segment, Skipped
from data_prep.formats import KNOWN, Keys, kind, raw_documents, segment_starts

SHARD_BYTES = 64 << 20
"""Target size of a shard in bytes of input; fixed, so that shards never depend on the number of
workers."""

Shard = tuple[Segment, ...]  # a slice of the input, read by one task

_SPACES = [space for space in map(chr, range(0x3001)) if space.isspace() and space not in " \n"]
_ASCII_SPACES = [space for space in _SPACES if space.isascii()]
_LOOSE_LINE = re.compile(r"\n(?:[ \n]|(?<= \n))")  # a newline beside a space or another newline
_LINE = re.compile(r"[^\n]+")


@dataclass(frozen=True)
class Reader:
    """How documents are found in files and normalised. stream.json records the fields by name."""

    documents: str = "blank-line"
    """How .txt and .md files are divided into documents, a key of `formats.MODES`. `blank-line`:
    at lines of only ASCII white space; `file`: not at all; `line`: each line is a document;
    `wikiextractor`: the text between <doc id=...> and </doc>."""
    max_document_words: int = 0  # `split` cuts longer documents between lines; 0: never
    documents_of: dict[str, str] = field(default_factory=dict)  # overrides `documents`, by source
    text_key: str = "text"  # the field of records that holds the text
    on_bad_input: str = "error"  # `error`: raise a UserError; `skip`: report and continue
    dates: Dates | None = None
    """The periods of a dated stream, whose sources are PERIOD/SOURCE; None: dates are not read."""
    chat: Chat | None = None
    """Writes the text of documents with chat turns, which stays as it is; None: they are text."""

    @property
    def keys(self) -> Keys:
        """The fields with text and date."""
        return Keys(self.text_key, self.dates.key if self.dates else "", self.chat)

    def record(self) -> dict[str, Any]:
        """The fields as stream.json keeps them."""
        record = asdict(self)
        if not self.chat:
            del record["chat"]
        if self.dates:
            del record["dates"]["after"]  # follows from the stream, so it is not recorded
        else:
            del record["dates"]
        return record

    def mode(self, source: str) -> str:
        """How .txt and .md files of this source are divided into documents, see `documents`."""
        return self.documents_of.get(source, self.documents)

    def read(
        self, shard: Shard, skipped: Callable[[Skipped], None] | None = None
    ) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) of each document with a word, in the order of the shard.

        With on_bad_input="skip" bad input is passed to `skipped`, otherwise it is a UserError.
        """
        for source, raw in self.raw(shard, skipped):
            text = self.normalised(raw)
            if text:
                yield source, text, self.count_words(text)

    def normalised(self, raw: str) -> str:
        """The text of a document as the stream has it: that of a chat is exactly the template's."""
        if self.chat:
            return raw if raw.strip() else ""
        return normalise(raw)

    def count_words(self, text: str) -> int:
        """Number of words of a text of `normalised`, which must not be empty."""
        if self.chat:
            return len(text.split())
        return count_words(text)

    def raw(
        self,
        shard: Shard,
        skipped: Callable[[Skipped], None] | None = None,
        left_out: Callable[[LeftOut, str, Document], None] | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Yield (source, text) of each document; the text is not normalised.

        `skipped`: see `read`. `left_out` is called with (reason, file, document) for each document
        without a period.
        """
        for segment in shard:
            for document in raw_documents(segment, self.mode(segment.source), self.keys):
                if isinstance(document, Skipped):
                    if self.on_bad_input == "error":
                        raise UserError(f"{document}; {document.remedy}")
                    if skipped:
                        skipped(document)
                elif not self.dates:
                    yield segment.source, document.text
                elif document.text and not document.text.isspace():
                    period = self.dates.period(document.date)
                    if isinstance(period, int):
                        yield f"{period}/{segment.source}", document.text
                    elif left_out:
                        left_out(period, segment.path, document)

    def split(self, text: str, words: int) -> Iterator[tuple[str, int]]:
        """Yield (text, words) of a document of `read`, or of its pieces if it is too long."""
        if not self.max_document_words or words <= self.max_document_words:
            yield text, words
            return
        start = 0
        end = 0
        words = 0  # of text[start:end]
        for match in _LINE.finditer(text):
            count = match[0].count(" ") + 1
            if words and words + count > self.max_document_words:
                yield text[start:end], words
                start = match.start()
                words = 0
            words += count
            end = match.end()
        yield text[start:], words


def count_words(text: str) -> int:
    """Number of words of a normalised text, which must not be empty."""
    return text.count(" ") + text.count("\n") + 1


def normalise(text: str) -> str:
    """A space for each run of white space, no space at the ends of lines, no empty lines or U+FEFF.

    Equals `" ".join(line.split())` for each line, but works on the whole text: faster, and without
    a list of all words, which takes gigabytes for the longest documents.
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


def find_files(path: str, split: str | None = None) -> list[str]:
    """The corpus files of `path`: a file, a directory with all below it, or a glob pattern.

    Patterns may have **. Sorted; links are followed, and each file is listed once. Names that begin
    with . or _ are ignored, except those in `path` itself. Of a directory that is a data set with
    splits, only the files of one, see `data_sets.files_of`. UserError: no files, a dangling link,
    a file of unknown format, or `split` of what has no splits.
    """
    if os.path.exists(path):
        roots = [path]
    elif glob.has_magic(path):
        roots = _matches(path)
    else:
        raise UserError(f"{path}: no such file or directory")
    by_real_path: dict[str, str] = {}
    hidden: list[str] = []
    for root in roots:
        of_split = None
        if os.path.isdir(root):
            of_split = data_sets.files_of(root, split)
        if split and of_split is None:
            problem = "no folder of a data set with splits in the names of its files"
            raise UserError(f"{root}: {problem}; leave out --split {split}")
        for file in of_split or _paths_below(root, hidden):
            _require_file(file)
            by_real_path.setdefault(os.path.realpath(file), str(file.absolute()))
    files = sorted(by_real_path.values())
    if not files:
        problem = "an empty directory" if os.path.isdir(path) else "matches no file"
        ignored = "(names that begin with . or _ are ignored)"
        raise UserError(f"{path}: {problem} {ignored}; expected {KNOWN}")
    _check_kinds(files)
    if hidden:
        names = f"{len(hidden):,} names that begin with . or _"
        print(f"{path}: left out: {names}", file=sys.stderr)
    return files


def _matches(pattern: str) -> list[str]:
    """The paths that match a glob pattern, without names that begin with . or _.

    Names with _ are not ignored if the pattern has them.
    """
    named = [part for part in Path(pattern).parts if part.startswith("_")]
    matches: dict[tuple[str, str], str] = {}
    # Links may form loops, so the shortest path to each file comes first.
    paths = sorted(glob.glob(pattern, recursive=True), key=lambda path: (path.count("/"), path))
    for path in paths:  # glob itself already ignores names that begin with a dot
        if all(_is_named(part, named) for part in Path(path).parts if part.startswith("_")):
            place = (os.path.realpath(os.path.dirname(path)), Path(path).name)
            matches.setdefault(place, path)
    return sorted(matches.values())


def _is_named(part: str, patterns: list[str]) -> bool:
    """Whether a part of a path matches one of the patterns."""
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns)


def _paths_below(root: str, hidden: list[str]) -> Iterator[Path]:
    """Yield `root` if it is no directory, else all files below it.

    Names that begin with . or _ are left out, and added to `hidden`.
    """
    if not os.path.isdir(root):
        yield Path(root)
        return
    for folder, subfolders, names in walk(root):
        hidden += [name for name in (*subfolders, *names) if name.startswith((".", "_"))]
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "_"))]
        yield from (Path(folder, name) for name in names if not name.startswith((".", "_")))


def _require_file(path: Path) -> None:
    """Raise a UserError if the path is missing or no regular file."""
    if path.is_file():
        return
    if path.exists():
        remedy = "text is read twice, so write it to a file"
        raise UserError(f"{path}: a pipe, socket or device; {remedy}")
    target = ""
    if path.is_symlink():
        target = f" (a link to {os.readlink(path)}, which is missing)"
    raise UserError(f"{path}: no file or directory{target}; fetch it, or remove the link")


def _check_kinds(files: list[str]) -> None:
    """Raise a UserError for a file of unknown format, or a README.md that describes data files."""
    for name in files:
        if not kind(name):
            raise UserError(f"{name}: unknown kind of file; known are {KNOWN}")
        if kind(name) in columns.SUFFIXES:
            require_package("pyarrow", f"{name}:")
    cards = [name for name in files if Path(name).name.lower() == "readme.md"]
    records = [name for name in files if kind(name) not in ("text", "wiki")]
    if cards and records:  # such as a snapshot of a data set from Hugging Face
        pattern = f"{Path(cards[0]).parent}/**/*{Path(records[0]).suffix}"
        remedy = f"name the data alone: '{pattern}'"
        raise UserError(f"{cards[0]}: would be text beside {records[0]}; {remedy}")


def make_shards(
    files: list[tuple[str, str]], reader: Reader, shard_bytes: int = SHARD_BYTES
) -> list[Shard]:
    """Cut files, given as (source, path), into shards of about `shard_bytes`.

    Small files share a shard.
    """
    shards: list[Shard] = []
    shard: list[Segment] = []
    size = 0
    for source, path in files:
        for segment in _segments(source, path, reader.mode(source), shard_bytes):
            segment_bytes = segment.end - segment.start
            if shard and size + segment_bytes > shard_bytes:
                shards.append(tuple(shard))
                shard = []
                size = 0
            shard.append(segment)
            size += segment_bytes
    if shard:
        shards.append(tuple(shard))
    return shards


def _segments(source: str, path: str, mode: str, step: int) -> Iterator[Segment]:
    """Yield the segments of a file, of about `step` bytes."""
    size = 0
    starts = [0]
    with contextlib.suppress(OSError):  # reported when the documents are read
        size = os.path.getsize(path)
        starts = segment_starts(path, mode, size, step)
    ends = [*starts[1:], size]
    for start, end in zip(starts, ends, strict=True):
        yield Segment(source, path, start, end)


def changed(shard: Shard) -> UserError:
    """The error for a shard whose documents have changed since an earlier stage read them."""
    files = " ".join(sorted({segment.path for segment in shard})[:3])
    return UserError(f"{files}: changed since it was scanned; run again when the input is complete")
