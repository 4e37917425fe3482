"""Stages encode and finalise: the token ids of every bucket, then the files of the stream.

With --write also files for other software; all commands of ALMA read fairseq's.
"""

import dataclasses
import functools
import json
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write, fsync_directory, write_json_atomic
from alma.stream import DTYPES, SPECIALS, SUFFIXES, FileInfo, Part, write_index
from data_prep.byte_level import GPT2, HuggingFace, HuggingFacePair
from data_prep.dictionary import DICTIONARY, EOS, dictionary_text
from data_prep.near_duplicates import ENTRY
from data_prep.plan import CorpusPlan, load_plan
from data_prep.shuffle import bucket_texts
from data_prep.tokenizer import Encoder, SentencePiece
from data_prep.work import DOCUMENT_BYTES, Workspace, damaged, join_files, mapped, open_items, read_arrays

NEAR = ".near"  # suffix of the file with the hashes of documents, beside a mega-batch
_BLOCK_BYTES = 1 << 20  # text that is encoded in one call
WRITTEN = {
    "fairseq": (),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "megatron": (".megatron.idx", ".megatron.bin"),
}
"""What --write adds to each part."""


def open_encoder(files: Mapping[str, str | Path]) -> Encoder:
    """The encoder of a tokenizer's files, given by their names in a stream. UserError: they are damaged."""
    kinds = (GPT2, HuggingFace, HuggingFacePair, SentencePiece)
    kind = next(kind for kind in kinds if files.keys() >= set(kind.files))
    return kind(*(files[name] for name in kind.files))


@functools.lru_cache(maxsize=1)
def load_encoder(directory: Path) -> Encoder:
    """The encoder of the work directory, loaded once per process: buckets share its cache of words."""
    return open_encoder({path.name: path for path in directory.iterdir()})


def encode_bucket(space: Workspace, bucket: int, period: str, shards: int, write: str) -> None:
    """Write the files of a bucket. An item ends with eos: see `Encoder.encode`.

    `period`: of its documents, or empty. `write`: a key of WRITTEN.
    """
    encoder = load_encoder(space.directory)
    sizes: list[np.ndarray] = []
    counts = np.zeros(encoder.dictionary_size, np.int64)
    block: list[str] = []
    words = text_bytes = held = 0
    keys: list[bytes] = []
    with ExitStack() as files:
        file = files.enter_context(atomic_write(space.file("bucket", bucket, "bin"), "wb"))
        if write in ("jsonl", "parquet"):
            lines = files.enter_context(atomic_write(space.file("bucket", bucket, "jsonl"), "wb"))

        def flush() -> None:
            ids = encoder.encode(block)
            file.write(ids)
            counts[:] += np.bincount(ids, minlength=len(counts))
            sizes.append(np.diff(np.flatnonzero(ids == EOS), prepend=-1).astype(np.int32))
            block.clear()

        for key, text, source in bucket_texts(space, bucket, shards):
            if write in ("jsonl", "parquet"):
                lines.write(json_line(key, space.sources[source].rpartition("/")[2], period, text))
            block.append(text.decode())
            words += text.count(b" ") + text.count(b"\n") + 1
            text_bytes += len(text) + 1
            keys.append(key)
            held += len(text)
            if held >= _BLOCK_BYTES:
                flush()
                held = 0
        flush()
    with atomic_write(space.file("bucket", bucket, "npz"), "wb") as file:
        np.savez(
            file,
            documents=len(keys),
            words=words,
            bytes=text_bytes,
            keys=np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2),
            sizes=np.concatenate([np.zeros(0, np.int32), *sizes]),
            counts=counts,
        )


def check_encode(space: Workspace, plan: CorpusPlan) -> None:
    """Compare documents, words and content keys of every bucket with the plan. UserError: they differ."""
    for bucket in range(len(plan.bucket_split)):
        arrays = read_arrays(space.file("bucket", bucket, "npz"), "keys", "documents", "words")
        keys = int(arrays["keys"][:, 1].sum(dtype=np.uint64))
        found = [int(arrays["documents"]), int(arrays["words"]), keys]
        planned = [plan.bucket_documents[bucket], plan.bucket_words[bucket], plan.bucket_keys[bucket]]
        if found != [int(value) for value in planned]:
            what = f"damaged (bucket {bucket} differs from the plan)"
            raise UserError(f"{space.directory}: {what}; remove it and run again")


