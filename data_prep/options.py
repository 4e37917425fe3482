"""Make the settings of a stream from the options of `alma data`; report all problems at once."""

import argparse
import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from alma.dates import Dates, interval, number_of
from alma.errors import UserError, require_package
from alma.stream import Stream
from data_prep.cut import Splits
from data_prep.dated import Dated
from data_prep.dictionary import DICTIONARY
from data_prep.given import GPT2_FILES, end_token_of, given, noted, refuse, tokenizer_files
from data_prep.inputs import input_of, named_path, require_source
from data_prep.near_duplicates import library
from data_prep.order import Ordered, from_corpus
from data_prep.settings import StreamSettings

_DATED = ("--date-key", "--date-format", "--from", "--until", "--undated", "--merge-small")
_TOKENIZERS = ("--vocab-size", "--tokenizer", "--bpe")
_FIXED = (
    "--valid-words",
    "--eval-words",
    "--valid-source",
    "--seed",
    *_TOKENIZERS,
    *GPT2_FILES,
)
"""Flags that --append refuses, because the stream already determines their values."""


class Refusal(NamedTuple):
    """Flags that do not go with the other flags, or with the stream of --append."""

    flags: tuple[str, ...]
    why: str


def _refusals(arguments: argparse.Namespace, stream: Stream | None) -> Iterator[Refusal]:
    """Yield the flags that this command line cannot have."""
    if stream:
        yield from _refusals_of_addition(stream)
        by = stream.settings.get("dates", {}).get("by")
        ordered = stream.ordered
    else:
        by = arguments.by
        ordered = arguments.ordered
        if by:
            yield Refusal(("--ordered",), "not with --by; give one of them")
        else:
            yield Refusal(_DATED, "only with --by")
    if by or ordered:
        batches = "periods" if by else "sources"
        why = f"not of an ordered stream: its mega-batches are {batches}"
        yield Refusal(("--mega-batches", "--valid-source"), why)


def _refusals_of_addition(stream: Stream) -> Iterator[Refusal]:
    """Yield the flags that --append cannot have."""
    if not stream.files:
        remedy = "images go on by alma images --write, not alma data"
        raise UserError(f"{stream.directory}: {remedy}")
    yield Refusal(_FIXED, f"not with --append, which keeps the settings of {stream.directory}")
    by = stream.settings.get("dates", {}).get("by")
    if by:
        flags = ("--by", "--from", "--merge-small", "--ordered")
        yield Refusal(flags, f"not with --append to a stream by {by}")
    else:
        why = f"{stream.directory} was made without --by; leave them out"
        yield Refusal(("--by", *_DATED), why)
    if not stream.ordered:
        yield Refusal(("--ordered",), f"{stream.directory} was made without it; leave it out")


def settings_of(arguments: argparse.Namespace, stream: Stream | None = None) -> StreamSettings:
    """The settings of a new stream, or of an addition to `stream`.

    An addition gets the seed, the tokenizer and the normalisation of the stream. UserError: all
    missing or contradictory flags, and all bad files.
    """
    problems = []
    for refusal in _refusals(arguments, stream):
        flags = given(arguments, *refusal.flags)
        if flags:
            problems.append(f"{', '.join(flags)}: {refusal.why}")
    if stream:
        problems += _as_before(arguments, stream)
    dates = noted(problems, _dates, arguments, stream)
    order = None
    if arguments.ordered and not arguments.by:
        order = noted(problems, _order, arguments)
    files, reader = input_of(problems, arguments, stream, dates)
    valid_source = arguments.valid_source
    if valid_source:
        flag = f"--valid-source {valid_source}"
        noted(problems, require_source, arguments, flag, valid_source)
    if not stream:
        problems += _missing_flags(arguments)
    if arguments.write == "parquet":
        noted(problems, require_package, "pyarrow", "--write parquet")
    tokenizer = noted(problems, tokenizer_files, arguments)
    if arguments.near_duplicates == "drop":
        noted(problems, library)
    refuse(problems)
    if stream:
        names = [name for name in stream.files if name != DICTIONARY]
        tokenizer = {name: str(stream.directory / name) for name in names}
        end_token = stream.end_token
    else:
        end_token = end_token_of(arguments, tokenizer, reader.chat)
    if dates:
        splits: Splits = _dated_splits(arguments, stream)
    elif order:
        splits = _ordered_splits(arguments, stream, order)
    else:
        splits = _splits(arguments, stream, valid_source or files[-1][0])
    return StreamSettings(
        files=files,
        splits=splits,
        seed=arguments.seed or 0,
        reader=reader,
        vocab_size=arguments.vocab_size,
        tokenizer=tokenizer,
        end_token=end_token,
        near_duplicates=arguments.near_duplicates == "drop",
        write=arguments.write or "fairseq",
        write_dropped=arguments.write_dropped,
    )


