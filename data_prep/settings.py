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

from alma.errors import UserError, hint
from alma.stream import Stream
from data_prep.cut import Wanted
from data_prep.dates import Dates, interval, number_of
from data_prep.dictionary import DICTIONARY
from data_prep.documents import Reader, find_files
from data_prep.formats import stem
from data_prep.gpt2 import GPT2
from data_prep.near_duplicates import library
from data_prep.order import Ordered, from_corpus, from_file
from data_prep.periods import Dated
from data_prep.pipeline import StreamSettings
from data_prep.tokenizer import SentencePiece

_NEEDED = ("--mega-batches", "--words", "--valid-words")
_NOT_ORDERED = ("--mega-batches", "--valid-source")
"""Flags that an ordered stream refuses: its sources or periods determine them."""
_DATED = ("--date-key", "--from", "--until", "--undated", "--merge-small")
"""Flags that need --by, or --append to a stream made with it."""
_TOKENIZERS = ("--vocab-size", "--tokenizer", "--bpe")
_GPT2_FILES = ("--gpt2-encoder-json", "--gpt2-vocab-bpe")
_FIXED = ("--valid-words", "--eval-words", "--valid-source", "--seed", *_TOKENIZERS, *_GPT2_FILES)
"""Flags that --append refuses: the stream determines them."""
_OF_THE_STREAM = ("max_document_words", "unescape_html", "strip_control")
"""Fields of the reader that an addition shares with the stream."""


def named_path(argument: str) -> tuple[str, str]:
    """(source, path) of a CORPUS argument."""
    name, equals, path = argument.partition("=")
    if not equals or "/" in name:
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


def reader_of(arguments: argparse.Namespace, dates: Dates | None) -> Reader:
    """The reader for the flags. UserError: --documents for an unknown source."""
    modes = dict(sorted(arguments.documents))
    default = modes.pop("", Reader.documents)
    for name in modes:
        _require_source(arguments, f"--documents {name}=", name)
    names = ("text_key", "on_bad_input", *_OF_THE_STREAM)
    given = {name: getattr(arguments, name) for name in names}
    return Reader(default, documents_of=modes, dates=dates, **given)


def _require_source(arguments: argparse.Namespace, flag: str, name: str) -> None:
    names = sorted({name for name, _ in map(named_path, arguments.corpus)})
    if name not in names:
        raise UserError(f"{flag}: no such source; {hint(name, names)}")


def order_of(arguments: argparse.Namespace, problems: list[str]) -> list[list[str]]:
    """The sources of each mega-batch of an ordered stream; `NAME+=PATH` in the CORPUS becomes `NAME=PATH`."""
    joins = [re.match("[^/=]+(?=[+]=.)", argument) for argument in arguments.corpus]
    arguments.corpus = [
        argument if not match else match[0] + argument[match.end() + 1 :]
        for argument, match in zip(arguments.corpus, joins, strict=True)
    ]
    _refuse_sizes(arguments, "sources", problems)
    with noted(problems):
        names = [name for name, _ in map(named_path, arguments.corpus)]
        if arguments.order:
            return from_file(arguments.order, list(dict.fromkeys(names)))
        return from_corpus(list(zip(names, map(bool, joins), strict=True)))
    return []


def _refuse_sizes(arguments: argparse.Namespace, what: str, problems: list[str]) -> None:
    """Note the flags that `what` determine."""
    if refused := [flag for flag in _NOT_ORDERED if _given(arguments, flag) is not None]:
        problems.append(f"{', '.join(refused)}: not of an ordered stream, whose mega-batches are the {what}")


