"""Stage encode: the token ids of every bucket."""

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.byte_level import GPT2
from data_prep.hugging_face import HuggingFace, HuggingFacePair
from data_prep.plan import CorpusPlan
from data_prep.shuffle import bucket_texts
from data_prep.tokenizer import Encoder, SentencePiece
from data_prep.work import Workspace, name_of, read_arrays
from data_prep.written import JSON_KINDS, json_line

_BLOCK_BYTES = 1 << 20  # text that is encoded in one call


def open_encoder(files: Mapping[str, str | Path]) -> Encoder:
    """The encoder of a tokenizer's files, given by their names in a stream.

    UserError: they are damaged.
    """
    kinds = (GPT2, HuggingFace, HuggingFacePair, SentencePiece)
    kind = next(kind for kind in kinds if files.keys() >= set(kind.files))
    return kind(*(files[name] for name in kind.files))


@functools.lru_cache(maxsize=1)
def load_encoder(directory: Path) -> Encoder:
    """The encoder of the work directory, loaded once per process: buckets share its word cache."""
    return open_encoder({path.name: path for path in directory.iterdir()})


def encode_bucket(
    space: Workspace,
    number: int,
    period: str,
    shards: int,
    write: str,
    end_token: int | None = None,
) -> None:
    """Write the files of bucket `number`: its token ids (see `Encoder.encode`), and its counts.

    `period` is that of its documents, "" if the stream is not dated; `write` is a key of
    `written.WRITTEN`; `end_token`: see `HuggingFace.chat_items`, of a tokenizer of Hugging Face.
    """
    encoder = load_encoder(space.directory)
    encode = encoder.items
    if space.reader.chat:
        assert isinstance(encoder, HuggingFace)
        assert end_token is not None
        encode = functools.partial(encoder.chat_items, end_token=end_token)
    sizes = [np.zeros(0, np.int32)]
    counts = np.zeros(encoder.dictionary_size, np.int64)
    block: list[str] = []
    block_bytes = 0
    words = 0
    text_bytes = 0
    keys: list[bytes] = []
    with ExitStack() as files:
        file = files.enter_context(atomic_write(space.file("bucket", number, "bin"), "wb"))
        lines = None
        if write in JSON_KINDS:
            path = space.file("bucket", number, "jsonl")
            lines = files.enter_context(atomic_write(path, "wb"))

        def flush() -> None:
            ids, item_sizes = encode(block)
            file.write(ids)
            counts[:] += np.bincount(ids, minlength=len(counts))
            sizes.append(item_sizes)
            block.clear()

        for key, data, source in bucket_texts(space, number, shards):
            text = data.decode()
            if lines:
                lines.write(json_line(key, name_of(space.sources[source]), period, text))
            block.append(text)
            words += space.reader.count_words(text)
            text_bytes += len(data) + 1
            keys.append(key)
            block_bytes += len(data)
            if block_bytes >= _BLOCK_BYTES:
                flush()
                block_bytes = 0
        flush()
    with atomic_write(space.file("bucket", number, "npz"), "wb") as file:
        np.savez(
            file,
            documents=len(keys),
            words=words,
            bytes=text_bytes,
            keys=np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2),
            sizes=np.concatenate(sizes),
            counts=counts,
        )


def check_encode(space: Workspace, plan: CorpusPlan) -> None:
    """Compare documents, words and content keys of every bucket with the plan.

    UserError: they differ.
    """
    for bucket in range(len(plan.bucket_split)):
        arrays = read_arrays(space.file("bucket", bucket, "npz"), "keys", "documents", "words")
        keys = int(arrays["keys"][:, 1].sum(dtype=np.uint64))
        encoded = [int(arrays["documents"]), int(arrays["words"]), keys]
        planned = [
            int(plan.bucket_documents[bucket]),
            int(plan.bucket_words[bucket]),
            int(plan.bucket_keys[bucket]),
        ]
        if encoded != planned:
            problem = f"damaged (bucket {bucket} differs from the plan)"
            raise UserError(f"{space.directory}: {problem}; remove it and run again")
