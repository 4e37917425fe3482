"""Escape untrusted text (file names, records) for terminals, Markdown and CSV."""

import html
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories to escape: control, format (text direction), surrogates, private use, line
separators."""
_JOINERS = "\u200c\u200d\u00ad"  # format characters that are kept: words and emoji need them
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def terminal(text: str) -> str:
    """One line for a terminal: control characters, which could rewrite it, become \\x1b, ..."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN or character in _JOINERS:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def lines(text: str) -> str:
    """As `terminal`, for text of several lines, with tabs."""
    return re.sub(r"[^\n\t]+", lambda line: terminal(line[0]), text)


class Output:
    """A text stream for a terminal, with escapes; a progress bar may rewrite its line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, with escapes; returns the number of its characters."""
        begin = text[:1] if text[:1] == "\r" else ""
        self._stream.write(begin + lines(text[len(begin) :]))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Write each text."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def markdown(text: str) -> str:
    """Escape text for Markdown: no part of it becomes a link, an image, code or HTML."""
    escaped = html.escape(lines(text), quote=False)
    escaped = re.sub(r"[\\`*]|\](?=[(\[:])", r"\\\g<0>", escaped)
    return re.sub(r"(?i)(\bwww)?(://|(?<=www)\.)", r"\1\\\2", escaped)  # no address becomes a link


def csv_cell(value: object) -> object:
    """Escape a cell of a CSV file: an apostrophe precedes text that would be a formula."""
    if not isinstance(value, str):
        return value
    text = lines(value)
    return f"'{text}" if value.startswith(_FORMULA) else text