def dates_of(arguments: argparse.Namespace, problems: list[str]) -> Dates | None:
    """How a new stream gets its periods; None: it is not dated."""
    if not arguments.by:
        if given := [flag for flag in _DATED if _given(arguments, flag)]:
            problems.append(f"{', '.join(given)}: only with --by")
        return None
    if arguments.ordered or arguments.order:
        problems.append("--by: not with --ordered or --order; give one of the three")
    _refuse_sizes(arguments, "periods", problems)
    start, until = _bounds(arguments, problems)
    key = arguments.date_key or Dates.key
    return Dates(arguments.by, key, start, until, arguments.undated or Dates.undated)


def _bounds(arguments: argparse.Namespace, problems: list[str]) -> tuple[str, str]:
    """--from and --until, empty if not given."""
    given = {flag: text for flag in ("--from", "--until") if (text := _given(arguments, flag)) is not None}
    ends = {}
    for flag, text in given.items():
        try:
            ends[flag] = interval(text)
        except (ValueError, OverflowError):
            ends[flag] = None
        if not ends[flag]:
            problems.append(f"{flag} {text!r}: no date; write it as 2023, 2023-05 or 2023-05-17")
    start, until = ends.get("--from"), ends.get("--until")
    if start and until and start[0] > until[1]:
        problems.append(f"--from {given['--from']} is after --until {given['--until']}")
    return given.get("--from", ""), given.get("--until", "")


def dates_to_append(arguments: argparse.Namespace, stream: Stream, problems: list[str]) -> Dates | None:
    """How an addition gets its periods, those after the last one of the stream; None: it is not dated."""
    record = stream.settings.get("dates")
    if not record:
        if given := [flag for flag in ("--by", *_DATED) if _given(arguments, flag)]:
            problems.append(f"{', '.join(given)}: {stream.directory} was made without --by; leave them out")
        return None
    fixed = ("--by", "--from", "--merge-small", "--ordered", "--order")
    if refused := [flag for flag in fixed if _given(arguments, flag)]:
        problems.append(f"{', '.join(refused)}: not with --append to a stream by {record['by']}")
    _refuse_sizes(arguments, "periods", problems)
    _, until = _bounds(arguments, problems)
    last = interval(stream.megabatches[-1].period.split("..")[-1])
    if not last:
        raise UserError(f"{stream.directory}: its last mega-batch has no period; make the stream anew")
    return Dates(
        record["by"],
        arguments.date_key or record["key"],
        until=until,
        undated=arguments.undated or Dates.undated,
        after=number_of(record["by"], last[1]),
    )


