"""`python -m data_prep.pydoc_corpus`: English text from installed documentation, without a download.

Three sources: help topics of `pydoc`, docstrings of the standard library, docstrings of installed packages.
A document is a topic or a module, a line is a paragraph. Modules are parsed, never imported. The same
installation always gives the same bytes.
"""

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from alma.errors import Parser, command
from alma.files import atomic_write, make_directory
from alma.workers import Workers

PACKAGES = ("numpy", "scipy", "sklearn", "matplotlib", "torch", "networkx", "sympy", "setuptools")
LEAST_WORDS = 20

# Tests, vendored packages and internal modules: little prose, or a copy of another package's.
_SKIPPED = re.compile(r"test|conftest|_(?!core|lib)|externals|idlelib|lib2to3|site-packages")
_CODE = re.compile(r"^\s*(>>>|\.\.\. |In \[|\$ )", re.MULTILINE)
_RULER = re.compile(r"[\W_]+")


def prose(text: str) -> list[str]:
    """The paragraphs of a docstring that are English, each on one line, without code and tables."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line for line in block.splitlines() if not _RULER.fullmatch(line)]
        paragraph = " ".join(" ".join(lines).split())
        words = paragraph.split(" ")
        alphabetic = sum(word.strip("\"'`*().,:;!?-").isalpha() for word in words)
        if (
            len(words) >= 4
            and alphabetic >= 0.7 * len(words)
            and paragraph.isprintable()
            and not _CODE.search(block)
        ):
            paragraphs.append(paragraph)
    return paragraphs


def docstrings(path: Path) -> list[str]:
    """The paragraphs of all docstrings of a module in source order; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    return [paragraph for text in _docstrings(tree) for paragraph in prose(text)]


def _docstrings(node: ast.AST) -> Iterator[str]:
    # Much faster than ast.walk, which also visits every expression.
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node, clean=False) or ""
    for statement in getattr(node, "body", ()):
        yield from _docstrings(statement)


def modules(folder: Path) -> Iterator[Path]:
    """The modules below a folder that may have prose, in a fixed order."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED.match(name))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(("test", "conftest")):
                yield Path(parent, name)


def unrepeated(documents: Iterable[list[str]]) -> Iterator[tuple[str, int]]:
    """(text, words) of each document without paragraphs of earlier ones; short documents are left out."""
    seen: set[str] = set()
    for document in documents:
        fresh = [paragraph for paragraph in dict.fromkeys(document) if paragraph not in seen]
        seen.update(fresh)
        words = sum(paragraph.count(" ") + 1 for paragraph in fresh)
        if words >= LEAST_WORDS:
            yield "\n".join(fresh), words


def write_source(path: Path, documents: Iterable[list[str]], max_words: int | None) -> tuple[int, int]:
    """Write documents separated by blank lines, up to `max_words`; returns (documents, words).

    A file with the same text stays untouched: a stream made from it would not match a newer one.
    """
    texts: list[str] = []
    total = 0
    for text, words in unrepeated(documents):
        if max_words is not None and total + words > max_words:
            break
        texts.append(text + "\n")
        total += words
    content = "\n".join(texts)
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        with atomic_write(path) as file:
            file.write(content)
    return len(texts), total


def write_corpus(out: Path, max_words: int | None = None) -> dict[str, tuple[int, int]]:
    """Write topics.txt, stdlib.txt and packages.txt; returns (documents, words) of each.

    `max_words` limits each source. UserError: `out` is a file.
    """
    make_directory(out)
    installed = Path(sysconfig.get_path("purelib"))
    standard = Path(sysconfig.get_path("stdlib"))
    with Workers(len(os.sched_getaffinity(0))) as workers:

        def parsed(paths: Iterable[Path]) -> Iterator[list[str]]:
            for _, result in workers.run(docstrings, [(path,) for path in paths], in_order=True):
                yield result()

        sources: dict[str, Iterable[list[str]]] = {
            "topics": (prose(topics[name]) for name in sorted(topics)),
            "stdlib": parsed(modules(standard)),
            "packages": parsed(path for name in PACKAGES for path in modules(installed / name)),
        }
        return {name: write_source(out / f"{name}.txt", texts, max_words) for name, texts in sources.items()}


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m data_prep.pydoc_corpus",
        usage="%(prog)s DIR [--max-words N]",
        description="Write English text from the documentation of installed Python packages, for demos and "
        "tests without a download.",
        epilog="examples:\n  python -m data_prep.pydoc_corpus corpus --max-words 1000000",
    )
    made.add_argument("out", type=Path, metavar="DIR", help="for topics.txt, stdlib.txt and packages.txt")
    words = "most words of each file (default: all there are)"
    made.add_argument("--max-words", type=int, metavar="N", help=words)
    return made


@command
def main() -> None:
    """Write the corpus and print the size of each source."""
    arguments = parser().parse_args()
    print(f"{'source':10}{'documents':>10}{'words':>12}")
    for name, (documents, words) in write_corpus(arguments.out, arguments.max_words).items():
        print(f"{name:10}{documents:10,}{words:12,}")


if __name__ == "__main__":
    main()
