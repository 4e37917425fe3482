"""`python -m data_prep CORPUS... --out STREAM ...`: raw text to a stream of mega-batches."""

import argparse
import dataclasses
import glob
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.report import as_text
from alma.stream import Stream
from data_prep import cluster
from data_prep.documents import Reader, find_files
from data_prep.formats import DOCUMENTS, KNOWN, stem
from data_prep.gpt2 import GPT2
from data_prep.pipeline import Settings, append, make_stream
from data_prep.plan import Wanted
from data_prep.tokenizer import SentencePiece
from data_prep.work import Work
from slurm import resources

_OF_A_NEW_STREAM = ("--mega-batches", "--words", "--valid-words", "--eval-words", "--valid-source", "--seed")
_TOKENIZERS = ("--vocab-size", "--tokenizer", "--bpe")
_GPT2_FILES = ("--gpt2-encoder-json", "--gpt2-vocab-bpe")
_WIDE = 0.01  # of a mega-batch: a spread worth a hint
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def count(text: str) -> int:
    """A positive whole number, as 440000000, 440_000_000 or 440M."""
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
        "output is the same for any number of workers and any naming, order or compression of the "
        "files; after an interruption the same command goes on where it stopped.",
        allow_abbrev=False,
    )
    _add_text_flags(arguments.add_argument)
    add = arguments.add_argument
    add("--out", type=Path, required=True, metavar="STREAM", help="directory to make")
    add(
        "--append",
        action="store_true",
        help="add mega-batches to the finished stream --out, with its tokenizer, of the documents of CORPUS "
        "that it does not have",
    )
    add("--mega-batches", type=count, metavar="B", help="training mega-batches (default with --append: 1)")
    add(
        "--words",
        type=count,
        metavar="N",
        help="words of each mega-batch: 440M, 0.5M, ... (default with --append: as before)",
    )
    add("--eval-words", type=count, metavar="N", help="words of the evaluation mega-batch (default: --words)")
    add("--valid-words", type=count, metavar="N", help="words of the validation set")
    add("--valid-source", metavar="NAME", help="source of the validation set (default: the last one)")
    tokenizer = arguments.add_mutually_exclusive_group().add_argument
    tokenizer("--vocab-size", type=count, metavar="V", help="BPE units to train, specials not counted")
    tokenizer("--tokenizer", metavar="MODEL", help="use this SentencePiece .model, train none")
    tokenizer(
        "--bpe", choices=("gpt2",), help="use GPT-2's byte-level BPE, of the next two files; train none"
    )
    add("--gpt2-encoder-json", metavar="FILE", help="with --bpe gpt2: encoder.json, the units' ids")
    add("--gpt2-vocab-bpe", metavar="FILE", help="with --bpe gpt2: vocab.bpe, the merges")
    add("--seed", type=int, metavar="S", help="of the random order (default: 0)")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=count, default=cores, metavar="K", help=f"processes (default: all cores, {cores})")
    add(
        "--cluster",
        choices=("local", "slurm"),
        default="local",
        help="where they run: on this machine, or as an array of K jobs for each stage, for which this waits",
    )
    resources.add_flags(arguments, cluster.USUAL, "of the K jobs")
    return arguments


def _add_text_flags(add: Callable[..., Any]) -> None:
    """The flags that say where the text is and what a document is."""
    add(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="PATH or NAME=PATH of a source: a file, a directory of files or a quoted pattern such as "
        f"'cc/**/*.gz', of {KNOWN}; a name may repeat, the default is the file's or directory's",
    )
    add(
        "--documents",
        type=documents_mode,
        action="append",
        default=[],
        metavar="[NAME=]MODE",
        help="what a document of a .txt file is, in all sources or in NAME: a block between blank lines "
        "(blank-line, the default), the file, a line, or what is between <doc id=...> and </doc> "
        "(wikiextractor); may be repeated",
    )
    add(
        "--text-key",
        default="text",
        metavar="FIELD",
        help="field of .jsonl and .parquet files that holds the text (default: text)",
    )
    add(
        "--on-bad-input",
        choices=("error", "skip"),
        default="error",
        help="what to do with text that cannot be read or is not UTF-8, malformed JSON, damaged archives, "
        "...: end with an error (default), or skip and count it",
    )
    add("--unescape-html", action="store_true", help="turn &amp; and the like into what they stand for")
    add(
        "--strip-control",
        action="store_true",
        help="remove control characters (C0, C1, U+FEFF, U+FFFE, U+FFFF) that are not white space",
    )
    add(
        "--max-document-words",
        type=count,
        default=0,
        metavar="N",
        help="split longer documents between lines, so that small mega-batches can be cut exactly; parts of "
        "one document may then fall into different mega-batches (default: never split)",
    )