def settings_of(arguments: argparse.Namespace) -> StreamSettings:
    """The settings of a new stream. UserError: all missing or contradictory flags, and all bad files."""
    problems: list[str] = []
    order: list[list[str]] = []
    needed: tuple[str, ...] = _NEEDED
    dates = dates_of(arguments, problems)
    if arguments.ordered or arguments.order:
        order = order_of(arguments, problems)
    if arguments.ordered or arguments.order or dates:
        needed = ("--valid-words",) if arguments.words else ("--eval-words", "--valid-words")
    with noted(problems):
        files = named_files(arguments.corpus)
    with noted(problems):
        reader = reader_of(arguments, dates)
    if arguments.valid_source:
        with noted(problems):
            _require_source(arguments, f"--valid-source {arguments.valid_source}", arguments.valid_source)
    if lacking := [flag for flag in needed if _given(arguments, flag) is None]:
        problems.append(f"give {', '.join(lacking)}")
    if not any(_given(arguments, flag) for flag in _TOKENIZERS):
        problems.append(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    with noted(problems):
        tokenizer = given_tokenizer(arguments)
    with noted(problems):
        near = _drops_near(arguments.near_duplicates)
    refuse(problems)
    sizes = arguments.words or 0, arguments.eval_words or arguments.words, arguments.valid_words
    wanted: Wanted
    if dates:
        wanted = Dated(0, *sizes, None, merge_small=arguments.merge_small)
    elif order:
        wanted = Ordered(len(order), *sizes, None, order=order)
    else:
        wanted = Wanted(arguments.mega_batches, *sizes, arguments.valid_source or files[-1][0])
    return StreamSettings(
        files=files,
        wanted=wanted,
        seed=arguments.seed or 0,
        reader=reader,
        vocab_size=arguments.vocab_size,
        tokenizer=tokenizer,
        check_disk=not arguments.no_disk_check,
        near_duplicates=near,
    )


def settings_to_append(arguments: argparse.Namespace, stream: Stream) -> StreamSettings:
    """The settings of an addition: seed, tokenizer and normalisation are those of the stream.

    UserError: all flags that would change them, and all bad files.
    """
    problems: list[str] = []
    dates = dates_to_append(arguments, stream, problems)
    order = order_of(arguments, problems) if stream.ordered and not dates else []
    if (arguments.ordered or arguments.order) and not stream.ordered:
        problems.append(f"--ordered, --order: {stream.directory} was made without them; leave them out")
    with noted(problems):
        files = named_files(arguments.corpus)
    if refused := [flag for flag in _FIXED if _given(arguments, flag) is not None]:
        problems.append(
            f"{', '.join(refused)}: not with --append, which keeps the settings of {stream.directory}"
        )
    kept = _kept(arguments, stream, problems)
    with noted(problems):
        reader = reader_of(arguments, dates)
    near = stream.settings.get("near_duplicates", "keep")
    if arguments.near_duplicates not in (None, near):
        problems.append(f"--near-duplicates: the stream was made with {near}; leave it out")
    with noted(problems):
        _drops_near(near)
    refuse(problems)
    words = arguments.words or stream.settings["words"]
    sizes = words, stream.settings["eval_words"], stream.settings["valid_words"]
    first = len(stream.megabatches)
    wanted: Wanted
    if dates:
        wanted = Dated(0, *sizes, None, first, merge_small=stream.settings["merge_small"])
    elif order:
        wanted = Ordered(len(order), *sizes, None, first, order)
    else:
        wanted = Wanted(arguments.mega_batches or 1, words, 0, 0, None, first)
    return StreamSettings(
        files=files,
        wanted=wanted,
        seed=stream.seed,
        reader=dataclasses.replace(reader, **kept),
        vocab_size=None,
        tokenizer={name: str(stream.directory / name) for name in stream.files if name != DICTIONARY},
        check_disk=not arguments.no_disk_check,
        near_duplicates=near == "drop",
    )


def _kept(arguments: argparse.Namespace, stream: Stream, problems: list[str]) -> dict[str, Any]:
    """The fields of the reader that an addition shares with the stream; notes flags that differ."""
    kept = {}
    for name in _OF_THE_STREAM:
        kept[name] = was = stream.settings.get(name, getattr(Reader, name))
        if (now := getattr(arguments, name)) and now != was:
            flag = name.replace("_", "-")
            problems.append(f"--{flag}: the stream was made with {was or 'no'} --{flag}; leave it out")
    return kept


def _drops_near(mode: str | None) -> bool:
    """Whether --near-duplicates `mode` drops documents. UserError: its library is missing."""
    return mode == "drop" and bool(library())


def _given(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag[2:].replace("-", "_"))


def given_tokenizer(arguments: argparse.Namespace) -> dict[str, str]:
    """`StreamSettings.tokenizer`. UserError: a missing file, or an incomplete set of flags."""
    given = {flag: path for flag in ("--tokenizer", *_GPT2_FILES) if (path := _given(arguments, flag))}
    problems = [f"{flag} {path}: no such file" for flag, path in given.items() if not Path(path).is_file()]
    if any((flag in given) != bool(arguments.bpe) for flag in _GPT2_FILES):
        problems.append(f"--bpe gpt2, {' FILE and '.join(_GPT2_FILES)} FILE go together: all three or none")
    refuse(problems)
    names = GPT2.files if arguments.bpe else SentencePiece.files
    return dict(zip(names, given.values(), strict=bool(given)))  # {} if none is given