def _missing_flags(arguments: argparse.Namespace) -> list[str]:
    """Problems: flags that a new stream needs."""
    problems = []
    needed = ["--mega-batches", "--words", "--valid-words"]
    if arguments.by or arguments.ordered:
        needed = ["--eval-words", "--valid-words"]
        if arguments.words:  # --words is also the default of --eval-words
            needed.remove("--eval-words")
    missing = [flag for flag in needed if not given(arguments, flag)]
    if missing:
        problems.append(f"give {', '.join(missing)}")
    if not given(arguments, *_TOKENIZERS):
        problems.append(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    return problems


def _dated_splits(arguments: argparse.Namespace, stream: Stream | None) -> Dated:
    words = arguments.words or 0
    return Dated(
        mega_batches=0,  # one for each period, once the dates are read
        words=words,
        eval_words=arguments.eval_words or words,
        valid_words=arguments.valid_words,
        valid_source=None,
        first=len(stream.megabatches) if stream else 0,
        merge_small=arguments.merge_small,
    )


def _ordered_splits(
    arguments: argparse.Namespace, stream: Stream | None, order: list[list[str]]
) -> Ordered:
    words = arguments.words or 0
    return Ordered(
        mega_batches=len(order),
        words=words,
        eval_words=arguments.eval_words or words,
        valid_words=arguments.valid_words,
        valid_source=None,
        first=len(stream.megabatches) if stream else 0,
        order=order,
    )


def _splits(arguments: argparse.Namespace, stream: Stream | None, valid_source: str) -> Splits:
    if stream:
        return Splits(
            mega_batches=arguments.mega_batches or 1,
            words=arguments.words or 0,
            eval_words=0,
            valid_words=0,
            valid_source=None,
            first=len(stream.megabatches),
        )
    return Splits(
        mega_batches=arguments.mega_batches,
        words=arguments.words or 0,
        eval_words=arguments.eval_words or arguments.words or 0,
        valid_words=arguments.valid_words,
        valid_source=valid_source,
    )


def _as_before(arguments: argparse.Namespace, stream: Stream) -> list[str]:
    """Set the flags of an addition to those of the stream.

    Returns the problems: flags that were given with other values.
    """
    settings = stream.settings
    dates = settings.get("dates", {})
    problems = []
    if arguments.chat_template and "chat" not in settings:
        problems.append("--chat-template: the stream was made without it; leave it out")
    arguments.chat_template = "chat" in settings
    defaults = {"near_duplicates": "keep", "max_document_words": 0, "write": "fairseq"}
    for name, default in defaults.items():
        before = settings.get(name, default)
        flag = f"--{name.replace('_', '-')}"
        if getattr(arguments, name) not in (None, 0, before):
            value = before or f"no {flag}"
            problems.append(f"{flag}: the stream was made with {value}; leave it out")
        setattr(arguments, name, before)
    arguments.write_dropped = arguments.write_dropped or settings.get("write_dropped", False)
    arguments.ordered = stream.ordered
    arguments.by = dates.get("by")
    arguments.seed = stream.seed
    arguments.merge_small = settings.get("merge_small", False)
    arguments.date_key = arguments.date_key or dates.get("key")
    arguments.date_format = arguments.date_format or dates.get("format")
    arguments.words = arguments.words or settings["words"]
    arguments.eval_words = settings["eval_words"]
    arguments.valid_words = settings["valid_words"]
    return problems


def _order(arguments: argparse.Namespace) -> list[list[str]]:
    """The sources of each mega-batch of an ordered stream.

    `NAME+=PATH` in the CORPUS, which joins the mega-batch before, becomes `NAME=PATH`.
    """
    paths = []
    joining = []
    for argument in arguments.corpus:
        path, count = re.subn("^([^/=]+)[+](?==.)", r"\1", argument)
        paths.append(path)
        joining.append(bool(count))
    arguments.corpus = paths
    names = [named_path(path)[0] for path in paths]
    return from_corpus(list(zip(names, joining, strict=True)))


def _dates(arguments: argparse.Namespace, stream: Stream | None) -> Dates | None:
    """How documents get their periods; None: the stream is not dated.

    Those of an addition come after the last period of the stream. UserError: bad dates.
    """
    if not arguments.by:
        return None
    start = vars(arguments)["from"]  # `from` is a keyword of Python
    until = arguments.until
    bounds: dict[str, Any] = {}
    problems = []
    for flag, text in given(arguments, "--from", "--until").items():
        with contextlib.suppress(ValueError, OverflowError):
            bounds[flag] = interval(text)
        if not bounds.get(flag):
            remedy = "write it as 2023, 2023-05 or 2023-05-17"
            problems.append(f"{flag} {text!r}: no date; {remedy}")
    if len(bounds) == 2 and not problems and bounds["--from"][0] > bounds["--until"][1]:
        problems.append(f"--from {start} is after --until {until}")
    refuse(problems)
    return Dates(
        arguments.by,
        arguments.date_key or Dates.key,
        arguments.date_format or "",
        start=start or "",
        until=until or "",
        undated=arguments.undated or Dates.undated,
        after=_last_period(arguments.by, stream) if stream else None,
    )


def _last_period(by: str, stream: Stream) -> int | None:
    """The number of the last period of a stream; None: unknown."""
    last_name = stream.megabatches[-1].period.split("..")[-1]
    days = interval(last_name)
    return number_of(by, days[1]) if days else None
