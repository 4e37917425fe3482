"""Encode and finalise: a bucket of documents -> token ids, the buckets of a split -> one .bin and .idx."""

import dataclasses
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write, fsync_directory, write_json_atomic
from alma.stream import KEY_BYTES, SUFFIXES, FileInfo, Part, write_index
from data_prep.gpt2 import GPT2
from data_prep.plan import Job, Plan, content_key
from data_prep.shuffle import bucket_texts
from data_prep.tokenizer import EOS, Encoder, SentencePiece

_BLOCK_BYTES = 1 << 20


def open_encoder(files: Mapping[str, str | Path]) -> Encoder:
    """The encoder that these files, by their names in a stream, are of. UserError: see `Encoder`'s kinds."""
    kind = GPT2 if files.keys() >= set(GPT2.files) else SentencePiece
    return kind(*(files[name] for name in kind.files))


@functools.lru_cache(maxsize=1)
def load_encoder(directory: Path) -> Encoder:
    """The encoder of this process, of the files in `directory`; its cache of words serves all buckets."""
    return open_encoder({path.name: path for path in directory.iterdir()})


def encode_bucket(job: Job, bucket: int, units: int) -> None:
    """Write the ids of a bucket (.bin), then its item sizes, piece counts and sums (.npz).

    Items are the lines of each document, each with eos, and one eos alone after the last.
    """
    encoder = load_encoder(job.work)
    sizes: list[np.ndarray] = []
    counts = np.zeros(encoder.dictionary_size, np.int64)
    block: list[str] = []
    words = text_bytes = held = 0
    keys: list[bytes] = []
    with atomic_write(job.file("bucket", bucket, "bin"), "wb") as file:

        def flush() -> None:
            ids = encoder.encode(block)
            file.write(ids)
            counts[:] += np.bincount(ids, minlength=len(counts))
            sizes.append(np.diff(np.flatnonzero(ids == EOS), prepend=-1).astype(np.int32))
            block.clear()

        for text in bucket_texts(job, bucket, units):
            block.append(text.decode())
            words += text.count(b" ") + text.count(b"\n") + 1
            text_bytes += len(text) + 1
            keys.append(content_key(text, job.seed)[:KEY_BYTES])
            held += len(text)
            if held >= _BLOCK_BYTES:
                flush()
                held = 0
        flush()
    found: dict[str, Any] = {
        "documents": len(keys),
        "words": words,
        "bytes": text_bytes,
        "keys": np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2),
        "sizes": np.concatenate([np.zeros(0, np.int32), *sizes]),
        "counts": counts,
    }
    with atomic_write(job.file("bucket", bucket, "npz"), "wb") as file:
        np.savez(file, **found)


def finalise_part(job: Job, name: str, buckets: list[int], sources: dict[str, int], code: int) -> None:
    """Join the buckets of a split into .bin, .idx and .keys, then leave its record in the work directory."""
    prefix = f"{name}/train" if name.startswith("megabatch") else name
    path = job.finished / prefix
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (job.finished, job.work):  # the record must not outlive the folders in a power cut
        fsync_directory(folder)
    with atomic_write(f"{path}.bin", "wb") as file:
        for bucket in buckets:
            with open(job.file("bucket", bucket, "bin"), "rb") as ids:
                shutil.copyfileobj(ids, file, 1 << 20)
    sums = {"documents": 0, "words": 0, "bytes": 0}
    sizes = []
    with atomic_write(f"{path}.keys", "wb") as file:
        for bucket in buckets:
            with np.load(job.file("bucket", bucket, "npz")) as arrays:
                sizes.append(arrays["sizes"])
                file.write(arrays["keys"].tobytes())
                sums = {key: value + int(arrays[key]) for key, value in sums.items()}
    lengths = np.concatenate(sizes)
    write_index(f"{path}.idx", lengths, code)
    files = {f"{prefix}{suffix}": FileInfo.of(f"{path}{suffix}") for suffix in SUFFIXES}
    part = Part(
        name=name,
        prefix=prefix,
        tokens=int(lengths.sum(dtype=np.int64)),
        items=len(lengths),
        sources=sources,
        files=files,
        **sums,
    )
    write_json_atomic(job.work / f"{name}.json", dataclasses.asdict(part))


def piece_counts(job: Job, buckets: list[int]) -> np.ndarray:
    """How often each fairseq id occurs in `buckets` (dictionary_size,)."""
    total = np.zeros(0, np.int64)
    for bucket in buckets:
        with np.load(job.file("bucket", bucket, "npz")) as arrays:
            total = total + arrays["counts"] if len(total) else arrays["counts"]
    return total


def check_encode(job: Job, plan: Plan) -> None:
    """Compare documents, words and content keys of every bucket with the plan. UserError: one differs."""
    for bucket in range(len(plan.bucket_split)):
        with np.load(job.file("bucket", bucket, "npz")) as arrays:
            keys = int(arrays["keys"][:, 1].sum(dtype=np.uint64))
            found = [int(arrays["documents"]), int(arrays["words"]), keys]
        planned = [plan.bucket_documents[bucket], plan.bucket_words[bucket], plan.bucket_keys[bucket]]
        if found != [int(value) for value in planned]:
            raise UserError(
                f"{job.work}: damaged (bucket {bucket} is not what was planned); remove it and run again"
            )
