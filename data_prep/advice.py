"""The table of a stream, with advice on books cut into paragraphs and on splits that miss their size."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alma.stream import Stream
from alma.tables import as_text
from data_prep import blocks
from data_prep.cut import Wanted
from data_prep.documents import Reader
from data_prep.formats import kind
from data_prep.periods import abridged

_FILES = 3  # fewer files are not taken for a collection of books
_PARAGRAPH = 100  # words: documents that average fewer may be paragraphs
_BOOK = 5000  # words: files that average more may be books
_LINE = 10  # words: pieces are lines at least, so asking for shorter ones seldom helps
_OFF = 0.01  # relative deviation of a part from its target size that is reported


def books(files: Sequence[tuple[str, str]], reader: Reader, totals: Mapping[str, Sequence[int]]) -> list[str]:
    """A warning for each source whose .txt files look like books but are cut at blank lines.

    `files`: (source, path) of each; `totals`: documents and words of each source. Sources with an explicit
    `--documents SOURCE=blank-line`, or with a file too long for a document, get no warning.
    """
    found = []
    for source, (documents, words) in totals.items():
        paths = [path for name, path in files if name == source]
        if (
            reader.documents_of.get(source) is None
            and reader.documents == "blank-line"
            and len(paths) >= _FILES
            and words < _PARAGRAPH * documents
            and words > _BOOK * len(paths)
            and all(kind(path) == "text" for path in paths)
            and all(os.path.getsize(path) <= blocks.MAX_DOCUMENT_BYTES for path in paths)
        ):
            found.append(
                f"warning: {source}: cut at blank lines, {len(paths):,} files gave {documents:,} documents "
                f"of {words / documents:.0f} words on average; if each file is one document, such as a book, "
                f"use --documents {source}=file"
            )
    return found


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
    wanted = targets(stream)
    sources = sorted({name for part in stream.parts for name in part.sources})
    dated = any(part.period for part in stream.parts)
    header = ["", *["period"] * dated, "words", "off target", "documents", "items", "tokens", "MB"]
    rows = [[*header, *sources]]
    for part in stream.parts:
        numbers = [part.documents, part.items, part.tokens]
        shares = [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        rows.append(
            [part.name, *[part.period] * dated, f"{part.words:,}"]
            + [f"{part.words / wanted[part.name] - 1:+.3%}" if part.name in wanted else "-"]
            + [f"{number:,}" for number in numbers]
            + [f"{part.bytes / 1e6:.1f}", *shares]
        )
    lines = [as_text(rows)]
    corpus = stream.appended[-1]["corpus"] if stream.appended else stream.corpus
    lines.append(
        f"read {corpus['words']:,} words in {corpus['documents']:,} documents; dropped "
        f"{corpus['duplicate_documents']:,} duplicates ({corpus['duplicate_words']:,} words)"
        + (f", of which {near}" if (near := near_dropped([corpus])) else "")
        + "; left out "
        f"{corpus['surplus_words']:,} surplus words"
        + (f"; spread of the mega-batches {corpus['spread']:.3%}" if "spread" in corpus else "")
    )
    if "dates" in corpus:
        lines += by_date(corpus["dates"])
    if "skipped" in corpus:
        lines.append(corpus["skipped"]["summary"])
    lines += corpus.get("warnings", [])
    lines += off_target(stream, wanted)
    return "\n".join(lines)


def by_date(record: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the documents that a dated stream left out, and on its empty periods."""
    if counts := [f"{count:,} {why}" for why, count in record["left_out"].items()]:
        yield f"left out by date, documents: {', '.join(counts)}"
    if record["empty"]:
        yield f"periods without documents: {abridged(record['empty'])}"


def near_dropped(corpora: Sequence[Mapping[str, Any]]) -> str:
    """How many near duplicates were dropped; empty if they are kept."""
    found = [corpus for corpus in corpora if "near_duplicate_documents" in corpus]
    documents, words = (
        sum(each[f"near_duplicate_{what}"] for each in found) for what in ("documents", "words")
    )
    return f"{documents:,} near duplicates ({words:,} words)" if found else ""


def targets(stream: Stream) -> dict[str, int]:
    """Target size in words of each part that has one: mega-batches may be taken whole."""
    wanted = stream.settings
    sizes = [wanted["words"]] * len(stream.megabatches)
    for each in stream.appended:
        sizes[each["first"] :] = [each["words"]] * (len(sizes) - each["first"])
    names = [part.name for part in stream.megabatches]
    found = {name: size for name, size in zip(names, sizes, strict=True) if size}
    found |= dict.fromkeys(["valid", *(part.name for part in stream.held_out_valid)], wanted["valid_words"])
    return found | dict.fromkeys(["test", *(part.name for part in stream.held_out)], wanted["eval_words"])


def off_target(stream: Stream, wanted: Mapping[str, int]) -> Iterator[str]:
    """A line on the parts more than 1% off their target: the cause, and a remedy if there is one."""
    off = {
        part.name: f"{part.name} {part.words / wanted[part.name] - 1:+.1%}"
        for part in stream.parts
        if part.name in wanted and abs(part.words - wanted[part.name]) > _OFF * wanted[part.name]
    }
    if not off:
        return
    corpora = [stream.corpus, *(each["corpus"] for each in stream.appended)]
    longest = max(each.get("longest_document", 0) for each in corpora)
    given = stream.settings.get("max_document_words", 0)
    enough = _rounded(_OFF * min(wanted[name] for name in off))
    size = f" of up to {longest:,} words" if longest else ""
    mixed = (stream.test.name, stream.valid.name) if stream.ordered else ()
    apart = [abs(part.words - wanted[part.name]) for part in stream.parts if part.name in {*off} - {*mixed}]
    if given and longest and max(apart, default=0) > longest:
        cause = "too few words are left over to cut inside documents; add text or ask for fewer words"
    elif enough < _LINE or (given and (longest > given or given <= enough)):
        where = "lines" if given else "documents"
        cause = f"parts end between {where}{size}; only more words for each part bring them nearer"
    else:
        instead = f" instead of {given}" if given else ""
        cause = (
            f"parts end between documents{size}; --max-document-words {enough}{instead} splits them between "
            "lines (no line is split)"
        )
    yield f"off target: {', '.join(off.values())}: {cause}"


def _rounded(number: float) -> int:
    """Rounded down to one significant digit, at least 1."""
    scale = 10 ** max(0, len(str(int(number))) - 1)
    return max(1, int(number) // scale * scale)
