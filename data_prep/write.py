"""--write: files for other software beside fairseq's, which stay what all commands of ALMA read."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from alma.files import atomic_write
from data_prep.work import DOCUMENT_BYTES

SUFFIXES = {
    "fairseq": (),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "megatron": (".megatron.idx", ".megatron.bin"),
}
"""What --write adds to each part."""
_BREAK = 1  # tokens of the item that ends a document


def json_line(key: bytes, source: str, period: str, text: bytes) -> bytes:
    """A document, or a piece of one, by its content key; pieces of a document have one id."""
    row = {"id": key[:DOCUMENT_BYTES].hex(), "source": source, "date": period, "text": text.decode()}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write_parquet(path: Path, buckets: Iterable[Path]) -> None:
    """The documents of the buckets of a part, a row group for each bucket. Memory: one bucket."""
    import pyarrow
    import pyarrow.parquet

    names = ("id", "source", "date", "text")
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in names])
    with atomic_write(path, "wb") as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for bucket in buckets:
            rows = [json.loads(line) for line in bucket.read_bytes().split(b"\n")[:-1]]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def write_megatron(path: Path, lengths: np.ndarray, code: int) -> None:
    """Megatron's index of the tokens in `path`.bin, a sequence for each document, and a link to them.

    `lengths`: tokens of the items of fairseq's index; `code`: its dtype. Format of megatron-core's
    `IndexedDataset`, version 1; uint32, which it does not know, is read as int32: ids are below 2**31.
    """
    ends = np.cumsum(lengths, dtype=np.int64)[lengths == _BREAK]
    sizes = np.diff(ends, prepend=0)
    width = 2 if code == 8 else 4
    with atomic_write(Path(f"{path}.megatron.idx"), "wb") as file:
        head = (b"MMIDIDX\0\0", 1, 8 if code == 8 else 4, len(sizes), len(sizes) + 1)
        file.write(struct.pack("<9sQBQQ", *head))
        file.write(sizes.astype("<i4").tobytes())
        file.write(((ends - sizes) * width).astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    link = Path(f"{path}.megatron.bin")
    link.unlink(missing_ok=True)
    link.hardlink_to(f"{path}.bin")
