"""The settings of a stream, from the options of `alma data`; all problems of a command line at once."""

import argparse
import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alma.dates import Dates, interval, number_of
from alma.errors import UserError, hint, require_package
from alma.stream import Stream
from data_prep.cut import Wanted
from data_prep.dictionary import DICTIONARY
from data_prep.documents import Reader, find_files
from data_prep.formats import stem
from data_prep.gpt2 import GPT2
from data_prep.hugging_face import HuggingFace, HuggingFacePair
from data_prep.near_duplicates import library
from data_prep.order import Ordered, from_corpus
from data_prep.periods import Dated
from data_prep.pipeline import StreamSettings
from data_prep.tokenizer import SentencePiece

_DATED = ("--date-key", "--date-format", "--from", "--until", "--undated", "--merge-small")
_TOKENIZERS = ("--vocab-size", "--tokenizer", "--bpe")
_GPT2_FILES = ("--gpt2-encoder-json", "--gpt2-vocab-bpe")
_FIXED = ("--valid-words", "--eval-words", "--valid-source", "--seed", *_TOKENIZERS, *_GPT2_FILES)
"""Flags that --append refuses: the stream determines them."""


def _refused(arguments: argparse.Namespace, stream: Stream | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Flags that do not go with the others, or with the stream of --append, and why."""
    if stream and not stream.files:
        raise UserError(f"{stream.directory}: images go on by alma images --write, not alma data")
    by = stream.settings.get("dates", {}).get("by") if stream else arguments.by
    ordered = stream.ordered if stream else arguments.ordered
    if stream:
        yield _FIXED, f"not with --append, which keeps the settings of {stream.directory}"
        if by:
            yield ("--by", "--from", "--merge-small", "--ordered"), f"not with --append to a stream by {by}"
        else:
            yield ("--by", *_DATED), f"{stream.directory} was made without --by; leave them out"
        if not ordered:
            yield ("--ordered",), f"{stream.directory} was made without it; leave it out"
    elif by:
        yield ("--ordered",), "not with --by; give one of them"
    else:
        yield _DATED, "only with --by"
    if by or ordered:
        batches = "periods" if by else "sources"
        yield (
            ("--mega-batches", "--valid-source"),
            f"not of an ordered stream: its mega-batches are {batches}",
        )


def settings_of(arguments: argparse.Namespace, stream: Stream | None = None) -> StreamSettings:
    """The settings of a new stream, or of an addition to `stream`, whose seed, tokenizer and normalisation
    it gets. UserError: all missing or contradictory flags, and all bad files."""
    problems = []
    for flags, why in _refused(arguments, stream):
        if given := _given(arguments, *flags):
            problems.append(f"{', '.join(given)}: {why}")
    dates, order = None, None
    with noted(problems):
        dates = _dates(arguments, stream)
    if (stream.ordered if stream else arguments.ordered) and not dates:
        with noted(problems):
            order = _order(arguments)
    with noted(problems):
        files = named_files(arguments.corpus)
    with noted(problems):
        reader = _reader(arguments, dates)
    if arguments.valid_source:
        with noted(problems):
            _require_source(arguments, f"--valid-source {arguments.valid_source}", arguments.valid_source)
    near = arguments.near_duplicates or "keep"
    if stream:
        was = stream.settings.get("near_duplicates", "keep")
        if arguments.near_duplicates not in (None, was):
            problems.append(f"--near-duplicates: the stream was made with {was}; leave it out")
        near = was
        before = stream.settings["max_document_words"]
        if arguments.max_document_words not in (0, before):
            flag = "--max-document-words"
            problems.append(f"{flag}: the stream was made with {before or 'no'} {flag}; leave it out")
    else:
        needed = ["--mega-batches", "--words", "--valid-words"]
        if arguments.by or arguments.ordered:
            needed = ["--valid-words"] if arguments.words else ["--eval-words", "--valid-words"]
        if lacking := [flag for flag in needed if not _given(arguments, flag)]:
            problems.append(f"give {', '.join(lacking)}")
        if not _given(arguments, *_TOKENIZERS):
            problems.append(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    with noted(problems):
        write = _write(arguments, stream)
    with noted(problems):
        tokenizer = _tokenizer(arguments)
    with noted(problems):
        if near == "drop":
            library()
    refuse(problems)
    wanted: Wanted
    if stream:
        tokenizer = {name: str(stream.directory / name) for name in stream.files if name != DICTIONARY}
        reader = dataclasses.replace(reader, max_document_words=stream.settings["max_document_words"])
        first, words = len(stream.megabatches), arguments.words or stream.settings["words"]
        sizes = words, stream.settings["eval_words"], stream.settings["valid_words"]
    else:
        first, words = 0, arguments.words or 0
        sizes = words, arguments.eval_words or arguments.words, arguments.valid_words
    if dates:
        small = stream.settings["merge_small"] if stream else arguments.merge_small
        wanted = Dated(0, *sizes, None, first, merge_small=small)
    elif order:
        wanted = Ordered(len(order), *sizes, None, first, order)
    elif stream:
        wanted = Wanted(arguments.mega_batches or 1, words, 0, 0, None, first)
    else:
        wanted = Wanted(arguments.mega_batches, *sizes, arguments.valid_source or files[-1][0])
    return StreamSettings(
        files=files,
        wanted=wanted,
        seed=stream.seed if stream else arguments.seed or 0,
        reader=reader,
        vocab_size=None if stream else arguments.vocab_size,
        tokenizer=tokenizer,
        near_duplicates=near == "drop",
        write=write,
        write_dropped=arguments.write_dropped or bool(stream and stream.settings.get("write_dropped")),
    )


def _given(arguments: argparse.Namespace, *flags: str) -> list[str]:
    """Those of the flags that were given."""
    values = {flag: _value(arguments, flag) for flag in flags}
    return [flag for flag, value in values.items() if value is not None and value is not False]


def _value(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag[2:].replace("-", "_"))


def named_path(argument: str) -> tuple[str, str]:
    """(source, path) of a CORPUS argument; it is a path if it exists, such as year=2021/part-0.parquet."""
    name, equals, path = argument.partition("=")
    if not equals or "/" in name or any(glob.iglob(argument)):
        path = argument
        fixed = Path(path)
        if glob.has_magic(path) and not fixed.exists():  # then the last directory before the pattern
            fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), fixed.parts))
        name = stem(Path(os.path.abspath(fixed)).name)
    if not name or not path:
        raise UserError(f"{argument!r}: expected PATH or NAME=PATH")
    return name, path


@contextlib.contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Collect a UserError of the block in `problems`."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def refuse(problems: list[str]) -> None:
    """UserError: all problems, each once, if there are any."""
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))


def named_files(corpus: list[str]) -> list[tuple[str, str]]:
    """(source, path) of the files of the CORPUS arguments, each file once.

    UserError: all arguments without files, and all files of two sources.
    """
    files: dict[str, tuple[str, str]] = {}
    problems: list[str] = []
    for argument in corpus:
        with noted(problems):
            name, path = named_path(argument)
            for file in find_files(path):
                source, _ = files.setdefault(os.path.realpath(file), (name, file))
                if source != name:
                    raise UserError(f"{file}: is in both {source} and {name}; name it in one CORPUS argument")
    refuse(problems)
    return list(files.values())


def _reader(arguments: argparse.Namespace, dates: Dates | None) -> Reader:
    """The reader for the flags. UserError: --documents for an unknown source."""
    modes = dict(sorted(arguments.documents))
    default = modes.pop("", Reader.documents)
    for name in modes:
        _require_source(arguments, f"--documents {name}=", name)
    fields = {name: getattr(arguments, name) for name in ("max_document_words", "text_key", "on_bad_input")}
    return Reader(default, documents_of=modes, dates=dates, **fields)


def _require_source(arguments: argparse.Namespace, flag: str, name: str) -> None:
    names = sorted({name for name, _ in map(named_path, arguments.corpus)})
    if name not in names:
        raise UserError(f"{flag}: no such source; {hint(name, names)}")


def _order(arguments: argparse.Namespace) -> list[list[str]]:
    """The sources of each mega-batch of an ordered stream; `NAME+=PATH` in the CORPUS becomes `NAME=PATH`."""
    joins = [re.match("[^/=]+(?=[+]=.)", argument) for argument in arguments.corpus]
    arguments.corpus = [
        argument if not match else match[0] + argument[match.end() + 1 :]
        for argument, match in zip(arguments.corpus, joins, strict=True)
    ]
    names = [name for name, _ in map(named_path, arguments.corpus)]
    return from_corpus(list(zip(names, map(bool, joins), strict=True)))


def _dates(arguments: argparse.Namespace, stream: Stream | None) -> Dates | None:
    """How documents get their periods, in an addition those after the last one; None: it is not dated."""
    record = stream.settings.get("dates") if stream else None
    by = record["by"] if record else arguments.by
    if not by or (stream and not record):
        return None
    bounds, problems = {}, []
    for flag, name in (("--from", "start"), ("--until", "until")):
        if (text := _value(arguments, flag)) is not None:
            found = None
            with contextlib.suppress(ValueError, OverflowError):
                found = interval(text)
            bounds[name] = found
            if not found:
                problems.append(f"{flag} {text!r}: no date; write it as 2023, 2023-05 or 2023-05-17")
    start, until = bounds.get("start"), bounds.get("until")
    if start and until and start[0] > until[1]:
        problems.append(f"--from {_value(arguments, '--from')} is after --until {arguments.until}")
    refuse(problems)
    after = None
    if stream and (last := interval(stream.megabatches[-1].period.split("..")[-1])):
        after = number_of(by, last[1])
    return Dates(
        by,
        arguments.date_key or (record["key"] if record else Dates.key),
        arguments.date_format or (record.get("format", "") if record else ""),
        start=_value(arguments, "--from") or "",
        until=arguments.until or "",
        undated=arguments.undated or Dates.undated,
        after=after,
    )


def _write(arguments: argparse.Namespace, stream: Stream | None) -> str:
    """What is written beside fairseq's files: a key of `write.SUFFIXES`. UserError: it cannot be."""
    made = stream.settings.get("write", "fairseq") if stream else arguments.write or "fairseq"
    if arguments.write not in (None, made):
        raise UserError(f"--write: the stream was made with {made}; leave it out")
    if made == "megatron" and arguments.tokenizer and Path(arguments.tokenizer).is_dir():
        raise UserError("--write megatron: not with --tokenizer FOLDER; write jsonl in its place")
    if made == "parquet":
        require_package("pyarrow", "--write parquet")
    return str(made)


def _tokenizer(arguments: argparse.Namespace) -> dict[str, str]:
    """`StreamSettings.tokenizer`. UserError: a missing file, or an incomplete set of flags."""
    if arguments.tokenizer and (folder := Path(arguments.tokenizer)).is_dir():
        if _given(arguments, *_GPT2_FILES):
            raise UserError(f"{', '.join(_GPT2_FILES)}: only with --bpe gpt2; leave them out")
        for kind in (HuggingFace, HuggingFacePair):
            if all((folder / name).is_file() for name in kind.files):
                return {name: str(folder / name) for name in kind.files}
        raise UserError(
            f"--tokenizer {folder}: no tokenizer.json, nor vocab.json and merges.txt, of a byte-level BPE; "
            "save them there"
        )
    given = {flag: _value(arguments, flag) for flag in _given(arguments, "--tokenizer", *_GPT2_FILES)}
    problems = [f"{flag} {path}: no such file" for flag, path in given.items() if not Path(path).is_file()]
    if any((flag in given) != bool(arguments.bpe) for flag in _GPT2_FILES):
        problems.append(f"--bpe gpt2, {' FILE and '.join(_GPT2_FILES)} FILE go together: all three or none")
    refuse(problems)
    names = GPT2.files if arguments.bpe else SentencePiece.files
    return dict(zip(names, given.values(), strict=bool(given)))  # {} if none is given
