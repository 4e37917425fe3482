"""Formats of corpus files: each a class that yields documents, and an entry in FORMATS."""

import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import orjson

from data_prep import columns, compressed
from data_prep.arrow import Arrow
from data_prep.comma_separated import CommaSeparated
from data_prep.compressed import (
    Damaged,
    Document,
    Input,
    Segment,
    Skipped,
    WrongKind,
    indent,
    packing,
)
from data_prep.parquet import Parquet
from data_prep.records import Format, Keys, document_of, field
from data_prep.wet import Wet

_LINE = re.compile(rb"\n")
_NOTHING = re.compile(rb"\0(?!)")  # never matches; fast, because it looks at zero bytes only
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")
_DOC_END = re.compile(rb"</doc>[ \t\r]{0,8}\n")
_DOC_START = re.compile(rb"<doc id=(?<![^\n]<doc id=)[^\n]*>[ \t\r]*$", re.MULTILINE)
_TEXT = (".txt", ".md")


class Bordered(Format):
    """Documents are the text between borders; without a border, the whole file is a document."""

    def __init__(self, border: re.Pattern[bytes] | None = None) -> None:
        self.border = border

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        for number, span in enumerate(data.spans(self.border or _NOTHING)):
            is_whole_file = not (number or span.closed or data.segment.start)
            if span.text is None:
                yield self._too_long(data, span.offset)
            elif is_whole_file and b"\n" not in span.text and b"\r" in span.text.strip():
                remedy = "convert it by tr '\\r' '\\n', or leave it out with --on-bad-input skip"
                # Line ends of old Macs.
                yield data.bad(span.offset, "its lines end with CR alone", remedy)
            else:
                yield data.decode(span.text, span.offset)

    def _too_long(self, data: Input, offset: int) -> Skipped:
        if self.border is not _BLANK_LINE:
            return data.too_long(offset)
        flag = f"--documents {data.segment.source}=line"
        remedy = f"no blank line ends it; if each line is a document, give {flag}"
        return data.too_long(offset, remedy)


class WikiExtractor(Format):
    """Documents are the text between the lines <doc id=...> and </doc>, as WikiExtractor writes."""

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
            outside = text[: starts[0].start()] if starts else text
            if outside.strip():
                yield data.bad(offset + indent(outside), "text outside <doc> and </doc>")
            unclosed = starts[:-1] if closed else starts
            for start in unclosed:
                yield data.bad(offset + start.start(), "a <doc> without </doc>")
            if closed and starts:
                begin = starts[-1].end()
                yield data.decode(text[begin:], offset + begin)


class JsonLines(Format):
    """Each line is a JSON object whose fields hold the text and date; empty lines are ignored."""

    border = _LINE

    def __init__(self, text_key: str = "") -> None:
        """`text_key`: the only field that can hold the text; empty: that of `Keys`."""
        self._text_key = text_key

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        if self._text_key:
            keys = keys._replace(text=self._text_key)
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
            date = field(record, keys.date) if keys.date else None
            yield document_of(field(record, keys.text), date, offset, keys, data)


FORMATS = {
    ".jsonl": JsonLines(),
    ".json": JsonLines(),
    ".csv": CommaSeparated(),
    ".warc.wet": Wet(),
    ".wet": Wet(),
    ".parquet": Parquet(),
    ".arrow": Arrow(),
}
"""Formats by suffix. The last suffix of a file decides its format; a longer suffix here, such as
.warc.wet, is removed as a whole to get the name of its source."""

MODES = {
    "blank-line": Bordered(_BLANK_LINE),
    "file": Bordered(),
    "line": Bordered(_LINE),
    "wikiextractor": WikiExtractor(),
}
"""Formats of .txt and .md files, by --documents."""

_SUFFIXES = " ".join([*_TEXT, *FORMATS])
_PACKED_SUFFIXES = " ".join(compressed.PACKED)
KNOWN = f"{_SUFFIXES} and wiki_NN (all but .parquet and .arrow also with {_PACKED_SUFFIXES})"
"""The file names that can be read, for messages."""


def kind(path: str) -> str:
    """The kind of a file by its name: "text", "wiki" or a key of FORMATS; "" if unknown."""
    name = Path(path).name
    packed = packing(name)
    name = name.removesuffix(packed)
    if re.fullmatch(r"wiki_\d+", name):
        return "wiki"
    suffix = Path(name).suffix
    if suffix in _TEXT:
        return "text"
    if packed and suffix in columns.SUFFIXES:
        return ""
    return suffix if suffix in FORMATS else ""


def format_of(path: str, mode: str) -> Format:
    """The format of a file; `mode`: --documents, for .txt and .md.

    WikiExtractor writes two formats under the name wiki_NN; the first byte tells which. Raises
    Damaged if it is neither of them, WrongKind for a JSON array.
    """
    file_kind = kind(path)
    if file_kind == "text":
        return MODES[mode]
    if file_kind not in ("wiki", ".json"):
        return FORMATS[file_kind]
    with closing(compressed.open_file(path)) as file:
        first = file.read(64).removeprefix(compressed.BOM).lstrip()[:1]
    if file_kind == ".json":
        if first == b"[":
            remedy = "write a JSON object on each line, such as by `jq -c '.[]'`"
            raise WrongKind("a JSON array", remedy)
        return FORMATS[file_kind]
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
    # They may be cut anywhere: a segment has the row groups or record batches that begin in it.
    if path.endswith(columns.SUFFIXES):
        return list(range(0, size, step)) or [0]
    starts = [0]
    if packing(path):
        return starts
    # Errors are reported when the documents are read.
    with suppress(Damaged, WrongKind), open(path, "rb") as file:
        border = format_of(path, mode).border
        while border:
            start = compressed.border_after(file, starts[-1] + step, border)
            if start >= size:
                break
            starts.append(start)
    return starts


def raw_documents(segment: Segment, mode: str, keys: Keys) -> Iterator[Document | Skipped]:
    """Each document of a segment."""
    with closing(Input(segment)) as data:
        try:
            yield from format_of(segment.path, mode).documents(data, keys)
        except OSError as error:
            reason = f"damaged or truncated ({error})"
            if error.errno:
                reason = f"unreadable ({error.strerror})"
            yield data.bad(data.position, reason)
        except WrongKind as error:
            yield data.bad(0, *error.args)
        except compressed.archive_errors(Damaged) as error:
            yield data.bad(data.position, f"damaged or truncated ({error})")
