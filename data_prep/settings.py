"""The settings of a stream, from the options of `alma data`; all problems of a command line at once."""

import argparse
import contextlib
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alma.dates import Dates, interval, number_of
from alma.errors import UserError, hint, require_package
from alma.stream import Stream
from data_prep.byte_level import GPT2, HuggingFace, HuggingFacePair
from data_prep.cut import Wanted
from data_prep.dictionary import DICTIONARY
from data_prep.documents import Reader, find_files
from data_prep.formats import stem
from data_prep.near_duplicates import library
from data_prep.order import Dated, Ordered, from_corpus
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
        why = f"not of an ordered stream: its mega-batches are {'periods' if by else 'sources'}"
        yield ("--mega-batches", "--valid-source"), why


def settings_of(arguments: argparse.Namespace, stream: Stream | None = None) -> StreamSettings:
    """The settings of a new stream, or of an addition to `stream`, whose seed, tokenizer and normalisation
    it gets. UserError: all missing or contradictory flags, and all bad files."""
    problems = []
    for flags, why in _refused(arguments, stream):
        if given := _given(arguments, *flags):
            problems.append(f"{', '.join(given)}: {why}")
    if stream:
        problems += _as_before(arguments, stream)
    dates = noted(problems, _dates, arguments, stream)
    order = noted(problems, _order, arguments) if arguments.ordered and not arguments.by else None
    files = noted(problems, named_files, arguments.corpus)
    reader = noted(problems, _reader, arguments, dates)
    if valid := arguments.valid_source:
        noted(problems, _require_source, arguments, f"--valid-source {valid}", valid)
    if not stream:
        needed = ["--mega-batches", "--words", "--valid-words"]
        if arguments.by or arguments.ordered:
            needed = ["--valid-words"] if arguments.words else ["--eval-words", "--valid-words"]
        if lacking := [flag for flag in needed if not _given(arguments, flag)]:
            problems.append(f"give {', '.join(lacking)}")
        if not _given(arguments, *_TOKENIZERS):
            problems.append(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    if arguments.write == "parquet":
        noted(problems, require_package, "pyarrow", "--write parquet")
    tokenizer = noted(problems, _tokenizer, arguments)
    if arguments.near_duplicates == "drop":
        noted(problems, library)
    refuse(problems)
    if stream:
        tokenizer = {name: str(stream.directory / name) for name in stream.files if name != DICTIONARY}
    wanted: Wanted
    first, words = len(stream.megabatches) if stream else 0, arguments.words or 0
    sizes = words, arguments.eval_words or words, arguments.valid_words
    if dates:
        wanted = Dated(0, *sizes, None, first, merge_small=arguments.merge_small)
    elif order:
        wanted = Ordered(len(order), *sizes, None, first, order)
    elif stream:
        wanted = Wanted(arguments.mega_batches or 1, words, 0, 0, None, first)
    else:
        wanted = Wanted(arguments.mega_batches, *sizes, valid or files[-1][0])
    return StreamSettings(
        files=files,
        wanted=wanted,
        seed=arguments.seed or 0,
        reader=reader,
        vocab_size=arguments.vocab_size,
        tokenizer=tokenizer,
        near_duplicates=arguments.near_duplicates == "drop",
        write=arguments.write or "fairseq",
        write_dropped=arguments.write_dropped,
    )


def _as_before(arguments: argparse.Namespace, stream: Stream) -> list[str]:
    """Give an addition the flags of the stream that it grows; the problems of those that differ."""
    made, dates, problems = stream.settings, stream.settings.get("dates", {}), []
    for flag, default in (("near_duplicates", "keep"), ("max_document_words", 0), ("write", "fairseq")):
        before, name = made.get(flag, default), f"--{flag.replace('_', '-')}"
        if getattr(arguments, flag) not in (None, 0, before):
            problems.append(f"{name}: the stream was made with {before or f'no {name}'}; leave it out")
        setattr(arguments, flag, before)
    arguments.write_dropped = arguments.write_dropped or made.get("write_dropped", False)
    arguments.ordered, arguments.by, arguments.seed = stream.ordered, dates.get("by"), stream.seed
    arguments.merge_small = made.get("merge_small", False)
    arguments.date_key = arguments.date_key or dates.get("key")
    arguments.date_format = arguments.date_format or dates.get("format")
    arguments.words = arguments.words or made["words"]
    arguments.eval_words, arguments.valid_words = made["eval_words"], made["valid_words"]
    return problems


def _given(arguments: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Those of the flags that were given, with their values."""
    values = {flag: vars(arguments)[flag[2:].replace("-", "_")] for flag in flags}
    return {flag: value for flag, value in values.items() if value is not None and value is not False}


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


def noted(problems: list[str], function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; a UserError is collected in `problems`."""
    try:
        return function(*arguments)
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

    def add(argument: str) -> None:
        name, path = named_path(argument)
        for file in find_files(path):
            source, _ = files.setdefault(os.path.realpath(file), (name, file))
            if source != name:
                raise UserError(f"{file}: is in both {source} and {name}; name it in one CORPUS argument")

    for argument in corpus:
        noted(problems, add, argument)
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
    found = [re.subn("^([^/=]+)[+](?==.)", r"\1", argument) for argument in arguments.corpus]
    arguments.corpus = [argument for argument, _ in found]
    return from_corpus([(named_path(argument)[0], bool(joins)) for argument, joins in found])


def _dates(arguments: argparse.Namespace, stream: Stream | None) -> Dates | None:
    """How documents get their periods, in an addition those after the last one; None: it is not dated."""
    if not arguments.by:
        return None
    bounds: dict[str, Any] = {}
    problems = []
    for flag, text in _given(arguments, "--from", "--until").items():
        with contextlib.suppress(ValueError, OverflowError):
            bounds[flag] = interval(text)
        if not bounds.get(flag):
            problems.append(f"{flag} {text!r}: no date; write it as 2023, 2023-05 or 2023-05-17")
    start, until = vars(arguments)["from"], arguments.until
    if len(bounds) == 2 and not problems and bounds["--from"][0] > bounds["--until"][1]:
        problems.append(f"--from {start} is after --until {until}")
    refuse(problems)
    after = None
    if stream and (last := interval(stream.megabatches[-1].period.split("..")[-1])):
        after = number_of(arguments.by, last[1])
    return Dates(
        arguments.by,
        arguments.date_key or Dates.key,
        arguments.date_format or "",
        start=start or "",
        until=until or "",
        undated=arguments.undated or Dates.undated,
        after=after,
    )


def _tokenizer(arguments: argparse.Namespace) -> dict[str, str]:
    """`StreamSettings.tokenizer`. UserError: a missing file, or an incomplete set of flags."""
    if arguments.tokenizer and (folder := Path(arguments.tokenizer)).is_dir():
        if _given(arguments, *_GPT2_FILES):
            raise UserError(f"{', '.join(_GPT2_FILES)}: only with --bpe gpt2; leave them out")
        for kind in (HuggingFace, HuggingFacePair):
            if all((folder / name).is_file() for name in kind.files):
                return {name: str(folder / name) for name in kind.files}
        raise UserError(f"--tokenizer {folder}: no tokenizer.json, nor vocab.json and merges.txt; save them")
    given = _given(arguments, "--tokenizer", *_GPT2_FILES)
    problems = [f"{flag} {path}: no such file" for flag, path in given.items() if not Path(path).is_file()]
    if any((flag in given) != bool(arguments.bpe) for flag in _GPT2_FILES):
        problems.append(f"--bpe gpt2, {' FILE and '.join(_GPT2_FILES)} FILE go together: all three or none")
    refuse(problems)
    names = GPT2.files if arguments.bpe else SentencePiece.files
    return dict(zip(names, given.values(), strict=bool(given)))  # {} if none is given
