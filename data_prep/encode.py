"""Stage encode: the token ids of every bucket.

Reads the spills and the tokenizer. Writes for each bucket

    bucket-NNNNN.bin   the ids, as in the .bin of a split
    bucket-NNNNN.npz   sizes of the items, count of each token, content keys and sums; written last
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep.dictionary import EOS
from data_prep.gpt2 import GPT2
from data_prep.plan import CorpusPlan
from data_prep.scan import content_key
from data_prep.shuffle import bucket_texts
from data_prep.tokenizer import Encoder, SentencePiece
from data_prep.work import Workspace

_BLOCK_BYTES = 1 << 20  # text that is encoded in one call


def open_encoder(files: Mapping[str, str | Path]) -> Encoder:
    """The encoder of a tokenizer's files, given by their names in a stream. UserError: they are damaged."""
    kind = GPT2 if files.keys() >= set(GPT2.files) else SentencePiece
    return kind(*(files[name] for name in kind.files))


@functools.lru_cache(maxsize=1)
def load_encoder(directory: Path) -> Encoder:
    """The encoder of the work directory, loaded once per process: buckets share its cache of words."""
    return open_encoder({path.name: path for path in directory.iterdir()})


def encode_bucket(space: Workspace, bucket: int, shards: int) -> None:
    """Write the files of a bucket. An item is a line of a document with eos, or one eos after the last."""
    encoder = load_encoder(space.directory)
    sizes: list[np.ndarray] = []
    counts = np.zeros(encoder.dictionary_size, np.int64)
    block: list[str] = []
    words = text_bytes = held = 0
    keys: list[bytes] = []
    with atomic_write(space.file("bucket", bucket, "bin"), "wb") as file:

        def flush() -> None:
            ids = encoder.encode(block)
            file.write(ids)
            counts[:] += np.bincount(ids, minlength=len(counts))
            sizes.append(np.diff(np.flatnonzero(ids == EOS), prepend=-1).astype(np.int32))
            block.clear()

        for text in bucket_texts(space, bucket, shards):
            block.append(text.decode())
            words += text.count(b" ") + text.count(b"\n") + 1
            text_bytes += len(text) + 1
            keys.append(content_key(text, space.seed)[:KEY_BYTES])
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
    with atomic_write(space.file("bucket", bucket, "npz"), "wb") as file:
        np.savez(file, **found)


def check_encode(space: Workspace, plan: CorpusPlan) -> None:
    """Compare documents, words and content keys of every bucket with the plan. UserError: they differ."""
    for bucket in range(len(plan.bucket_split)):
        with np.load(space.file("bucket", bucket, "npz")) as arrays:
            keys = int(arrays["keys"][:, 1].sum(dtype=np.uint64))
            found = [int(arrays["documents"]), int(arrays["words"]), keys]
        planned = [plan.bucket_documents[bucket], plan.bucket_words[bucket], plan.bucket_keys[bucket]]
        if found != [int(value) for value in planned]:
            raise UserError(
                f"{space.directory}: damaged (bucket {bucket} differs from the plan); remove it and run again"
            )