def documents_mode(text: str) -> tuple[str, str]:
    """(source, mode) of MODE or NAME=MODE; the source is empty for all."""
    name, _, mode = text.rpartition("=")
    if mode not in DOCUMENTS or text.startswith("="):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose [NAME=]MODE, MODE from {', '.join(DOCUMENTS)})"
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


def named_files(corpus: list[str]) -> list[tuple[str, str]]:
    """(source, path) of each file of the CORPUS arguments, each file once.

    UserError: a file of two sources; see also `find_files`.
    """
    files: dict[str, tuple[str, str]] = {}
    for name, path in map(named_path, corpus):
        for file in find_files(path):
            source, _ = files.setdefault(os.path.realpath(file), (name, file))
            if source != name:
                raise UserError(f"{file}: is in both {source} and {name}; name it in one CORPUS argument")
    return list(files.values())


def reader_of(arguments: argparse.Namespace) -> Reader:
    """The reader that the flags mean. UserError: a mode for a source that there is not."""
    modes = dict(sorted(arguments.documents))
    default = modes.pop("", Reader.documents)
    names = sorted({name for name, _ in map(named_path, arguments.corpus)})
    if unknown := modes.keys() - names:
        raise UserError(f"--documents {min(unknown)}=: no such source; there are {', '.join(names)}")
    return Reader(
        documents=default,
        max_document_words=arguments.max_document_words,
        documents_of=modes,
        text_key=arguments.text_key,
        on_bad_input=arguments.on_bad_input,
        unescape_html=arguments.unescape_html,
        strip_control=arguments.strip_control,
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of a new stream. UserError: flags that lack, or contradict each other or the files."""
    if lacking := [flag for flag in _OF_A_NEW_STREAM[:3] if _given(arguments, flag) is None]:
        raise UserError(f"give {', '.join(lacking)}; see `python -m data_prep --help`")
    if not any(_given(arguments, flag) for flag in _TOKENIZERS):
        raise UserError(f"give one of {', '.join(_TOKENIZERS)}: the tokenizer")
    files = named_files(arguments.corpus)
    valid_source = arguments.valid_source or files[-1][0]
    if valid_source not in (names := sorted({name for name, _ in files})):
        raise UserError(f"--valid-source {valid_source}: no such source; there are {', '.join(names)}")
    return Settings(
        files=files,
        wanted=Wanted(
            arguments.mega_batches,
            arguments.words,
            arguments.eval_words or arguments.words,
            arguments.valid_words,
            valid_source,
        ),
        seed=arguments.seed or 0,
        reader=reader_of(arguments),
        vocab_size=arguments.vocab_size,
        tokenizer=given_tokenizer(arguments),
    )


def settings_to_append(arguments: argparse.Namespace, stream: Stream) -> Settings:
    """The settings of an addition: what makes documents, their order and their units are the stream's.

    UserError: flags that would change them.
    """
    fixed = (*_OF_A_NEW_STREAM[2:], *_TOKENIZERS, *_GPT2_FILES)
    if refused := [flag for flag in fixed if _given(arguments, flag) is not None]:
        raise UserError(f"{refused[0]} is not for --append, which goes on with what {stream.directory} has")
    reader = reader_of(arguments)
    for name in ("max_document_words", "unescape_html", "strip_control"):
        was, now = stream.settings.get(name, getattr(Reader, name)), getattr(reader, name)
        if now and now != was:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}: the stream was made with {was or 'no'} --{flag}, which holds for all")
        reader = dataclasses.replace(reader, **{name: was})
    return Settings(
        files=named_files(arguments.corpus),
        wanted=Wanted(
            arguments.mega_batches or 1,
            arguments.words or stream.settings["words"],
            eval_words=0,
            valid_words=0,
            valid_source=None,
            first=len(stream.megabatches),
        ),
        seed=stream.seed,
        reader=reader,
        vocab_size=None,
        tokenizer={name: str(stream.directory / name) for name in stream.files if name != "dict.txt"},
    )


def _given(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag[2:].replace("-", "_"))


def given_tokenizer(arguments: argparse.Namespace) -> dict[str, str]:
    """`Settings.tokenizer`. UserError: a file that is missing, or flags that do not go together."""
    given = {flag: path for flag in ("--tokenizer", *_GPT2_FILES) if (path := _given(arguments, flag))}
    if any((flag in given) != bool(arguments.bpe) for flag in _GPT2_FILES):
        raise UserError(f"--bpe gpt2, {' FILE and '.join(_GPT2_FILES)} FILE go together: all three or none")
    for flag, path in given.items():
        if not Path(path).is_file():
            raise UserError(f"{flag} {path}: no such file")
    names = GPT2.files if arguments.bpe else SentencePiece.files
    return dict(zip(names, given.values(), strict=bool(given)))


def summary(stream: Stream) -> str:
    """The stream as a table: one row for each part."""
    added = [each["words"] for each in stream.appended for _ in range(each["mega_batches"])]
    wanted = stream.settings
    targets = [wanted["words"]] * wanted["mega_batches"] + added
    targets += [wanted["valid_words"], wanted["eval_words"]]
    sources = sorted({name for part in stream.parts for name in part.sources})
    rows = [["", "words", "off target", "documents", "items", "tokens", "MB", *sources]]
    for part, target in zip(stream.parts, targets, strict=True):
        numbers = [part.documents, part.items, part.tokens]
        shares = [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        rows.append(
            [part.name, f"{part.words:,}", f"{part.words / target - 1:+.3%}"]
            + [f"{number:,}" for number in numbers]
            + [f"{part.bytes / 1e6:.1f}", *shares]
        )
    lines = [as_text(rows)]
    corpus = stream.appended[-1]["corpus"] if stream.appended else stream.corpus
    lines.append(
        f"read {corpus['words']:,} words in {corpus['documents']:,} documents; dropped "
        f"{corpus['duplicate_documents']:,} duplicates ({corpus['duplicate_words']:,} words); left out "
        f"{corpus['surplus_words']:,} surplus words; spread of the mega-batches {corpus['spread']:.3%}"
    )
    if "skipped" in corpus:
        lines.append(corpus["skipped"]["summary"])
    if corpus["spread"] > _WIDE:
        lines.append("documents are long for mega-batches of this size; --max-document-words splits them")
    return "\n".join(lines)


@command
def main() -> None:
    """Make the stream and print its table."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the workers or jobs, as on Ctrl-C
    wanted = resources.read(arguments, cluster.USUAL)
    on_slurm = arguments.cluster == "slurm"
    with cluster.ClusterWork(arguments.workers, wanted) if on_slurm else Work(arguments.workers) as work:
        if arguments.append:
            before = Stream.load(arguments.out)
            stream = append(settings_to_append(arguments, before), before, work)
        else:
            stream = make_stream(settings_of(arguments), arguments.out, work)
    print(summary(stream))
    if work.seconds:
        for what, numbers in (
            ("seconds", {stage: f"{seconds:.2f}" for stage, seconds in work.seconds.items()}),
            ("CPU seconds", {stage: f"{cost.cpu:.2f}" for stage, cost in work.costs.items()}),
            ("peak MB of a process", {stage: f"{cost.peak / 1e6:.0f}" for stage, cost in work.costs.items()}),
        ):
            print(f"{what}: " + "  ".join(f"{stage} {number}" for stage, number in numbers.items()))
    else:
        print(
            f"{stream.directory}: was finished before with the same settings; nothing to do", file=sys.stderr
        )


if __name__ == "__main__":
    main()
