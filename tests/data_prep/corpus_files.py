"""Write and read corpus files."""

import bz2
import gzip
import lzma

import zstandard

from data_prep.compressed import Skipped
from data_prep.documents import Reader, make_shards

PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
}


def read(path, reader=None, shard_bytes=1 << 20):
    """The texts, and (offset, reason) of what was skipped."""
    skips: list[Skipped] = []
    headers = [
        text
        for shard in make_shards(
            [("s", str(path))], reader or Reader(on_bad_input="skip"), shard_bytes
        )
        for _, text, _ in (reader or Reader(on_bad_input="skip")).read(shard, skips.append)
    ]
    assert {skip.path for skip in skips} <= {str(path)}
    return headers, [(skip.offset, skip.reason) for skip in skips]


def warc(kind: str, payload: bytes) -> bytes:
    headers = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a/\r\n"
    headers += f"Content-Length: {len(payload)}"
    return headers.encode() + b"\r\n\r\n" + payload + b"\r\n\r\n"
