"""The settings of a stream."""

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from alma.errors import UserError
from alma.files import sha256_file
from data_prep.cut import Splits
from data_prep.documents import Reader


@dataclass(frozen=True)
class StreamSettings:
    """All settings on which a stream depends, besides the text of its files."""

    files: list[tuple[str, str]]  # (source, path) of every corpus file
    splits: Splits
    seed: int
    reader: Reader
    vocab_size: int | None  # tokens to train; None with a given `tokenizer`
    tokenizer: dict[str, str]
    """Paths of the files of a given tokenizer, by their names in the stream; empty: train one."""
    end_token: int | None = None
    """The id of the tokenizer of a model that ends a text; None: another tokenizer."""
    near_duplicates: bool = False  # whether near duplicates are dropped
    write_dropped: bool = False  # whether dropped.jsonl lists the duplicates
    write: str = "fairseq"  # what is written beside fairseq's files, a key of `encode.WRITTEN`

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, sorted by `Splits.rank`."""
        return self.splits.sources(source for source, _ in self.files)

    def record(self) -> dict[str, Any]:
        """The settings as stream.json keeps them.

        `input` is a hash of the files' names, sizes and times. UserError: a file is missing.
        """
        record = {
            **self.splits.record(),
            **self.reader.record(),
            "vocab_size": self.vocab_size,
            "tokenizer": None,
            "sources": list(self.sources),
            "input": self._input_digest(),
        }
        if self.tokenizer:
            hashes = {name: sha256_file(path) for name, path in self.tokenizer.items()}
            record["tokenizer"] = hashes
        if self.end_token is not None:
            record["end_token"] = self.end_token
        # Left out if off, so that the records of older streams stay equal.
        if self.near_duplicates:
            record["near_duplicates"] = "drop"
        if self.write_dropped:
            record["write_dropped"] = True
        if self.write != "fairseq":
            record["write"] = self.write
        return record

    def _input_digest(self) -> str:
        identity = []
        try:
            for source, path in self.files:
                stat = os.stat(path)
                identity.append((source, path, stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            remedy = "rerun when it is complete"
            raise UserError(f"{error.filename}: {error.strerror}; {remedy}") from error
        return digest(sorted(identity))


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
