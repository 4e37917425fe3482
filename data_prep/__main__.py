"""`python -m data_prep CORPUS... --out STREAM ...`: turn raw text into a stream of mega-batches."""

import argparse
import contextlib
import dataclasses
import functools
import glob
import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.stream import Stream
from data_prep import cluster
from data_prep.advice import summary
from data_prep.dictionary import DICTIONARY
from data_prep.documents import Reader, find_files
from data_prep.formats import KNOWN, MODES, stem
from data_prep.gpt2 import GPT2
from data_prep.pipeline import StreamSettings, append, make_stream
from data_prep.plan import Wanted
from data_prep.tokenizer import SentencePiece
from data_prep.work import Work
from slurm.engine import resources

_NEEDED = ("--mega-batches", "--words", "--valid-words")
_TOKENIZERS = ("--vocab-size", "--tokenizer", "--bpe")
_GPT2_FILES = ("--gpt2-encoder-json", "--gpt2-vocab-bpe")
_FIXED = ("--valid-words", "--eval-words", "--valid-source", "--seed", *_TOKENIZERS, *_GPT2_FILES)
"""Flags that --append refuses: the stream determines them."""
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def count(text: str) -> int:
    """An argparse type: a positive whole number such as 440000000, 440_000_000 or 440M."""
    match = re.fullmatch(r"([\d_]+(?:\.\d+)?)([kMG]?)", text)
    number = float(match[1].replace("_", "") or 0) * _SCALE[match[2]] if match else 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number such as 500000 or 0.5M")
    return int(number)


def parser() -> Parser:
    """The command line."""
    arguments = Parser(
        prog="python -m data_prep",
        description="Turn raw text into a stream of deduplicated, i.i.d. mega-batches for fairseq. The "
        "output does not depend on the number of workers, nor on the names, order or compression of the "
        "files. After an interruption, the same command resumes.",
        allow_abbrev=False,
    )
    _add_text_flags(arguments)
    add = arguments.add_argument
    number = functools.partial(add, type=count)
    add("--out", type=Path, required=True, metavar="STREAM", help="directory to make")
    append = "add mega-batches to the finished stream --out; documents already in the stream are dropped"
    add("--append", action="store_true", help=append)
    number("--mega-batches", metavar="B", help="training mega-batches (default with --append: 1)")
    number(
        "--words", metavar="N", help="words per mega-batch, such as 440M (default with --append: as before)"
    )
    number("--eval-words", metavar="N", help="words of the evaluation mega-batch (default: --words)")
    number("--valid-words", metavar="N", help="words of the validation set")
    add("--valid-source", metavar="NAME", help="source of the validation set (default: the last CORPUS)")
    tokenizer = arguments.add_mutually_exclusive_group().add_argument
    tokenizer("--vocab-size", type=count, metavar="V", help="BPE tokens to train, without specials")
    tokenizer("--tokenizer", metavar="MODEL", help="use your own SentencePiece .model")
    tokenizer("--bpe", choices=("gpt2",), help="use GPT-2's byte-level BPE, given by the next two flags")
    add("--gpt2-encoder-json", metavar="FILE", help="with --bpe gpt2: encoder.json, the token ids")
    add("--gpt2-vocab-bpe", metavar="FILE", help="with --bpe gpt2: vocab.bpe, the merges")
    add("--seed", type=int, metavar="S", help="seed of the random order (default: 0)")
    cores = len(os.sched_getaffinity(0))
    number("--workers", default=cores, metavar="K", help=f"processes (default: all cores, {cores})")
    where = "run the stages on this machine, or each as an array of K SLURM jobs; waits for them"
    add("--cluster", choices=("local", "slurm"), default="local", help=where)
    resources.add_flags(arguments, cluster.USUAL, "of the K jobs")
    return arguments


def _add_text_flags(arguments: Parser) -> None:
    """The flags for the input files and their documents."""
    add = arguments.add_argument
    switch = functools.partial(add, action="store_true")
    add(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="PATH or NAME=PATH of a source: a file, a directory or a quoted pattern such as 'cc/**/*.gz', "
        f"of {KNOWN}; a NAME may repeat, the default is the name of the file or directory. Names that begin "
        "with . or _ (.cache, _SUCCESS, _temporary) are ignored, unless PATH itself has them",
    )
    add(
        "--documents",
        type=documents_mode,
        action="append",
        default=[],
        metavar="[NAME=]MODE",
        help="what a document of a .txt or .md file is, in all sources or in NAME: a block between blank "
        "lines (blank-line, the default), the file, a line, or the text between <doc id=...> and </doc> "
        "(wikiextractor); may be repeated",
    )
    field = "field of .jsonl and .parquet files that holds the text (default: text)"
    add("--text-key", default="text", metavar="FIELD", help=field)
    add(
        "--on-bad-input",
        choices=("error", "skip"),
        default="error",
        help="unreadable files, text that is not UTF-8, malformed JSON, damaged archives, ...: exit with an "
        "error (default), or skip and count them",
    )
    switch("--unescape-html", help="replace HTML entities such as &amp; by their characters")
    control = "remove control characters (C0, C1, U+FEFF, U+FFFE, U+FFFF) that are not white space"
    switch("--strip-control", help=control)
    split = (
        "split longer documents between lines, so that small mega-batches meet their size; the parts of a "
        "document may then fall into different mega-batches (default: never split)"
    )
    add("--max-document-words", type=count, default=0, metavar="N", help=split)


