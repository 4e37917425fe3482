"""Raw documents out of files: plain text, JSON lines, WikiExtractor's, Common Crawl's WET and Parquet.

What cannot be read is yielded as `Skipped`.
"""

import importlib.util
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from alma.errors import UserError
from data_prep import blocks
from data_prep.blocks import BOM, PACKED, Border, Damaged, Input, Segment, Skipped, indent, open_file

DOCUMENTS = ("blank-line", "file", "line", "wikiextractor")
"""What a document of a .txt or .md file may be."""

_SUFFIXES = (".txt", ".md", ".jsonl", ".warc.wet", ".wet")
KNOWN = f"{' '.join(_SUFFIXES)} and wiki_NN (also with {' '.join(PACKED)}), .parquet"
"""The file names that can be read, for messages."""

_LINE = Border((b"\n",), re.compile(rb"\n"))
_BLANK_LINE = Border((b"\n\n", b"\n\r\n"), re.compile(rb"\n[ \t\r\v\f]*\n"))
_DOC_END = Border((b"</doc>\n",), re.compile(rb"</doc>[ \t\r]{0,8}\n"))
_BORDERS = {
    "line": _LINE,
    "blank-line": _BLANK_LINE,
    "wikiextractor": _DOC_END,
    "json": _LINE,
    "wiki-json": _LINE,
}

_HINT = "choose one of its fields by --text-key: "
_SHOWN = 30  # fields, and characters of a field's name

_DOC_START = re.compile(rb"<doc id=(?<![^\n]<doc id=)[^\n]*>[ \t\r]*$", re.MULTILINE)


def stem(name: str) -> str:
    """A file's name without what says its format."""
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    for suffix in (*_SUFFIXES, ".parquet"):
        name = name.removesuffix(suffix)
    return name


def require_known(path: str) -> None:
    """UserError: nothing here reads files of this name, or the package that does is not installed."""
    found = kind(path)
    if not found:
        raise UserError(f"{path}: unknown kind of file; known are {KNOWN}")
    if found == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: needs pyarrow; pip install 'alma-macroscale[corpus]'")


def border_of(path: str, documents: str) -> Border | None:
    """Where the file may be cut; None: nowhere. OSError: it cannot be read."""
    try:
        return None if path.endswith(PACKED) else _BORDERS.get(_format(path, documents))
    except Damaged:
        return None


def raw_documents(segment: Segment, documents: str, text_key: str) -> Iterator[str | Skipped]:
    """The text of each document, not normalised, or what is wrong with it."""
    with closing(Input(segment)) as data:
        try:
            form = _format(segment.path, documents)
            if form == "parquet":
                yield from _parquet(segment, text_key, data)
            elif form == "wet":
                yield from _wet(data)
            elif form == "file":
                yield from _whole(data)
            elif form in ("json", "wiki-json"):
                yield from _json(data, text_key) if form == "json" else _json(data, "text", hint="")
            elif form == "wikiextractor":
                yield from _doc_elements(data)
            elif form != "empty":
                yield from _plain(data, _BORDERS[form])
        except OSError as error:
            reason = f"unreadable ({error.strerror})" if error.errno else f"damaged or truncated ({error})"
            yield data.bad(data.position, reason)
        except (Damaged, EOFError, zlib.error, zstandard.ZstdError) as error:
            yield data.bad(data.position, f"damaged or truncated ({error})")


def kind(path: str) -> str:
    """text, json, wiki, wet or parquet by the file's name; empty if it is none of them."""
    name = Path(path).name
    if name.endswith(".parquet"):
        return "parquet"
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    if re.fullmatch(r"wiki_\d+", name):
        return "wiki"
    return {".txt": "text", ".md": "text", ".jsonl": "json", ".wet": "wet"}.get(Path(name).suffix, "")


def _format(path: str, documents: str) -> str:
    """How the file's documents are found; WikiExtractor's two formats differ in the first byte."""
    found = kind(path)
    if found == "text":
        return documents
    if found == "wiki":
        with closing(open_file(path)) as file:
            first = file.read(1)
        if first not in (b"", b"<", b"{"):
            raise Damaged("WikiExtractor's files begin with <doc or {")
        return {b"": "empty", b"<": "wikiextractor", b"{": "wiki-json"}[first]
    return found


def _whole(data: Input) -> Iterator[str | Skipped]:
    raw = data.read(blocks.MAX_DOCUMENT_BYTES + 1)
    if len(raw) > blocks.MAX_DOCUMENT_BYTES:
        yield data.too_long(0)
        return
    data.read(1)  # raises what is wrong behind the text, if anything is
    start = len(BOM) if raw.startswith(BOM) else 0
    yield data.decode(raw[start:], start)


