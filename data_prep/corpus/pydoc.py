"""English text from installed documentation, without dates.

Three parts: help topics of `pydoc`, docstrings of the standard library, docstrings of installed
packages. A document is a topic or a module, a line is a paragraph. Modules are parsed, never
imported. The same installation always gives the same bytes.
"""

import ast
import contextlib
import importlib.util
import inspect
import itertools
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from alma.errors import UserError, hint
from alma.workers import Workers
from data_prep.compressed import Document

PARTS = ("topics", "stdlib", "packages")
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
        english = len(words) >= 4 and alphabetic >= 0.7 * len(words) and paragraph.isprintable()
        if english and not _CODE.search(block):
            paragraphs.append(paragraph)
    return paragraphs


def docstrings(path: Path) -> list[str]:
    """The paragraphs of all docstrings of a module in source order; none if it cannot be parsed."""
    paragraphs: list[str] = []

    def visit(node: ast.AST) -> None:  # much faster than ast.walk, which visits every expression
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraphs.extend(prose(ast.get_docstring(node, clean=False) or ""))
        for statement in getattr(node, "body", ()):
            visit(statement)

    with warnings.catch_warnings(action="ignore"), contextlib.suppress(SyntaxError, ValueError):
        visit(ast.parse(path.read_bytes()))
    return paragraphs


def modules(folder: Path) -> Iterator[Path]:
    """The modules below a folder that may have prose, in a fixed order."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED.match(name))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(("test", "conftest")):
                yield Path(parent, name)


def documents(source: str, left_out: Counter[str]) -> Generator[Document, None, None]:
    """Yield the documents of a part, one of PARTS, or of all (""), without dates.

    Paragraphs that an earlier document has are removed; documents with fewer than LEAST_WORDS words
    are left out. UserError: no such part.
    """
    if source and source not in PARTS:
        raise UserError(f"pydoc {source}: {hint(source, PARTS)}")
    seen: set[str] = set()
    parts = (source,) if source else PARTS
    for document in itertools.chain.from_iterable(map(_part, parts)):
        fresh = [paragraph for paragraph in dict.fromkeys(document) if paragraph not in seen]
        seen.update(fresh)
        if sum(paragraph.count(" ") + 1 for paragraph in fresh) >= LEAST_WORDS:
            yield Document("\n".join(fresh))
        else:
            left_out["modules and topics with little text"] += 1


def _part(name: str) -> Iterator[list[str]]:
    """The paragraphs of each document of a part."""
    if name == "topics":
        yield from (prose(topics[topic]) for topic in sorted(topics))
        return
    folders = [sysconfig.get_path("stdlib")]
    if name == "packages":  # a virtual environment may see packages of its base environment too
        specs = filter(None, map(importlib.util.find_spec, PACKAGES))
        folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
    paths = itertools.chain.from_iterable(modules(Path(folder)) for folder in folders)
    with Workers(len(os.sched_getaffinity(0))) as workers:
        for _, result in workers.run(docstrings, [(path,) for path in paths], in_order=True):
            yield result()
