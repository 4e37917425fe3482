"""Dated records, split into periods: a file of JSON lines for each, beside the matrix."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
from tqdm import tqdm

from alma.dates import Dates, LeftOut, label
from alma.errors import UserError
from alma.files import fsync_directory, read_file, write_json_atomic
from alma.schema import COUNT, NATURAL, TEXT, parse_json
from alma.stream import INSIDE
from alma.trainer import TextPart
from data_prep.compressed import Document, Segment, Skipped
from data_prep.dated import MOST, check_usable
from data_prep.documents import Reader, find_files
from data_prep.formats import kind
from data_prep.records import field as field_of
from data_prep.records import no_text

_PERIODS = "periods.json"
_BUFFER_BYTES = 1 << 20  # of a period, before it is written
_WITHOUT_DATES = ("text", "wiki")
_CRAWLED = (".wet", ".warc.wet")  # their records are texts


@dataclass(frozen=True)
class DataSource:
    """The files with dated records, and how they are read."""

    files: tuple[str, ...]
    dates: Dates
    text_key: str  # the field with the text; empty: the records need none
    skip_bad_input: bool = False
    has_program: bool = False  # whether the user's program measures, by --command

    @classmethod
    def of(cls, places: Sequence[str], **settings: Any) -> "DataSource":
        """The files at `places`: files, folders or patterns. UserError: none, or without dates."""
        by_real_path: dict[str, str] = {}
        for place in places:
            for file in find_files(place):
                by_real_path.setdefault(os.path.realpath(file), file)
        for file in by_real_path.values():
            if kind(file) in _WITHOUT_DATES:
                problem = "its documents have no dates"
                remedy = "give .jsonl, .csv or .parquet with a field of dates"
                raise UserError(f"{file}: {problem}: {remedy}")
        return cls(tuple(by_real_path.values()), **settings)

    @property
    def key(self) -> str:
        """Differs when a file or a setting does. UserError: a file is gone."""
        states = []
        for file in self.files:
            state = os.stat(file)
            states.append([os.path.realpath(file), state.st_size, state.st_mtime_ns])
        settings = asdict(self) | {"files": states}
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


class PeriodData(msgspec.Struct, frozen=True):
    """The records of one period."""

    name: TEXT  # such as 2024-05
    file: INSIDE  # in the folder of the split
    documents: COUNT
    words: NATURAL  # of the texts; 0: the records need none
    bytes: NATURAL
    sha256: TEXT


class SplitData(msgspec.Struct):
    """The periods of the data, in order, and what belongs to none."""

    periods: list[PeriodData]
    left_out: dict[TEXT, NATURAL]  # number of records by reason
    folder: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the periods, in order."""
        return [period.name for period in self.periods]

    @property
    def announcement(self) -> str:
        """The periods and their records, in a line."""
        documents = sum(period.documents for period in self.periods)
        text = f"{len(self.periods)} periods, {self.periods[0].name} to {self.periods[-1].name}"
        text += f": {documents:,} records"
        if self.left_out:
            reasons = [f"{number:,} {reason}" for reason, number in self.left_out.items()]
            text += f"; left out: {', '.join(reasons)}"
        return text

    def remove_earlier(self) -> None:
        """Remove the files of earlier data, once no model waits for them."""
        place = Path(self.folder)
        for earlier in place.parent.glob("data-*"):
            if earlier.name != place.name:
                shutil.rmtree(earlier)

    def part(self, period: PeriodData) -> TextPart:
        """A period as a task names it."""
        return TextPart(
            name=period.name,
            period=period.name,
            words=period.words,
            bytes=period.bytes,
            tokens=0,
            files=(str(Path(self.folder, period.file).resolve()),),
            documents=period.documents,
        )


