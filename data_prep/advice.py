"""The table of a stream, and warnings about books cut into paragraphs and documents too long for a part."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alma.stream import Stream
from alma.tables import as_text
from data_prep.cut import Wanted
from data_prep.documents import Reader
from data_prep.formats import kind
from data_prep.periods import abridged

_FILES = 3  # fewer files are not taken for a collection of books
_PARAGRAPH = 100  # words: documents that average fewer may be paragraphs
_BOOK = 5000  # words: files that average more may be books
_OFF = 0.01  # relative deviation of a part from its target size that is reported


def books(files: Sequence[tuple[str, str]], reader: Reader, totals: Mapping[str, Sequence[int]]) -> list[str]:
    """A warning for each source whose .txt files look like books but are cut at blank lines.

    `files`: (source, path) of each; `totals`: documents and words of each source. A source with an explicit
    `--documents SOURCE=...` gets no warning.
    """
    warnings = []
    for source, (documents, words) in totals.items():
        paths = [path for name, path in files if name == source]
        plain = reader.documents == "blank-line" and source not in reader.documents_of
        text = plain and len(paths) >= _FILES and all(kind(path) == "text" for path in paths)
        if text and words < _PARAGRAPH * documents and words > _BOOK * len(paths):
            warnings.append(
                f"warning: {source}: cut at blank lines, {len(paths):,} files gave {documents:,} documents "
                f"of {words / documents:.0f} words on average; if each file is one document, such as a book, "
                f"use --documents {source}=file"
            )
    return warnings


def long_documents(longest: int, wanted: Wanted) -> Iterator[str]:
    """A warning if a document of `longest` words, with all its pieces, is longer than a part."""
    sizes = {"a mega-batch": wanted.words, "test": wanted.eval_words, "valid": wanted.valid_words}
    name, size = min(((name, size) for name, size in sizes.items() if size), key=lambda item: item[1])
    if longest > size:
        yield (
            f"warning: the longest document has {longest:,} words, {name} is to have {size:,}: all pieces of "
            "a document go to one part, and those that exceed it are left out; ask for more words"
        )


def summary(stream: Stream) -> str:
    """The stream as a table, one row per part, and what was read, dropped and skipped."""
    targets = target_words(stream)
    sources = sorted({name for part in stream.parts for name in part.sources})
    dated = any(part.period for part in stream.parts)
    header = ["", *["period"] * dated, "words", "off target", "documents", "items", "tokens", "MB"]
    rows = [[*header, *sources]]
    off = []
    for part in stream.parts:
        deviation = part.words / targets[part.name] - 1 if part.name in targets else None
        if deviation is not None and abs(deviation) > _OFF:
            off.append(f"{part.name} {deviation:+.1%}")
        rows.append(
            [part.name, *[part.period] * dated, f"{part.words:,}"]
            + ["-" if deviation is None else f"{deviation:+.3%}"]
            + [f"{number:,}" for number in (part.documents, part.items, part.tokens)]
            + [f"{part.bytes / 1e6:.1f}"]
            + [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        )
    corpus = stream.appended[-1]["corpus"] if stream.appended else stream.corpus
    near = near_dropped([corpus])
    lines = [
        as_text(rows),
        f"read {corpus['words']:,} words in {corpus['documents']:,} documents; dropped "
        f"{corpus['duplicate_documents']:,} duplicates ({corpus['duplicate_words']:,} words)"
        f"{near and f', of which {near}'}; left out {corpus['surplus_words']:,} surplus words"
        + (f"; spread of the mega-batches {corpus['spread']:.3%}" if "spread" in corpus else ""),
    ]
    dates = corpus.get("dates", {"left_out": {}, "empty": []})
    if counts := [f"{count:,} {why}" for why, count in dates["left_out"].items()]:
        lines.append(f"left out by date, documents: {', '.join(counts)}")
    if dates["empty"]:
        lines.append(f"periods without documents: {abridged(dates['empty'])}")
    if "skipped" in corpus:
        lines.append(corpus["skipped"]["summary"])
    lines += corpus.get("warnings", [])
    if off:
        split = stream.settings["max_document_words"]
        remedy = "" if split else "--max-document-words N splits them between lines, "
        where = "lines" if split else "documents"
        lines.append(
            f"off target: {', '.join(off)}: parts end between {where}; {remedy}more words bring parts nearer"
        )
    return "\n".join(lines)


def near_dropped(corpora: Sequence[Mapping[str, Any]]) -> str:
    """How many near duplicates were dropped; empty if they are kept."""
    counted = [corpus for corpus in corpora if "near_duplicate_documents" in corpus]
    documents = sum(corpus["near_duplicate_documents"] for corpus in counted)
    words = sum(corpus["near_duplicate_words"] for corpus in counted)
    return f"{documents:,} near duplicates ({words:,} words)" if counted else ""


def target_words(stream: Stream) -> dict[str, int]:
    """Target size in words of each part that has one: mega-batches may be taken whole."""
    wanted = stream.settings
    sizes = [wanted["words"]] * len(stream.megabatches)
    for addition in stream.appended:
        sizes[addition["first"] :] = [addition["words"]] * (len(sizes) - addition["first"])
    names = [part.name for part in stream.megabatches]
    targets = {name: size for name, size in zip(names, sizes, strict=True) if size}
    targets |= dict.fromkeys(["valid", *(part.name for part in stream.held_out_valid)], wanted["valid_words"])
    return targets | dict.fromkeys(["test", *(part.name for part in stream.held_out)], wanted["eval_words"])
