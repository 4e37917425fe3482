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
from data_prep.compressed import ARCHIVE_ERRORS, Damaged, Document, WrongKind, open_file

FOLDER = "/usr/share/doc"
_HEADING = re.compile(rb"(\w[\w.+-]*) \(([^() \t]+)\)(?:\s+[\w.+-]+)*\s*;")  # none: before 1997
_LAST = re.compile(rb" --.*> *([^<>]*\S)\s*")
_PERSON = re.compile(r"^[ \t]*\[ .* \][ \t]*\n?", re.MULTILINE)  # whose changes follow
_ADDRESS = re.compile(r" ?<[^<>\s]+@[^<>\s]+>|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


def documents(source: str, left_out: Counter[str]) -> Generator[Document, None, None]:
    """Each entry of the changelogs below a folder once: package, version and changes, without addresses.

    The files are FOLDER/changelog* and FOLDER/*/changelog*. Binary packages of one source have the same
    entries. Memory: 16 bytes an entry, and an entry. UserError: no such files.
    """
    folder = Path(source)
    found = (*folder.glob("changelog*"), *folder.glob("*/changelog*"))
    files = sorted(str(path) for path in found if path.is_file())
    if not files:
        raise UserError(f"{source}: no changelog; Docker images of Debian and other systems have none")
    seen: set[bytes] = set()
    for path in files:
        try:
            with closing(open_file(path)) as file:
                lines = itertools.dropwhile(lambda line: line.isspace() or line.startswith(b"#"), file)
                first = next(lines, b"")
                if _HEADING.match(first):
                    yield from _entries(itertools.chain([first], lines), seen, left_out)
                else:
                    left_out["files of other formats"] += 1
        except (OSError, WrongKind, Damaged, *ARCHIVE_ERRORS):
            left_out["damaged files"] += 1


def _entries(lines: Iterable[bytes], seen: set[bytes], left_out: Counter[str]) -> Iterator[Document]:
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
            last = _LAST.fullmatch(line)
            try:
                if key in seen:
                    left_out["repeated entries"] += 1
                elif title and last:
                    date = parsedate_to_datetime(last[1].decode("ascii")).isoformat()
                    text = textwrap.dedent(_PERSON.sub("", b"".join(changes).decode()))
                    if text := _ADDRESS.sub("", text).strip():
                        yield Document(f"{title.decode()}\n{text}", date)
                    else:
                        left_out["entries without changes"] += 1
                else:
                    left_out["broken entries"] += 1
            except ValueError:  # UnicodeDecodeError is one
                left_out["broken entries"] += 1
            seen.add(key)
            title, changes = b"", []
        elif not line.startswith(b"#"):
            changes.append(line)
    left_out["broken entries"] += bool(title)
