"""The stream directory: B mega-batches of token ids, a validation and a test set, and stream.json.

    STREAM/stream.json  dict.txt  tokenizer.model (or GPT-2's encoder.json and vocab.bpe)
    STREAM/megabatch_00/train.{bin,idx,keys} ...  valid.{bin,idx,keys}  test.{bin,idx,keys}

.bin and .idx are fairseq's mmap format; .keys has the 16-byte content key of each document, ascending.

data_prep writes it, fairseq_alma reads it, and this module is the only place that knows the format. An
item is one line of text followed by eos; an item of length 1 (eos alone) ends each document. stream.json
is written last, so a directory that has one is complete.
"""

import dataclasses
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write, sha256_file, write_json_atomic

VERSION = 1
FILE = "stream.json"
SUFFIXES = (".bin", ".idx", ".keys")
KEY_BYTES = 16
_MAGIC = b"MMIDIDX\x00\x00"
_BLOCK = 1 << 20  # items of an index that are written at once
_HEADER = struct.Struct("<9sQBQ")  # magic, version 1, dtype code, number of items
DTYPES: dict[int, type] = {4: np.int32, 8: np.uint16, 9: np.uint32}  # fairseq's codes
_REMAKE = "make the stream again with `python -m data_prep`"


@dataclass(frozen=True)
class FileInfo:
    """A file as it was written: size in bytes and SHA-256 (64 hex digits)."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "FileInfo":
        """Measure the file at `path`."""
        return cls(os.stat(path).st_size, sha256_file(path))

    def problem(self, path: str | os.PathLike[str]) -> str | None:
        """What is wrong with the file at `path`, which was this when written; None: nothing."""
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None:
            return "missing"
        if size < self.size:
            return f"truncated: {size} of {self.size} bytes"
        return "changed after writing" if size > self.size or sha256_file(path) != self.sha256 else None


@dataclass(frozen=True)
class Part:
    """One split of the stream: a mega-batch, the validation set or the test (evaluation) set."""

    name: str
    """`megabatch_00`, ..., `valid` or `test`."""
    prefix: str
    """Path relative to the stream, without suffix: `megabatch_00/train`, ..., `valid`, `test`."""
    words: int
    """Whitespace-separated words of the normalised text."""
    tokens: int
    """Token ids in the .bin file, every eos counted."""
    documents: int
    items: int
    """Lines plus one document break for each document."""
    bytes: int
    """UTF-8 bytes of the normalised text, with one newline after each line."""
    sources: dict[str, int]
    """Words by source."""
    files: dict[str, FileInfo]
    """By path relative to the stream."""

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Part":
        """The part that `dataclasses.asdict` gave this record of."""
        return cls(**record | {"files": _files(record["files"])})


@dataclass(frozen=True)
class Stream:
    """A finished stream as stream.json describes it."""

    directory: Path
    version: int
    seed: int
    vocab_size: int
    """Units, which is the number of lines of dict.txt; fairseq's dictionary adds 4 specials."""
    megabatches: tuple[Part, ...]
    valid: Part
    test: Part
    settings: dict[str, Any]
    files: dict[str, FileInfo]
    """Of dict.txt and the tokenizer: tokenizer.model, or encoder.json and vocab.bpe."""
    corpus: dict[str, Any] = field(default_factory=dict)
    """What was read: documents, words, duplicates, surplus; and the spread of the mega-batches' words."""
    appended: tuple[dict[str, Any], ...] = ()
    """Settings, with the number of the `first` mega-batch and the `corpus`, of each later addition."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All splits: the mega-batches in their order, valid, test."""
        return (*self.megabatches, self.valid, self.test)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Stream":
        """Read DIRECTORY/stream.json (and no other file; see `check`).

        UserError: no stream there, stream.json malformed, or of a version this software does not know.
        """
        directory = Path(directory)
        path = directory / FILE
        if not path.is_file():
            raise UserError(
                f"{directory}: no finished stream here (no {FILE}); make one with `python -m data_prep`"
            )
        try:
            record = json.loads(path.read_bytes())
            if record["version"] != VERSION:
                raise UserError(f"{path}: format version {record['version']}, known is {VERSION}; {_REMAKE}")
            return cls(
                directory=directory,
                megabatches=tuple(Part.from_dict(part) for part in record.pop("megabatches")),
                valid=Part.from_dict(record.pop("valid")),
                test=Part.from_dict(record.pop("test")),
                files=_files(record.pop("files")),
                appended=tuple(record.pop("appended", ())),
                **record,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: malformed ({type(error).__name__}: {error}); {_REMAKE}") from error

    def write(self) -> None:
        """Write stream.json into `directory`, atomically; call it when every other file is in place."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del record["directory"]
        for name, value in record.items():
            if name == "megabatches":
                record[name] = [dataclasses.asdict(part) for part in value]
            elif name in ("valid", "test"):
                record[name] = dataclasses.asdict(value)
            elif name == "files":
                record[name] = {file: dataclasses.asdict(info) for file, info in value.items()}
        write_json_atomic(self.directory / FILE, record)

    def path(self, part: Part) -> str:
        """The prefix of the part's .bin and .idx, as fairseq's MMapIndexedDataset takes it."""
        return str(self.directory / part.prefix)

    def check(self, parts: Part | Iterable[Part]) -> None:
        """Compare the files of `parts`, dict.txt and the tokenizer with stream.json: size, then SHA-256.

        Costs one read of the files (about 1 GB/s a core). UserError names the first file that is missing,
        truncated or changed.
        """
        files = dict(self.files)
        for part in (parts,) if isinstance(parts, Part) else parts:
            files |= part.files
        for name, info in files.items():
            path = self.directory / name
            if problem := info.problem(path):
                raise UserError(
                    f"{path}: {problem}; copy it again from where the stream was made, or {_REMAKE}"
                )


def is_stream(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds a finished stream."""
    return (Path(directory) / FILE).is_file()


def dtype_code(dictionary_size: int) -> int:
    """fairseq's dtype code for the ids of a dictionary of this size, its 4 specials counted."""
    return 8 if dictionary_size < 65500 else 9


def write_index(path: str | os.PathLike[str], sizes: np.ndarray, dtype_code: int) -> None:
    """Write fairseq's mmap index for items of `sizes` tokens (n_items,), stored one after another."""
    width = np.dtype(DTYPES[dtype_code]).itemsize
    blocks = [sizes[start : start + _BLOCK] for start in range(0, len(sizes), _BLOCK)]
    with atomic_write(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, dtype_code, len(sizes)))
        for block in blocks:
            file.write(block.astype("<i4").tobytes())
        position = 0
        for block in blocks:  # pointers
            ends = np.cumsum(block, dtype=np.int64) * width + position
            file.write((ends - block.astype(np.int64) * width).astype("<i8").tobytes())
            position = int(ends[-1])


def read_index(path: str | os.PathLike[str]) -> tuple[np.ndarray, int]:
    """The sizes (n_items,) int32, memory-mapped, and the dtype code of an index. UserError: not an index."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
    size = os.stat(path).st_size
    if len(head) == _HEADER.size:
        magic, version, code, items = _HEADER.unpack(head)
        if (magic, version) == (_MAGIC, 1) and code in DTYPES and size == _HEADER.size + 12 * items:
            if not items:
                return np.zeros(0, np.int32), code
            return np.memmap(path, "<i4", "r", _HEADER.size, (items,)), code
    raise UserError(f"{path}: not a fairseq mmap index; {_REMAKE}")


def read_pointers(path: str | os.PathLike[str], items: int) -> np.ndarray:
    """The byte in .bin at which each item starts (items,) int64, memory-mapped; `read_index` came first."""
    return np.memmap(path, "<i8", "r", _HEADER.size + 4 * items, (items,)) if items else np.zeros(0, np.int64)


def _files(record: dict[str, Any]) -> dict[str, FileInfo]:
    return {name: FileInfo(**info) for name, info in record.items()}
