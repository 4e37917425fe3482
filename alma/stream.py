"""The stream directory: B mega-batches of token ids, a validation and a test set, and stream.json.

    STREAM/stream.json  dict.txt  tokenizer.model (or the files of another tokenizer)
    STREAM/megabatch_00/train.{bin,idx,keys} ...  valid.{bin,idx,keys}  test.{bin,idx,keys}
    STREAM/test_00.{bin,idx,keys} ...  valid_00.{bin,idx,keys} ...    of an ordered stream

.bin and .idx are fairseq's mmap format; .keys holds the 16-byte content keys of the documents,
ascending.

Only this module knows the format. An item is a line of text followed by eos; an item of length 1 (a
lone eos) ends each document. With the tokenizer of a Hugging Face folder an item is a document
followed by eos. stream.json is written last, so a directory with one is complete.
"""

import dataclasses
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from alma.errors import UserError
from alma.files import atomic_write, sha256_file, write_json_atomic
from alma.schema import COUNT, NATURAL, TEXT, is_plain, parse_json, require, shown

if TYPE_CHECKING:
    import numpy as np  # functions import it: commands that read stream.json alone start without it

VERSION = 2
FILE = "stream.json"
SUFFIXES = (".bin", ".idx", ".keys")
KEY_BYTES = 16
_MAGIC = b"MMIDIDX\x00\x00"
_BLOCK = 1 << 20  # items of an index per write
_HEADER = struct.Struct("<9sQBQ")  # magic, version 1, dtype code, number of items
DTYPES = {4: "int32", 8: "uint16", 9: "uint32"}  # of NumPy, by fairseq's codes
SPECIALS = 4
"""Number of fairseq's special ids: <s> 0, <pad> 1, </s> 2, <unk> 3. They are not in dict.txt, so
its first line has id 4."""
EOS = 2
_REMAKE = "rebuild the stream with `alma data`"
_ABSENT_IF_EMPTY = ("period", "held_out", "held_out_valid")
INSIDE = Annotated[str, msgspec.Meta(pattern=r"^(?!/)(?!(.*/)?\.\.(/|\Z))[^\x00-\x1f\x7f-\x9f]+\Z")]
"""A path inside the stream."""


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 (64 hex digits) of a file when it was written."""

    size: NATURAL
    sha256: TEXT

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "FileInfo":
        """Measure the file at `path`."""
        return cls(os.stat(path).st_size, sha256_file(path))

    def problem(self, path: str | os.PathLike[str]) -> str | None:
        """A text saying how the file at `path` differs from this record; None if it does not."""
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None:
            return "missing"
        if size < self.size:
            return f"truncated: {size} of {self.size} bytes"
        if size > self.size or sha256_file(path) != self.sha256:
            return "changed after writing"
        return None


@dataclass(frozen=True)
class Part:
    """One split of the stream: a mega-batch, a validation set or a test (evaluation) set."""

    name: TEXT
    """`megabatch_00`, ..., `valid`, `test`; if ordered also `test_00`, ..., `valid_00`, ..."""
    prefix: INSIDE
    """Path in the stream, without suffix: `megabatch_00/train`, ...; else the name of the part."""
    words: COUNT  # whitespace-separated words of the normalised text
    tokens: COUNT  # token ids in the .bin file, every eos counted
    documents: COUNT
    items: COUNT  # lines plus one document break for each document
    bytes: COUNT  # UTF-8 bytes of the normalised text, with one newline after each line
    sources: dict[TEXT, NATURAL]  # words by source
    files: dict[INSIDE, FileInfo]  # by path relative to the stream
    period: TEXT = ""
    """In a dated stream, also of the held-out parts: `2023`, `2023-W20`, `2020..2021`."""


@dataclass(frozen=True)
class Stream:
    """A finished stream: the contents of stream.json."""

    directory: Path
    version: int
    seed: int
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]  # of dict.txt; fairseq adds 4 specials
    megabatches: tuple[Part, ...]
    valid: Part
    test: Part
    settings: dict[str, Any]
    files: dict[INSIDE, FileInfo]  # dict.txt and the tokenizer
    corpus: dict[str, Any] = field(default_factory=dict)
    """Counts of documents, words, duplicates and unused documents."""
    appended: tuple[dict[str, Any], ...] = ()
    """For each --append: its settings, the number of its `first` mega-batch, and its `corpus`."""
    held_out: tuple[Part, ...] = ()  # if ordered: `test_00`, ..., the test set of each mega-batch
    held_out_valid: tuple[Part, ...] = ()  # if ordered: `valid_00`, ..., the validation set of each
    end_token: NATURAL | None = None
    """With the tokenizer of a Hugging Face folder: the tokenizer's id that ends a text. In .bin it
    is fairseq's eos, 2, and the tokenizer's id i is i + SPECIALS."""

    @property
    def ordered(self) -> bool:
        """Whether mega-batches follow an order; `test` and `valid` then mix the held-out parts."""
        return bool(self.held_out)

    @property
    def test_megabatches(self) -> int:
        """Number of first mega-batches that `test` has; an append leaves `test` as it is."""
        count = len(self.megabatches)
        if self.appended:
            return int(self.appended[0].get("first", count))
        is_text = bool(self.files)
        if is_text:
            return count
        # images by date: `test` joins the first held-out parts, and additions have no record
        documents = 0
        for number, part in enumerate(self.held_out, start=1):
            documents += part.documents
            if documents >= self.test.documents:
                return number
        return count

    @property
    def parts(self) -> tuple[Part, ...]:
        """All splits: the mega-batches in order, valid, test, the held-out parts."""
        return (*self.megabatches, self.valid, self.test, *self.held_out, *self.held_out_valid)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Stream":
        """Read DIRECTORY/stream.json, and no other file (see `check`).

        UserError: the directory has no stream.json, or a malformed one, or one of another format
        version.
        """
        directory = Path(directory)
        path = directory / FILE
        if not path.is_file():
            raise UserError(
                f"{directory}: no finished stream here (no {FILE}); make one with `alma data`"
            )
        try:
            record = parse_json(path.read_bytes())
            require(record, {}, ["version"])
            if record["version"] != VERSION:
                version = shown(record["version"])
                raise UserError(f"{path}: format version {version}, not {VERSION}; {_REMAKE}")
            stream = msgspec.convert(record | {"directory": directory}, cls)
            if not is_plain([stream.settings, stream.corpus, *stream.appended]):
                raise ValueError("control characters, huge numbers or deep nesting")
            held_out = {len(stream.held_out), len(stream.held_out_valid)}
            if not stream.megabatches or held_out not in ({0}, {len(stream.megabatches)}):
                megabatches = len(stream.megabatches)
                raise ValueError(f"{megabatches} mega-batches, held-out parts of {max(held_out)}")
        except ValueError as error:
            raise UserError(f"{path}: malformed ({error}); {_REMAKE}") from error
        return stream

    def write(self) -> None:
        """Write stream.json into `directory`, atomically; call it when all other files exist."""

        def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if value or name not in _ABSENT_IF_EMPTY}

        record = dataclasses.asdict(self, dict_factory=fields)
        del record["directory"]
        if self.end_token is None:
            del record["end_token"]
        write_json_atomic(self.directory / FILE, record)

    def path(self, part: Part) -> str:
        """Path of the part's .bin and .idx without suffix, as fairseq expects it."""
        return str(self.directory / part.prefix)

    def check(self, parts: Part | Iterable[Part]) -> None:
        """Compare dict.txt, the tokenizer and the files of `parts` with their sizes and SHA-256.

        Reads the files once (about 1 GB/s per core). UserError: the first one missing, truncated or
        changed.
        """
        files = dict(self.files)
        for part in (parts,) if isinstance(parts, Part) else parts:
            files |= part.files
        for name, info in files.items():
            path = self.directory / name
            problem = info.problem(path)
            if problem:
                raise UserError(
                    f"{path}: {problem}; copy it again from the original stream, or {_REMAKE}"
                )


