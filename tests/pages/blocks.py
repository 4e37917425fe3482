"""The blocks of commands on the pages: README.md, CONTRIBUTING.md, docs/ and examples/."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")
SHELLS = {"bash", "sh", "shell", "console"}
_FENCE = re.compile(
    r"^(<!-- run -->\n)?(?P<indent>[ \t]*)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its first line there (from 1), its kind and its text."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> dict[str, str]:
    """The texts of all pages, by their paths in the repository."""
    files = [file for pattern in PATTERNS for file in sorted(ROOT.glob(pattern))]
    return {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files}


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The commands of a page, and the Python that is marked by `<!-- run -->`."""
    for match in _FENCE.finditer(text):
        is_marked_python = match["kind"] == "python" and match[1]
        if match["kind"] in SHELLS or is_marked_python:
            line = text.count("\n", 0, match.start("text"))
            yield Block(page, line, match["kind"], match["text"])


BLOCKS = [block for page, text in pages().items() for block in blocks_of(page, text)]


def commands_of(text: str) -> list[list[str]]:
    """The words of each command of a block, without comments and variables before it.

    The command that `month.sh RUN MODELS` starts is a command of its own.
    """
    commands = []
    for line in re.split(r"\n|&&|\|\|", text.replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words[:2] == ["sh", "month.sh"]:
            commands.append(words[:4])
            words = words[4:]
        if words:
            commands.append(words)
    return commands
