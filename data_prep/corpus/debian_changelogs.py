"""Entries of the changelogs of installed Debian packages, dated.

The format is that of deb-changelog(5): a heading `package (version) distributions; urgency=...`, changes
indented by two spaces, and a last line ` -- Name <address>  date` with the date of RFC 2822.
"""

import hashlib
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from pathlib import Path

from alma.errors import UserError
from data_prep.blocks import ARCHIVE_ERRORS, Damaged, WrongKind, open_file
from data_prep.fields import DatedText

FOLDER = "/usr/share/doc"
_HEADING = re.compile(rb"(\w[\w.+-]*) \(([^() \t]+)\)(?:\s+[\w.+-]+)*\s*;")  # none: before 1997
_LAST = re.compile(rb" --.*> *([^<>]*\S)\s*")
_PERSON = re.compile(r"^[ \t]*\[ .* \][ \t]*\n?", re.MULTILINE)  # whose changes follow
_ADDRESS = re.compile(r" ?<[^<>\s]+@[^<>\s]+>|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


def documents(source: str, left_out: Counter[str]) -> Generator[DatedText, None, None]:
    """Each entry of the changelogs below a folder once: package, version and changes, without addresses.

    The files are FOLDER/changelog* and FOLDER/*/changelog*. Binary packages of one source have the same
    entries. Memory: 16 bytes an entry, and an entry. UserError: no such files.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise UserError(f"{source}: no such folder")
    found = (*folder.glob("changelog*"), *folder.glob("*/changelog*"))
    files = sorted(str(path) for path in found if path.is_file())
    if not files:
        raise UserError(
            f"{source}: no changelog; Docker images of Debian leave them out, and other systems have none"
        )
    seen: set[bytes] = set()
    for path in files:
        yield from _read(path, seen, left_out)


def _read(path: str, seen: set[bytes], left_out: Counter[str]) -> Iterator[DatedText]:
    """The entries of a file up to where it is damaged; none if its first line is no heading."""
    try:
        with closing(open_file(path)) as file:
            lines = itertools.dropwhile(lambda line: line.isspace() or line.startswith(b"#"), file)
            first = next(lines, b"")
            if _HEADING.match(first):
                yield from entries(itertools.chain([first], lines), seen, left_out)
            else:
                left_out["files of other formats"] += 1
    except (OSError, WrongKind, Damaged, *ARCHIVE_ERRORS):
        left_out["damaged files"] += 1


def entries(lines: Iterable[bytes], seen: set[bytes], left_out: Counter[str]) -> Iterator[DatedText]:
    """The entries of a changelog that are not among `seen`, hashes of entries, which gains them.

    Left out: entries without a heading or a date, not UTF-8, or without changes.
    """
    title = b""
    changes: list[bytes] = []
    for line in lines:
        if heading := _HEADING.match(line):
            left_out["broken entries"] += bool(title)  # it had no last line
            title, changes = b" ".join(heading.groups()), []
        elif line.startswith(b" -- "):
            key = hashlib.blake2b(b"".join((title, *changes, line)), digest_size=16).digest()
            if key in seen:
                left_out["repeated entries"] += 1
            elif entry := _entry(title, b"".join(changes), line, left_out):
                yield entry
            seen.add(key)
            title, changes = b"", []
        elif not line.startswith(b"#"):
            changes.append(line)
    left_out["broken entries"] += bool(title)


def _entry(title: bytes, changes: bytes, line: bytes, left_out: Counter[str]) -> DatedText | None:
    """An entry; None, and counted: it is broken or empty."""
    last = _LAST.fullmatch(line)
    try:
        if not (title and last):
            raise ValueError("no heading, or no date")
        date = parsedate_to_datetime(last[1].decode("ascii")).isoformat()
        text = textwrap.dedent(_PERSON.sub("", changes.decode()))
    except ValueError:  # UnicodeDecodeError is one
        left_out["broken entries"] += 1
        return None
    text = _ADDRESS.sub("", text).strip()
    if not text:
        left_out["entries without changes"] += 1
        return None
    return DatedText(f"{title.decode()}\n{text}", date, None)