def document_starts(path: str | os.PathLike[str], documents: int) -> "np.ndarray":
    """Position of the first token of each document of a part, (documents,) int64.

    path: of the part's .idx. UserError: it has not as many `documents`.
    """
    import numpy as np

    sizes, _ = read_index(path)
    ends = np.cumsum(sizes, dtype=np.int64)
    of_documents = ends
    if len(sizes) != documents:  # an item is a line, and one of length 1 ends a document
        of_documents = ends[sizes == 1]
    if not documents or len(of_documents) != documents or of_documents[-1] != ends[-1]:
        problem = f"{len(of_documents):,} documents, not {documents:,} as in {FILE}"
        raise UserError(f"{path}: {problem}; {_REMAKE}")
    return np.concatenate([[0], of_documents[:-1]])


def document_losses(
    nll: "np.ndarray", path: str | os.PathLike[str], documents: int
) -> "np.ndarray":
    """Loss in nats and tokens of each document, float64 (documents, 2), by the loss of each token.

    nll: (tokens,), in the order of the part. path, documents: as of `document_starts`. UserError:
    the part has other documents or tokens.
    """
    import numpy as np

    starts = document_starts(path, documents)
    tokens = int(np.sum(read_index(path)[0], dtype=np.int64))
    if len(nll) != tokens:
        raise UserError(f"{path}: losses of {len(nll):,} of {tokens:,} tokens")
    losses = np.add.reduceat(np.asarray(nll, np.float64), starts)
    counts = np.diff(starts, append=tokens)
    return np.column_stack([losses, counts.astype(np.float64)])


def is_stream(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds a finished stream."""
    return (Path(directory) / FILE).is_file()


def dtype_code(dictionary_size: int) -> int:
    """fairseq's code of the dtype of token ids; `dictionary_size` includes the 4 specials."""
    return 8 if dictionary_size < 65500 else 9


def write_index(path: str | os.PathLike[str], sizes: "np.ndarray", dtype_code: int) -> None:
    """Write fairseq's mmap index for contiguous items of `sizes` tokens (n_items,)."""
    import numpy as np

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


def read_index(path: str | os.PathLike[str]) -> "tuple[np.ndarray, int]":
    """Sizes (n_items,) int32, memory-mapped, and dtype code of an index. UserError: no index."""
    import numpy as np

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