class _Piece(NamedTuple):
    """Bytes between borders; maybe none."""

    offset: int
    text: bytes
    closed: bool
    """Whether a border follows."""


def _pieces(data: Input, border: Border) -> Iterator[_Piece | Skipped]:
    for run in data.runs(border):
        if isinstance(run, Skipped):
            yield run
            continue
        start, text = run
        at = 0
        for match in border.pattern.finditer(text):
            yield _Piece(start + at, text[at : match.start()], True)
            at = match.end()
        yield _Piece(start + at, text[at:], False)


def _plain(data: Input, border: Border) -> Iterator[str | Skipped]:
    for piece in _pieces(data, border):
        yield piece if isinstance(piece, Skipped) else data.decode(piece.text, piece.offset)


def _json(data: Input, key: str, hint: str = _HINT) -> Iterator[str | Skipped]:
    for piece in _pieces(data, _LINE):
        if isinstance(piece, Skipped):
            yield piece
            continue
        line = piece.text.strip()
        if not line:
            continue
        offset = piece.offset + indent(piece.text)
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield data.bad(offset, f"malformed JSON ({error})")
            continue
        fields = record if isinstance(record, dict) else {}
        text = fields.get(key)
        if isinstance(text, str):
            yield text
        else:
            strings = [name for name, value in fields.items() if isinstance(value, str)]
            yield data.bad(offset, _no_text(key, strings or fields, hint))


def _no_text(key: str, fields: Iterable[str], hint: str = _HINT) -> str:
    """`fields`: the others, of which one may hold the text."""
    names = [f"`{name[:_SHOWN]}`" for name in fields]
    more = ", ..." if len(names) > _SHOWN else ""
    shown = f" ({hint}{', '.join(names[:_SHOWN])}{more})" if names and hint else ""
    return f"no field `{key}` that holds a string{shown}"


def _doc_elements(data: Input) -> Iterator[str | Skipped]:
    """The text between the lines <doc id=...> and </doc>."""
    for piece in _pieces(data, _DOC_END):
        if isinstance(piece, Skipped):
            yield piece
            continue
        offset, text, closed = piece
        if not closed:  # the file's last line may lack its end
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


def _wet(data: Input) -> Iterator[str | Skipped]:
    """The payloads of `conversion` records.

    No WARC package: fastwarc 2.0 and warcio 1.8 take truncated archives for whole ones, which must not pass.
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
            if name.lower() in (b"warc-type", b"content-length"):
                headers[name.lower()] = value.strip()
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            raise Damaged("a WARC record without Content-Length")
        text = headers.get(b"warc-type") == b"conversion"
        end = data.position + int(length)
        if text and int(length) <= blocks.MAX_DOCUMENT_BYTES:
            offset = data.position
            payload = data.read(int(length))
            if data.position == end:
                yield data.decode(payload, offset)
        elif text:
            yield data.too_long(start)
        while data.position < end:
            if not data.read(min(blocks.BLOCK, end - data.position)):
                raise Damaged("the last record is incomplete")


def _parquet(segment: Segment, key: str, data: Input) -> Iterator[str | Skipped]:
    """The strings of column `key`, of the row groups that begin in the segment."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(segment.path, buffer_size=blocks.BLOCK, pre_buffer=False) as file:
            data.position = 0
            if key not in file.schema_arrow.names or not _is_string(file.schema_arrow.field(key).type):
                strings = [field.name for field in file.schema_arrow if _is_string(field.type)]
                yield data.bad(0, _no_text(key, strings))
                return
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if not segment.start <= _first_byte(group) < segment.end:
                    data.position += group.num_rows
                    continue
                column = next(
                    c for i in range(group.num_columns) if (c := group.column(i)).path_in_schema == key
                )
                rows = blocks.BLOCK * group.num_rows // max(column.total_uncompressed_size, 1)
                for batch in file.iter_batches(
                    min(max(rows, 1), 4096), row_groups=[number], columns=[key], use_threads=False
                ):
                    for value in batch.column(0):
                        yield _parquet_text(value, key, data)
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


def _parquet_text(value: Any, key: str, data: Input) -> str | Skipped:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    if text is None:
        return data.bad(data.position, _no_text(key, ()))
    if 4 * len(text) > blocks.MAX_DOCUMENT_BYTES and len(text.encode()) > blocks.MAX_DOCUMENT_BYTES:
        return data.too_long(data.position)
    return text