def documents_mode(text: str) -> tuple[str, str]:
    """An argparse type: (source, mode) of [NAME=]MODE; an empty source means all."""
    name, _, mode = text.rpartition("=")
    if mode not in MODES or text.startswith("="):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose [NAME=]MODE, MODE from {', '.join(MODES)})"
        )
    return name, mode


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
    """Collect a UserError of the block in `problems`, so that all are reported at once."""
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


def reader_of(arguments: argparse.Namespace) -> Reader:
    """The reader for the flags. UserError: --documents for an unknown source."""
    modes = dict(sorted(arguments.documents))
    default = modes.pop("", Reader.documents)
    for name in modes:
        _require_source(arguments, f"--documents {name}=", name)
    return Reader(
        documents=default,
        max_document_words=arguments.max_document_words,
        documents_of=modes,
        text_key=arguments.text_key,
        on_bad_input=arguments.on_bad_input,
        unescape_html=arguments.unescape_html,
        strip_control=arguments.strip_control,
    )


def _require_source(arguments: argparse.Namespace, flag: str, name: str) -> None:
    names = sorted({name for name, _ in map(named_path, arguments.corpus)})
    if name not in names:
        raise UserError(f"{flag}: no such source; there are {', '.join(names)}")


def settings_of(arguments: argparse.Namespace) -> StreamSettings:
    """The settings of a new stream. UserError: all missing or contradictory flags, and all bad files."""
    problems: list[str] = []
    with noted(problems):
        files = named_files(arguments.corpus)
    with noted(problems):
        reader = reader_of(arguments)
    if arguments.valid_source:
        with noted(problems):
            _require_source(arguments, f"--valid-source {arguments.valid_source}", arguments.valid_source)
    if lacking := [flag for flag in _NEEDED if _given(arguments, flag) is None]:
        problems.append(f"give {', '.join(lacking)}")
    if not any(_given(arguments, flag) for flag in _TOKENIZERS):
        problems.append(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    with noted(problems):
        tokenizer = given_tokenizer(arguments)
    refuse(problems)
    return StreamSettings(
        files=files,
        wanted=Wanted(
            arguments.mega_batches,
            arguments.words,
            arguments.eval_words or arguments.words,
            arguments.valid_words,
            arguments.valid_source or files[-1][0],
        ),
        seed=arguments.seed or 0,
        reader=reader,
        vocab_size=arguments.vocab_size,
        tokenizer=tokenizer,
    )


def settings_to_append(arguments: argparse.Namespace, stream: Stream) -> StreamSettings:
    """The settings of an addition: seed, tokenizer and normalisation are those of the stream.

    UserError: all flags that would change them, and all bad files.
    """
    problems: list[str] = []
    with noted(problems):
        files = named_files(arguments.corpus)
    if refused := [flag for flag in _FIXED if _given(arguments, flag) is not None]:
        problems.append(
            f"{', '.join(refused)}: not with --append, which keeps the settings of {stream.directory}"
        )
    with noted(problems):
        reader = reader_of(arguments)
    kept = {}
    for name in ("max_document_words", "unescape_html", "strip_control"):
        kept[name] = was = stream.settings.get(name, getattr(Reader, name))
        if (now := getattr(arguments, name)) and now != was:
            flag = name.replace("_", "-")
            problems.append(f"--{flag}: the stream was made with {was or 'no'} --{flag}; leave it out")
    refuse(problems)
    return StreamSettings(
        files=files,
        wanted=Wanted(
            arguments.mega_batches or 1,
            arguments.words or stream.settings["words"],
            eval_words=0,
            valid_words=0,
            valid_source=None,
            first=len(stream.megabatches),
        ),
        seed=stream.seed,
        reader=dataclasses.replace(reader, **kept),
        vocab_size=None,
        tokenizer={name: str(stream.directory / name) for name in stream.files if name != DICTIONARY},
    )


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


@command
def main() -> None:
    """Make the stream and print its table."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop workers or jobs, as on Ctrl-C
    resources.check_cluster(arguments)
    wanted = resources.read(arguments, cluster.USUAL)
    on_slurm = arguments.cluster == "slurm"
    with cluster.ClusterWork(arguments.workers, wanted) if on_slurm else Work(arguments.workers) as work:
        if arguments.append:
            stream = append(functools.partial(settings_to_append, arguments), arguments.out, work)
        else:
            stream = make_stream(settings_of(arguments), arguments.out, work)
    print(summary(stream))
    for what, numbers in (
        ("seconds", {stage: f"{seconds:.2f}" for stage, seconds in work.seconds.items()}),
        ("CPU seconds", {stage: f"{usage.cpu:.2f}" for stage, usage in work.usage.items()}),
        ("peak MB of a process", {stage: f"{usage.peak / 1e6:.0f}" for stage, usage in work.usage.items()}),
    ):
        if numbers:  # empty if the stream was already finished
            print(f"{what}: " + "  ".join(f"{stage} {number}" for stage, number in numbers.items()))


if __name__ == "__main__":
    main()
