"""Common Crawl's .wet files: text of web pages as WARC records."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from data_prep import compressed
from data_prep.compressed import Damaged, Document, Input, Skipped
from data_prep.records import Format, Keys

_RECORD_END = re.compile(rb"\r\n\r\n|\s*(?:WARC/|\Z)")  # what follows the payload of a record


class _WarcRecord(NamedTuple):
    """The headers of a WARC record; a damaged one may have none."""

    start: int
    headers: dict[bytes, bytes]

    @property
    def size(self) -> int:
        """Bytes of the payload; -1: unknown."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if re.fullmatch(rb"\d{1,18}", length) else -1

    @property
    def is_text(self) -> bool:
        return self.headers.get(b"warc-type") == b"conversion"

    @property
    def date(self) -> str:
        return self.headers.get(b"warc-date", b"").decode("ascii", "replace")


class Wet(Format):
    """The payload and WARC-Date of each `conversion` record.

    fastwarc 2.0 and warcio 1.8 are not used: they accept truncated archives without an error.
    """

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        in_bad_record = False  # whether a bad record was just reported; its rest is skipped
        while line := data.readline():
            start = data.position - len(line)
            if not line.startswith(b"WARC/"):
                if not in_bad_record and not line.isspace():
                    in_bad_record = True
                    yield data.bad(start, "damaged or truncated (no WARC record)")
                continue
            record = _WarcRecord(start, _warc_headers(data))
            size = record.size
            offset = data.position
            # Read 64 bytes more, to check what follows the payload.
            payload = data.read(min(size, compressed.MAX_DOCUMENT_BYTES) + 64)
            if 0 <= size <= len(payload) and _RECORD_END.match(payload, size):
                in_bad_record = False
                data.unread(payload[size:])
                if record.is_text:
                    yield _warc_document(data, record, offset, payload[:size])
            elif (
                size > compressed.MAX_DOCUMENT_BYTES
                and len(payload) > compressed.MAX_DOCUMENT_BYTES
            ):
                in_bad_record = False
                if record.is_text:
                    yield data.too_long(start)
                _read_past(data, offset + size)
            else:
                if record.headers or not in_bad_record:  # otherwise a line within the bad record
                    reason = "damaged or truncated (a WARC record without its Content-Length)"
                    yield data.bad(start, reason)
                in_bad_record = True
                data.unread(payload)  # it may contain the next records, which are read again


def _warc_headers(data: Input) -> dict[bytes, bytes]:
    """Read the headers of a WARC record, and the empty line after them."""
    headers: dict[bytes, bytes] = {}
    while (line := data.readline()) and not line.isspace():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return headers


def _warc_document(
    data: Input, record: _WarcRecord, offset: int, payload: bytes
) -> Document | Skipped:
    if record.size > compressed.MAX_DOCUMENT_BYTES:
        return data.too_long(record.start)
    return data.decode(payload, offset, record.date)


def _read_past(data: Input, end: int) -> None:
    """Read up to the position `end`. Damaged: the file ends before."""
    while data.position < end:
        if not data.read(min(compressed.BLOCK, end - data.position)):
            raise Damaged("the last record is incomplete")