def finalise_part(
    space: Workspace,
    name: str,
    buckets: list[int],
    sources: dict[str, int],
    code: int,
    near: tuple[int, int] | None = None,
    write: str = "fairseq",
) -> None:
    """Concatenate the buckets of a split; `sources`: its words by source, `code`: fairseq's dtype code.

    `near`: number of files past-NNNNN.bin, and of the mega-batch whose entries are kept beside the split.
    """
    prefix = f"{name}/train" if name.startswith("megabatch") else name
    path = space.finished / prefix
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (space.finished, space.directory):  # SPLIT.json must not outlive them in a power cut
        fsync_directory(folder)
    join_files(Path(f"{path}.bin"), (space.file("bucket", bucket, "bin") for bucket in buckets))
    sums = {"documents": 0, "words": 0, "bytes": 0}
    sizes = space.directory / f"{name}.sizes"  # of all items, more than one process can hold
    with atomic_write(f"{path}.keys", "wb") as file, atomic_write(sizes, "wb") as items:
        for bucket in buckets:
            arrays = read_arrays(space.file("bucket", bucket, "npz"), "sizes", "keys", *sums)
            items.write(arrays["sizes"].tobytes())
            file.write(arrays["keys"].tobytes())
            sums = {key: value + int(arrays[key]) for key, value in sums.items()}
    lengths = np.memmap(sizes, np.int32, "r") if sizes.stat().st_size else np.zeros(0, np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    if Path(f"{path}.bin").stat().st_size != tokens * np.dtype(DTYPES[code]).itemsize:
        raise damaged(space.directory / "bucket-*.bin")
    write_index(f"{path}.idx", lengths, code)
    if near:
        files, arrival = near
        with open_items(Path(f"{path}{NEAR}")) as file:
            for number in range(files):
                entries = mapped(space.file("past", number, "bin"), ENTRY)
                file.write(entries[entries["arrival"] == arrival].tobytes())
    if write == "megatron":
        write_megatron(path, np.asarray(lengths), code, sums["documents"])
    elif write != "fairseq":
        join = join_files if write == "jsonl" else write_parquet
        join(Path(f"{path}.{write}"), (space.file("bucket", bucket, "jsonl") for bucket in buckets))
    suffixes = (*SUFFIXES, *([NEAR] if near else []), *WRITTEN[write])
    part = Part(
        name=name,
        prefix=prefix,
        tokens=tokens,
        items=len(lengths),
        sources=sources,
        files={f"{prefix}{suffix}": FileInfo.of(f"{path}{suffix}") for suffix in suffixes},
        words=sums["words"],
        documents=sums["documents"],
        bytes=sums["bytes"],
    )
    write_json_atomic(space.directory / f"{name}.json", dataclasses.asdict(part))


def finalise_vocabulary(space: Workspace) -> dict[str, FileInfo]:
    """Write dict.txt, with the counts of the first mega-batch, and the tokenizer's files."""
    encoder = load_encoder(space.directory)
    for name in encoder.files:
        join_files(space.finished / name, [space.directory / name])
    counts = np.zeros(encoder.dictionary_size, np.int64)
    for bucket in load_plan(space).buckets(0):
        counts += read_arrays(space.file("bucket", bucket, "npz"), "counts")["counts"]
    with atomic_write(space.finished / DICTIONARY) as file:
        file.write(dictionary_text(encoder.tokens, counts[SPECIALS:]))
    return {name: FileInfo.of(space.finished / name) for name in (DICTIONARY, *encoder.files)}


def json_line(key: bytes, source: str, period: str, text: bytes) -> bytes:
    """A document, or a piece of one, by its content key; pieces of a document have one id."""
    row = {"id": key[:DOCUMENT_BYTES].hex(), "source": source, "date": period, "text": text.decode()}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write_parquet(path: Path, buckets: Iterable[Path]) -> None:
    """The documents of the buckets of a part, a row group for each bucket. Memory: one bucket."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in ("id", "source", "date", "text")])
    with atomic_write(path, "wb") as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for bucket in buckets:
            rows = [json.loads(line) for line in bucket.read_bytes().split(b"\n")[:-1]]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def write_megatron(path: Path, lengths: np.ndarray, code: int, documents: int) -> None:
    """Megatron's index of the tokens in `path`.bin, a sequence for each document, and a link to them.

    `lengths`: tokens of the items of fairseq's index, which are lines and breaks, or, if they are as many,
    `documents`; `code`: its dtype. Format of megatron-core's `IndexedDataset`, version 1; uint32, which it
    does not know, is read as int32: ids are below 2**31.
    """
    ends = np.cumsum(lengths, dtype=np.int64)[(lengths == 1) | (len(lengths) == documents)]  # 1: a break
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