def split(source: DataSource, folder: Path) -> SplitData:
    """The periods of the data; their files are in a folder in `folder`, which later calls find.

    UserError: bad records, no usable date, fewer than two periods or too many.
    """
    key = source.key
    place = folder / f"data-{key}"
    if not (place / _PERIODS).exists():
        temporary = folder / f".data-{key}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        temporary.mkdir()
        try:
            _write_split(source, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if source.key != key:
            shutil.rmtree(temporary)
            raise UserError("the data changed while it was read: rerun when it is complete")
        os.rename(temporary, place)
        fsync_directory(folder)
    try:
        split_data = msgspec.convert(parse_json(read_file(place / _PERIODS)), SplitData)
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: damaged ({error}): delete it and rerun") from None
    split_data.folder = str(place.resolve())
    return split_data


@dataclass
class _Period:
    """The records of a period, counted and written to its file."""

    file: Path | None  # None: they are counted alone
    lines: list[bytes] = field(default_factory=list)
    buffered: int = 0
    documents: int = 0
    words: int = 0
    text_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, line: bytes, text: str) -> None:
        """Add a record, a line of JSON, with its text."""
        if self.file is not None:
            self.lines.append(line)
            self.buffered += len(line)
        self.documents += 1
        self.words += len(text.split())
        self.text_bytes += len(text.encode())
        if self.buffered > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append the buffered records; no file stays open, as there may be many periods."""
        if self.file is None:
            return
        content = b"".join(self.lines)
        self.digest.update(content)
        with self.file.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.lines.clear()
        self.buffered = 0


class _LeftOutRecords:
    """Counts what belongs to no period, with the first of each kind."""

    def __init__(self) -> None:
        self.number: Counter[LeftOut] = Counter()
        self.first: dict[LeftOut, str] = {}
        self.bad = 0
        self.empty = 0

    def leave(self, why: LeftOut, path: str, document: Document) -> None:
        """Count a record without a usable date."""
        self.number[why] += 1
        date = "no date" if document.date is None else repr(document.date)[:60]
        self.first.setdefault(why, str(Skipped(path, document.offset, date)))

    def skip(self, skipped: Skipped) -> None:
        """Count bad input."""
        self.bad += 1

    @property
    def by_reason(self) -> dict[str, int]:
        """The numbers, of reasons that occurred."""
        numbers = {str(why): number for why, number in self.number.items()}
        numbers |= {"malformed": self.bad, "without text": self.empty}
        return {why: number for why, number in numbers.items() if number}


def survey(source: DataSource) -> SplitData:
    """The periods of the data, of which nothing is written. UserError: as `split`."""
    left_out = _LeftOutRecords()
    periods = _read_periods(source, None, left_out)
    _check_periods(source, periods, left_out)
    records = []
    for number in sorted(periods):
        period = periods[number]
        name = label(source.dates.by, number)
        records.append(PeriodData(name, "", period.documents, period.words, period.text_bytes, ""))
    return SplitData(records, left_out.by_reason)


def _check_periods(
    source: DataSource, periods: Mapping[int, _Period], left_out: _LeftOutRecords
) -> None:
    """UserError: records without a usable date, or all of one period."""
    check_usable(source.dates, left_out.number, left_out.first)
    by = source.dates.by
    if len(periods) < 2:
        listed = ", ".join(f"{count:,} {why}" for why, count in left_out.by_reason.items())
        only = "no record is"
        if periods:
            only = f"all records are of {label(by, *periods)}, and none is"
        remedy = "a matrix has two periods or more: give other data, or another --by"
        raise UserError(f"{only} in another period (left out: {listed or 'none'}): {remedy}")


def _write_split(source: DataSource, place: Path) -> None:
    """Write the files of all periods, and last periods.json."""
    left_out = _LeftOutRecords()
    periods = _read_periods(source, place, left_out)
    _check_periods(source, periods, left_out)
    records = []
    for number in sorted(periods):
        period = periods[number]
        period.flush()
        sha256 = period.digest.hexdigest()
        name = label(source.dates.by, number)
        file = f"{name}-{sha256[:12]}.jsonl"
        assert period.file
        os.rename(period.file, place / file)
        records.append(
            PeriodData(name, file, period.documents, period.words, period.text_bytes, sha256)
        )
    split_data = SplitData(records, left_out.by_reason)
    write_json_atomic(place / _PERIODS, msgspec.to_builtins(split_data))


def _read_periods(
    source: DataSource, place: Path | None, left_out: _LeftOutRecords
) -> dict[int, _Period]:
    """The records of all files by the numbers of their periods, written to files in `place`.

    place: None writes nothing.
    """
    periods: dict[int, _Period] = {}
    with tqdm(desc="periods", unit=" records", unit_scale=True, disable=None) as progress:
        for file in source.files:
            for number, record in _records(source, file, left_out):
                progress.update()
                text = _text_of(record, source, file, left_out)
                if text is None:
                    continue
                if number not in periods:
                    if len(periods) == MOST:
                        problem = f"more than {MOST:,} periods"
                        raise UserError(f"--by {source.dates.by}: {problem}: choose longer ones")
                    periods[number] = _Period(place / str(number) if place else None)
                periods[number].add(orjson.dumps(record) + b"\n", text)
    return periods


def _records(
    source: DataSource, file: str, left_out: _LeftOutRecords
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a file, each with the number of its period."""
    on_bad_input = "skip" if source.skip_bad_input else "error"
    reader = Reader(text_key="", on_bad_input=on_bad_input, dates=source.dates)
    shard = (Segment("", file, 0, os.path.getsize(file)),)
    for period, content in reader.raw(shard, left_out.skip, left_out.leave):
        number = int(period.partition("/")[0])
        if kind(file) in _CRAWLED:
            yield number, {source.text_key or "text": content}
        else:
            yield number, orjson.loads(content)


def _text_of(record: Any, source: DataSource, file: str, left_out: _LeftOutRecords) -> str | None:
    """The text of a record, "" if it needs none; None: it has none, and is left out.

    UserError: the field is missing, without --on-bad-input skip.
    """
    if not source.text_key:
        return ""
    text = field_of(record, source.text_key)
    if not isinstance(text, str):
        if not source.skip_bad_input:
            remedy = "or give --on-bad-input skip"
            if source.has_program:
                remedy = "or give --metric with what your program returns, which needs no text"
            raise UserError(f"{file}: {no_text(source.text_key)}; {remedy}")
        left_out.bad += 1
        return None
    if not text.strip():
        left_out.empty += 1
        return None
    return text
