"""English text from installed documentation, without dates.

Three parts: help topics of `pydoc`, docstrings of the standard library, docstrings of installed packages.
A document is a topic or a module, a line is a paragraph. Modules are parsed, never imported. The same
installation always gives the same bytes.
"""

import ast
import importlib.util
import inspect
import itertools
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from alma.errors import UserError, hint
from alma.workers import Workers
from data_prep.fields import DatedText

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


def documents(source: str, left_out: Counter[str]) -> Generator[DatedText, None, None]:
    """The documents of a part, one of PARTS, or of all (""), without dates and without repeated paragraphs.

    Those that have fewer than LEAST_WORDS words left are none. UserError: no such part.
    """
    if source and source not in PARTS:
        raise UserError(f"pydoc {source}: {hint(source, PARTS)}")
    seen: set[str] = set()
    for document in itertools.chain.from_iterable(map(_part, (source,) if source else PARTS)):
        fresh = [paragraph for paragraph in dict.fromkeys(document) if paragraph not in seen]
        seen.update(fresh)
        if sum(paragraph.count(" ") + 1 for paragraph in fresh) >= LEAST_WORDS:
            yield DatedText("\n".join(fresh), None, None)
        else:
            left_out["modules and topics with little text"] += 1


def _folders(package: str) -> Sequence[str]:
    """Where a package is installed, if it is: an environment may see the packages of another."""
    found = importlib.util.find_spec(package)
    return found.submodule_search_locations or () if found else ()


def _part(name: str) -> Iterator[list[str]]:
    """The paragraphs of each document of a part."""
    if name == "topics":
        yield from (prose(topics[each]) for each in sorted(topics))
        return
    folder = Path(sysconfig.get_path("stdlib"))
    paths = modules(folder)
    if name == "packages":
        folders = (folder for package in PACKAGES for folder in _folders(package))
        paths = itertools.chain.from_iterable(modules(Path(folder)) for folder in folders)
    with Workers(len(os.sched_getaffinity(0))) as workers:
        for _, result in workers.run(docstrings, [(path,) for path in paths], in_order=True):
            yield result()
