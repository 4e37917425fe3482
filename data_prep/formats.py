"""Formats of corpus files: a class that yields the documents of a segment, and an entry in FORMATS."""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from data_prep import compressed
from data_prep.compressed import Damaged, Document, Input, Segment, Skipped, WrongKind, indent, packing

_LINE = re.compile(rb"\n")
_NOTHING = re.compile(rb"\0(?!)")  # matches nothing, and looks at zeros only
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")
_DOC_END = re.compile(rb"</doc>[ \t\r]{0,8}\n")
_DOC_START = re.compile(rb"<doc id=(?<![^\n]<doc id=)[^\n]*>[ \t\r]*$", re.MULTILINE)
_RECORD_END = re.compile(rb"\r\n\r\n|\s*(?:WARC/|\Z)")  # what follows the payload of a WARC record
_TEXT = (".txt", ".md")


class Keys(NamedTuple):
    """Names of the fields of a record; a key with dots that is no field leads into objects."""

    text: str
    date: str = ""  # empty: dates are not read


class Format:
    """A kind of corpus file."""

    border: re.Pattern[bytes] | None = None
    """Where a file that is not compressed may be cut into segments; None: nowhere."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        """Yield each document of a segment, given by its bytes, and what is bad input."""
        raise NotImplementedError


class Between(Format):
    """Text between borders; without a border all text of a file."""

    def __init__(self, border: re.Pattern[bytes] | None = None) -> None:
        self.border = border

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        for number, (offset, text, closed) in enumerate(data.spans(self.border or _NOTHING)):
            alone = not (number or closed or data.segment.start)  # the file has no other document
            if text is None:
                line = f"--documents {data.segment.source}=line"
                remedy = f"no blank line ends it; if each line is a document, give {line}"
                yield data.too_long(offset, *[remedy] * (self.border is _BLANK_LINE))
            elif alone and b"\n" not in text and b"\r" in text.strip():  # as on old Macs
                remedy = "convert it by tr '\\r' '\\n', or leave it out with --on-bad-input skip"
                yield data.bad(offset, "its lines end with CR alone", remedy)
            else:
                yield data.decode(text, offset)


class WikiExtractor(Format):
    """Text between the lines <doc id=...> and </doc>."""

    border = _DOC_END

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        for offset, text, closed in data.spans(_DOC_END):
            if text is None:
                yield data.too_long(offset)
                continue
            if not closed:  # the last line of the file may lack its newline
                closed = text.rstrip().endswith(b"</doc>")
                text = text.rstrip().removesuffix(b"</doc>")
            starts = list(_DOC_START.finditer(text))
            outside = text[: starts[0].start() if starts else len(text)]
            if outside.strip():
                yield data.bad(offset + indent(outside), "text outside <doc> and </doc>")
            for start in starts if not closed else starts[:-1]:
                yield data.bad(offset + start.start(), "a <doc> without </doc>")
            if closed and starts:
                yield data.decode(text[starts[-1].end() :], offset + starts[-1].end())


class JsonLines(Format):
    """The fields of the object on each line; empty lines are none."""

    border = _LINE

    def __init__(self, text_key: str = "") -> None:
        """`text_key`: the only field that can hold the text; empty: that of `Keys`."""
        self._text_key = text_key

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        key = self._text_key or keys.text
        for start, line, _ in data.spans(_LINE):
            if line is None:
                yield data.too_long(start)
                continue
            offset = start + indent(line)
            line = line.strip()
            if not line:
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield data.bad(offset, f"malformed JSON ({error})")
                continue
            text = field(record, key)
            if isinstance(text, str):
                yield Document(text, field(record, keys.date) if keys.date else None, offset)
            else:
                yield data.bad(offset, no_text(key))


class Wet(Format):
    """The payload and WARC-Date of each `conversion` record.

    fastwarc 2.0 and warcio 1.8 take truncated archives for whole ones, so neither is used.
    """

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        lost = False  # in the rest of a bad record
        while line := data.readline():
            start = data.position - len(line)
            if not line.startswith(b"WARC/"):
                if not lost and not line.isspace():
                    lost = True
                    yield data.bad(start, "damaged or truncated (no WARC record)")
                continue
            headers: dict[bytes, bytes] = {}
            while (line := data.readline()) and not line.isspace():
                name, _, value = line.partition(b":")
                headers[name.lower()] = value.strip()
            length = headers.get(b"content-length", b"")
            size = int(length) if re.fullmatch(rb"\d{1,18}", length) else -1
            is_text = headers.get(b"warc-type") == b"conversion"
            most, offset = compressed.MAX_DOCUMENT_BYTES, data.position
            payload = data.read(min(size, most) + 64)  # and the beginning of what follows
            if 0 <= size <= len(payload) and _RECORD_END.match(payload, size):
                lost = False
                data.unread(payload[size:])
                if is_text and size > most:
                    yield data.too_long(start)
                elif is_text:
                    date = headers.get(b"warc-date", b"").decode("ascii", "replace")
                    yield data.decode(payload[:size], offset, date)
            elif size > most and len(payload) > most:  # read past
                lost = False
                if is_text:
                    yield data.too_long(start)
                while data.position < offset + size:
                    if not data.read(min(compressed.BLOCK, offset + size - data.position)):
                        raise Damaged("the last record is incomplete")
            else:
                if headers or not lost:  # else a line of text
                    yield data.bad(start, "damaged or truncated (a WARC record without its Content-Length)")
                lost = True
                data.unread(payload)  # the records that it swallowed are read


class Parquet(Format):
    """The rows of the row groups that begin in the segment; offsets count rows."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        import pyarrow
        import pyarrow.parquet

        path, key = data.segment.path, keys.text
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=compressed.BLOCK, pre_buffer=False) as file:
                data.position = 0
                of_text = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
                found = {field.name: field.type for field in file.schema_arrow}
                if getattr(found.get(key), "value_type", found.get(key)) not in of_text:
                    yield data.bad(0, no_text(key))
                    return
                names = [name for name in dict.fromkeys([key, keys.date]) if name in found]
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    columns = [group.column(i) for i in range(group.num_columns)]
                    first = columns[0].data_page_offset
                    first = min(first, columns[0].dictionary_page_offset or first)
                    if not data.segment.start <= first < data.segment.end:
                        data.position += group.num_rows
                        continue
                    size = next(c.total_uncompressed_size for c in columns if c.path_in_schema == key)
                    rows = min(max(compressed.BLOCK * group.num_rows // max(size, 1), 1), 4096)
                    for batch in file.iter_batches(rows, [number], names, use_threads=False):
                        dated = keys.date in names
                        dates = _dates(batch.column(keys.date)) if dated else itertools.repeat(None)
                        for value, date in zip(batch.column(key), dates, strict=False):
                            yield _row(value, date, key, data)
                            data.position += 1
        except pyarrow.ArrowException as error:
            raise Damaged(str(error)) from error


def _dates(column: Any) -> Iterator[Any]:
    """The dates of a column; what Python cannot hold is NaN, which is no date."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):  # a nanosecond has no place in a datetime
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    for value in column:
        try:
            yield value.as_py()
        except (ValueError, OverflowError):
            yield math.nan


def _row(value: Any, date: Any, key: str, data: Input) -> Document | Skipped:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    if not isinstance(text, str):
        return data.bad(data.position, no_text(key))
    # A character has at most 4 bytes: only long strings need to be encoded to be measured.
    most = compressed.MAX_DOCUMENT_BYTES
    if 4 * len(text) > most and len(text.encode()) > most:
        return data.too_long(data.position)
    return Document(text, date, data.position)


def field(record: Any, key: str) -> Any:
    """A field of a record; None: it is missing."""
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    name, _, rest = key.partition(".")
    return field(record.get(name), rest)


def no_text(key: str) -> str:
    """Why a record has no text."""
    return f"no field `{key}` that holds a string (--text-key names another)"


FORMATS = {
    ".jsonl": JsonLines(),
    ".json": JsonLines(),
    ".warc.wet": Wet(),
    ".wet": Wet(),
    ".parquet": Parquet(),
}
"""Formats by suffix: the last suffix decides, longer ones are removed from the name of a source."""

MODES = {
    "blank-line": Between(_BLANK_LINE),
    "file": Between(),
    "line": Between(_LINE),
    "wikiextractor": WikiExtractor(),
}
"""Formats of .txt and .md files, by --documents."""

KNOWN = (
    f"{' '.join([*_TEXT, *FORMATS])} and wiki_NN (all but .parquet also with {' '.join(compressed.PACKED)})"
)
"""The file names that can be read, for messages."""


def kind(path: str) -> str:
    """`text`, `wiki` or a key of FORMATS, by the name of the file; empty if unknown."""
    name = Path(path).name
    packed = packing(name)
    name = name.removesuffix(packed)
    if re.fullmatch(r"wiki_\d+", name):
        return "wiki"
    suffix = Path(name).suffix
    if suffix in _TEXT:
        return "text"
    return suffix if suffix in FORMATS and not (packed and suffix == ".parquet") else ""


def format_of(path: str, mode: str) -> Format:
    """The format of a file; `mode`: --documents, for .txt and .md.

    WikiExtractor writes two formats as wiki_NN, told apart by the first byte. Damaged: neither of them.
    WrongKind: a JSON array.
    """
    found = kind(path)
    if found == "text":
        return MODES[mode]
    if found not in ("wiki", ".json"):
        return FORMATS[found]
    with closing(compressed.open_file(path)) as file:
        first = file.read(64).removeprefix(compressed.BOM).lstrip()[:1]
    if found == ".json":
        if first == b"[":
            raise WrongKind("a JSON array", "write a JSON object on each line, such as by `jq -c '.[]'`")
        return FORMATS[found]
    if first not in (b"", b"<", b"{"):
        raise Damaged("WikiExtractor's files begin with <doc or {")
    return JsonLines("text") if first == b"{" else MODES["wikiextractor"]


def stem(name: str) -> str:
    """The name of a file without the suffixes of its format."""
    for suffix in (*compressed.PACKED, *_TEXT, *FORMATS):
        name = name.removesuffix(suffix)
    return name


def segment_starts(path: str, mode: str, size: int, step: int) -> list[int]:
    """Where segments of about `step` bytes begin in a file of `size` bytes. OSError: unreadable."""
    if path.endswith(".parquet"):  # cut anywhere: a segment has the row groups that begin in it
        return list(range(0, size, step)) or [0]
    starts = [0]
    with suppress(Damaged, WrongKind), open(path, "rb") as file:  # reported when the documents are read
        border = None if packing(path) else format_of(path, mode).border
        while border and (start := compressed.border_after(file, starts[-1] + step, border)) < size:
            starts.append(start)
    return starts


def raw_documents(segment: Segment, mode: str, keys: Keys) -> Iterator[Document | Skipped]:
    """Each document of a segment."""
    with closing(Input(segment)) as data:
        try:
            yield from format_of(segment.path, mode).documents(data, keys)
        except OSError as error:
            reason = f"unreadable ({error.strerror})" if error.errno else f"damaged or truncated ({error})"
            yield data.bad(data.position, reason)
        except WrongKind as error:
            yield data.bad(0, *error.args)
        except (Damaged, *compressed.ARCHIVE_ERRORS) as error:
            yield data.bad(data.position, f"damaged or truncated ({error})")
