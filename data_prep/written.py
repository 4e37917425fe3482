"""Further files of a stream for other software (--write); ALMA itself reads only fairseq's."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from alma.files import atomic_write
from data_prep.work import DOCUMENT_BYTES, join_files

WRITTEN = {
    "fairseq": (),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "megatron": (".megatron.idx", ".megatron.bin"),
}
"""Values of --write, with the suffixes of the files that each adds to a part."""
JSON_KINDS = ("jsonl", "parquet")
"""Keys of WRITTEN whose files are made from JSON lines of the buckets."""

_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Header of Megatron's index: magic, version 1, dtype code, number of sequences, number of
documents + 1."""


def json_line(key: bytes, source: str, period: str, text: str) -> bytes:
    """The JSON line of a document, or of a piece of one; pieces of a document have the same id.

    The id is made from the content key.
    """
    row = {"id": key[:DOCUMENT_BYTES].hex(), "source": source, "date": period, "text": text}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write_json_kind(kind: str, path: Path, buckets: Iterable[Path]) -> None:
    """Write PATH.KIND, one of JSON_KINDS, from the JSON lines of the buckets of a part."""
    target = Path(f"{path}.{kind}")
    if kind == "jsonl":
        join_files(target, buckets)
    else:
        write_parquet(target, buckets)


def write_parquet(path: Path, buckets: Iterable[Path]) -> None:
    """Write the documents of buckets, a row group for each bucket. Memory: one bucket."""
    import pyarrow
    import pyarrow.parquet

    columns = ("id", "source", "date", "text")
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in columns])
    with (
        atomic_write(path, "wb") as file,
        pyarrow.parquet.ParquetWriter(file, schema) as writer,
    ):
        for bucket in buckets:
            rows = [json.loads(line) for line in bucket.read_bytes().split(b"\n")[:-1]]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def write_megatron(path: Path, lengths: np.ndarray, code: int, documents: int) -> None:
    """Write Megatron's index of the tokens in `path`.bin, and link to them.

    Each document is a sequence. `lengths`: (items,) tokens of the items of fairseq's index. Items
    are lines, and a lone eos ends each document; if there are as many items as `documents`, each
    item is a document. `code`: fairseq's code of the dtype.

    The format is that of megatron-core's `IndexedDataset`, version 1. It does not know uint32,
    which is written as int32: ids are below 2**31.
    """
    ends_document = (lengths == 1) | (len(lengths) == documents)
    ends = np.cumsum(lengths, dtype=np.int64)[ends_document]
    sizes = np.diff(ends, prepend=0)
    is_uint16 = code == 8
    width = 2 if is_uint16 else 4
    megatron_code = 8 if is_uint16 else 4
    count = len(sizes)
    with atomic_write(Path(f"{path}.megatron.idx"), "wb") as file:
        file.write(_MEGATRON_HEADER.pack(b"MMIDIDX\0\0", 1, megatron_code, count, count + 1))
        file.write(sizes.astype("<i4").tobytes())
        file.write(((ends - sizes) * width).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    link = Path(f"{path}.megatron.bin")
    link.unlink(missing_ok=True)
    link.hardlink_to(f"{path}.bin")
