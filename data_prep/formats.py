"""Formats of corpus files: a function that yields the documents of a segment, and an entry in FORMATS."""

import functools
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from alma.errors import UserError
from data_prep import blocks
from data_prep.blocks import (
    ARCHIVE_ERRORS,
    PACKED,
    Border,
    Damaged,
    Input,
    Segment,
    Skipped,
    WrongKind,
    border_after,
    indent,
    open_file,
    packing,
)
from data_prep.fields import HINT, Keys, Raw, dated, field, no_text, strings

_LINE = Border((b"\n",), re.compile(rb"\n"))
_BLANK_LINE = Border((b"\n\n", b"\n\r\n"), re.compile(rb"\n[ \t\r\v\f]*\n"))
_DOC_END = Border((b"</doc>\n",), re.compile(rb"</doc>[ \t\r]{0,8}\n"))
_DOC_START = re.compile(rb"<doc id=(?<![^\n]<doc id=)[^\n]*>[ \t\r]*$", re.MULTILINE)

_JSON_LINES = "a JSON object on each line"


class Format(NamedTuple):
    """A kind of corpus file."""

    documents: Callable[[Input, Keys], Iterator[Raw]]
    """Yields each document; arguments: the bytes of a segment, the fields."""
    border: Border | None = None
    """Where a file that is not compressed may be cut into segments; None: nowhere."""


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
    with closing(open_file(path)) as file:
        first = file.read(64).removeprefix(blocks.BOM).lstrip()[:1]
    if found == ".json":
        if first == b"[":
            raise WrongKind("a JSON array", f"write {_JSON_LINES}, such as by `jq -c '.[]'`")
        return FORMATS[found]
    if first not in (b"", b"<", b"{"):
        raise Damaged("WikiExtractor's files begin with <doc or {")
    return _WIKI_JSON if first == b"{" else MODES["wikiextractor"]


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


def stem(name: str) -> str:
    """The name of a file without the suffixes of its format."""
    for suffix in (*PACKED, *_TEXT, *FORMATS):
        name = name.removesuffix(suffix)
    return name


def require_known(path: str) -> None:
    """UserError: the format of the file is unknown, or needs a package that is not installed."""
    found = kind(path)
    if not found:
        raise UserError(f"{path}: unknown kind of file; known are {KNOWN}")
    if found == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: needs pyarrow; pip install 'alma-macroscale[corpus]'")


def segment_starts(path: str, mode: str, size: int, step: int) -> list[int]:
    """Where segments of about `step` bytes begin in a file of `size` bytes. OSError: unreadable."""
    if path.endswith(".parquet"):  # cut anywhere: a segment has the row groups that begin in it
        return list(range(0, size, step)) or [0]
    starts = [0]
    try:
        border = None if packing(path) else format_of(path, mode).border
    except (Damaged, WrongKind):  # reported when the documents are read
        return starts
    if border:
        with open(path, "rb") as file:
            while (start := border_after(file, starts[-1] + step, border)) < size:
                starts.append(start)
    return starts


def raw_documents(segment: Segment, mode: str, keys: Keys) -> Iterator[Raw]:
    """Each document of a segment."""
    with closing(Input(segment)) as data:
        try:
            yield from format_of(segment.path, mode).documents(data, keys)
        except OSError as error:
            reason = f"unreadable ({error.strerror})" if error.errno else f"damaged or truncated ({error})"
            yield data.bad(data.position, reason)
        except WrongKind as error:
            yield data.bad(0, *error.args)
        except (Damaged, *ARCHIVE_ERRORS) as error:
            yield data.bad(data.position, f"damaged or truncated ({error})")


class _Span(NamedTuple):
    """Bytes between borders, maybe none; `closed`: a border follows."""

    offset: int
    text: bytes
    closed: bool


def _spans(data: Input, border: Border) -> Iterator[_Span | Skipped]:
    for run in data.runs(border):
        if isinstance(run, Skipped):
            yield run
            continue
        start, text = run
        at = 0
        for match in border.pattern.finditer(text):
            yield _Span(start + at, text[at : match.start()], True)
            at = match.end()
        yield _Span(start + at, text[at:], False)


def _between(border: Border, data: Input, _keys: Keys) -> Iterator[str | Skipped]:
    """What is between borders."""
    for span in _spans(data, border):
        if not isinstance(span, Skipped):
            yield data.decode(span.text, span.offset)
        elif border is _BLANK_LINE:
            name = data.segment.source
            remedy = f"no blank line ends it; if each line is a document, give --documents {name}=line"
            yield span._replace(remedy=remedy)
        else:
            yield span


def _whole(data: Input, _keys: Keys) -> Iterator[str | Skipped]:
    """The file."""
    raw = data.read(blocks.MAX_DOCUMENT_BYTES + 1)
    if len(raw) > blocks.MAX_DOCUMENT_BYTES:
        yield data.too_long(0)
        return
    data.read(1)  # raises an error that waits at the end
    start = len(blocks.BOM) if raw.startswith(blocks.BOM) else 0
    yield data.decode(raw[start:], start)


def _doc_elements(data: Input, _keys: Keys) -> Iterator[str | Skipped]:
    """What is between the lines <doc id=...> and </doc>."""
    for span in _spans(data, _DOC_END):
        if isinstance(span, Skipped):
            yield span
            continue
        offset, text, closed = span
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


