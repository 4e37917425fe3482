"""Text from files and folders of others, made harmless where it is shown or opened."""

import html
import re
import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Categories of Unicode: control, format (direction of text), surrogates, private, separators of lines."""
_JOINERS = "\u200c\u200d\u00ad"  # words and emoji need them
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def terminal(text: str) -> str:
    """One line for a terminal: control characters, which could rewrite it, become escapes such as \\x1b."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN or character in _JOINERS:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def lines(text: str) -> str:
    """As `terminal`, for text of several lines."""
    return "\n".join(map(terminal, text.split("\n")))


def markdown(text: str) -> str:
    """Text in Markdown, where none of it is markup: no link, no image, no code, no HTML."""
    escaped = html.escape(lines(text), quote=False)
    escaped = re.sub(r"[\\`*_~]|\](?=[(\[:])", r"\\\g<0>", escaped)
    return re.sub(r"(?i)(://|\bwww\.|^#)", _broken, escaped)


def _broken(match: re.Match[str]) -> str:
    """A part of an address, of which Markdown makes no link, or the mark of a heading."""
    return f"\\{match[0]}" if match[0][0] in ":#" else f"{match[0][:-1]}\\."


def csv_cell(value: object) -> object:
    """A cell of a CSV file: text that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    text = lines(value)
    return f"'{text}" if value.startswith(_FORMULA) else text