def _json(data: Input, keys: Keys, hint: str = HINT) -> Iterator[Raw]:
    """The fields of the object on each line; empty lines are none. Other fields need not be strict JSON."""
    for span in _spans(data, _LINE):
        if isinstance(span, Skipped):
            yield span
            continue
        line = span.text.strip()
        if not line:
            continue
        offset = span.offset + indent(span.text)
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            record = _lenient(line, keys.text)
            if record is None:
                remedy = (f"write {_JSON_LINES}, or leave it out with --on-bad-input skip",)
                plain = kind(data.segment.path) == ".json"
                yield data.bad(offset, f"malformed JSON ({error})", *remedy[:plain])
                continue
        text = field(record, keys.text)
        if not isinstance(text, str):
            yield data.bad(offset, no_text(keys.text, strings(record), hint))
        else:
            yield dated(text, field(record, keys.date), offset, keys)


def _lenient(line: bytes, key: str) -> Any:
    """A record that orjson refuses for NaN, or for half a surrogate pair outside its text. None: no JSON."""
    try:
        record = json.loads(line.decode())
        str(field(record, key)).encode()
    except (ValueError, RecursionError):
        return None
    return record


def _wet(data: Input, keys: Keys) -> Iterator[Raw]:
    """The payload and WARC-Date of each `conversion` record.

    fastwarc 2.0 and warcio 1.8 take truncated archives for whole ones, so neither is used.
    """
    while line := data.readline():
        start = data.position - len(line)
        if line.isspace():
            continue
        if not line.startswith(b"WARC/"):
            raise Damaged("no WARC record")
        headers: dict[bytes, bytes] = {}
        while (line := data.readline()) and not line.isspace():
            name, _, value = line.partition(b":")
            if name.lower() in (b"warc-type", b"content-length", b"warc-date"):
                headers[name.lower()] = value.strip()
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            raise Damaged("a WARC record without Content-Length")
        is_text = headers.get(b"warc-type") == b"conversion"
        end = data.position + int(length)
        if is_text and int(length) <= blocks.MAX_DOCUMENT_BYTES:
            offset = data.position
            payload = data.read(int(length))
            if data.position == end:
                text = data.decode(payload, offset)
                date = headers.get(b"warc-date", b"").decode("ascii", "replace")
                yield dated(text, date, start, keys)
        elif is_text:
            yield data.too_long(start)
        while data.position < end:
            if not data.read(min(blocks.BLOCK, end - data.position)):
                raise Damaged("the last record is incomplete")


def _parquet(data: Input, keys: Keys) -> Iterator[Raw]:
    """The rows of the row groups that begin in the segment; offsets count rows."""
    import pyarrow
    import pyarrow.parquet

    path, start, end = data.segment.path, data.segment.start, data.segment.end
    key = keys.text
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=blocks.BLOCK, pre_buffer=False) as file:
            data.position = 0
            if key not in file.schema_arrow.names or not _is_string(file.schema_arrow.field(key).type):
                named = [column.name for column in file.schema_arrow if _is_string(column.type)]
                yield data.bad(0, no_text(key, named))
                return
            names = [name for name in dict.fromkeys([key, keys.date]) if name in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if not start <= _first_byte(group) < end:
                    data.position += group.num_rows
                    continue
                columns = map(group.column, range(group.num_columns))
                size = next(c.total_uncompressed_size for c in columns if c.path_in_schema == key)
                rows = min(max(blocks.BLOCK * group.num_rows // max(size, 1), 1), 4096)  # about a block
                for batch in file.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                    found = batch.column(keys.date) if keys.date in names else ()
                    dates = itertools.chain(_parquet_dates(found), itertools.repeat(None))
                    for value, date in zip(batch.column(key), dates, strict=False):
                        yield dated(_parquet_text(value, key, data), date, data.position, keys)
                        data.position += 1
    except pyarrow.ArrowException as error:
        raise Damaged(str(error)) from error


def _is_string(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _first_byte(group: Any) -> int:
    column = group.column(0)
    return min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)


def _parquet_dates(column: Any) -> Iterator[Any]:
    """The dates of a column; what Python cannot hold is NaN, which is no date."""
    import pyarrow
    import pyarrow.types as types

    if column and types.is_timestamp(column.type):  # a nanosecond has no place in a datetime
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    for value in column:
        try:
            yield value.as_py()
        except (ValueError, OverflowError):
            yield math.nan


def _parquet_text(value: Any, key: str, data: Input) -> str | Skipped:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    if text is None:
        return data.bad(data.position, no_text(key, ()))
    # A character has at most 4 bytes: only long strings need to be encoded to be measured.
    if 4 * len(text) > blocks.MAX_DOCUMENT_BYTES and len(text.encode()) > blocks.MAX_DOCUMENT_BYTES:
        return data.too_long(data.position)
    return text


FORMATS = {
    ".jsonl": Format(_json, _LINE),
    ".json": Format(_json, _LINE),
    ".warc.wet": Format(_wet),
    ".wet": Format(_wet),
    ".parquet": Format(_parquet),
}
"""Formats by suffix: the last suffix decides, longer ones are removed from the name of a source."""

_TEXT = (".txt", ".md")
MODES = {
    "blank-line": Format(functools.partial(_between, _BLANK_LINE), _BLANK_LINE),
    "file": Format(_whole),
    "line": Format(functools.partial(_between, _LINE), _LINE),
    "wikiextractor": Format(_doc_elements, _DOC_END),
}
"""Formats of .txt and .md files, by --documents."""

_WIKI_JSON = Format(
    lambda data, keys: _json(data, keys._replace(text="text"), hint=""), _LINE
)  # its field is always `text`

KNOWN = f"{' '.join([*_TEXT, *FORMATS])} and wiki_NN (all but .parquet also with {' '.join(PACKED)})"
"""The file names that can be read, for messages."""
