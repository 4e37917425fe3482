"""`python -m data_prep CORPUS... --out STREAM ...`: raw text to a stream of mega-batches."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.stream import Stream
from data_prep.documents import SUFFIXES, Reader, find_files
from data_prep.pipeline import Settings, make_stream
from data_prep.plan import Wanted

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
    add("--mega-batches", type=count, required=True, metavar="B", help="training mega-batches")
    add("--words", type=count, required=True, metavar="N", help="words of each mega-batch (440M, 0.5M, ...)")
    add("--eval-words", type=count, metavar="N", help="words of the evaluation mega-batch (default: --words)")
    add("--valid-words", type=count, required=True, metavar="N", help="words of the validation set")
    add("--valid-source", metavar="NAME", help="source of the validation set (default: the last one)")
    tokenizer = arguments.add_mutually_exclusive_group(required=True).add_argument
    tokenizer("--vocab-size", type=count, metavar="V", help="BPE units to train, specials not counted")
    tokenizer("--tokenizer", metavar="MODEL", help="use this SentencePiece .model, train none")
    add("--seed", type=int, default=0, metavar="S", help="of the random order (default: 0)")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=count, default=cores, metavar="K", help=f"processes (default: all cores, {cores})")
    return arguments


def _add_text_flags(add: Callable[..., Any]) -> None:
    """The flags that say where the text is and what a document is."""
    add(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="PATH or NAME=PATH of a source: a file or a directory of files "
        f"({' '.join(SUFFIXES)}); a name may repeat, the default is the file's or directory's",
    )
    add(
        "--documents",
        choices=("blank-line", "file"),
        default="blank-line",
        help="what a document of a .txt file is: a block between blank lines (default) or the file",
    )
    add(
        "--max-document-words",
        type=count,
        default=0,
        metavar="N",
        help="split longer documents between lines, so that small mega-batches can be cut exactly; parts of "
        "one document may then fall into different mega-batches (default: never split)",
    )


def named_files(corpus: list[str]) -> list[tuple[str, str]]:
    """(source, path) of each file of the CORPUS arguments. UserError: see `find_files`."""
    files = []
    for argument in corpus:
        name, equals, path = argument.partition("=")
        if not equals or "/" in name:
            path = argument
            name = Path(path).absolute().name
            for suffix in SUFFIXES:
                name = name.removesuffix(suffix)
        if not name or not path:
            raise UserError(f"{argument!r}: expected PATH or NAME=PATH")
        files += [(name, file) for file in find_files(path)]
    return files


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the flags mean. UserError: flags that contradict each other or the files."""
    files = named_files(arguments.corpus)
    valid_source = arguments.valid_source or files[-1][0]
    if valid_source not in (names := sorted({name for name, _ in files})):
        raise UserError(f"--valid-source {valid_source}: no such source; there are {', '.join(names)}")
    if arguments.tokenizer and not Path(arguments.tokenizer).is_file():
        raise UserError(f"--tokenizer {arguments.tokenizer}: no such file")
    return Settings(
        files=files,
        wanted=Wanted(
            arguments.mega_batches,
            arguments.words,
            arguments.eval_words or arguments.words,
            arguments.valid_words,
            valid_source,
        ),
        seed=arguments.seed,
        reader=Reader(arguments.documents, arguments.max_document_words),
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
    )


def summary(stream: Stream) -> str:
    """The stream as a table: one row for each part."""
    wanted = stream.settings
    rows = [["", "words", "off target", "documents", "items", "tokens", "MB", *wanted["sources"]]]
    targets = [wanted["words"]] * len(stream.megabatches) + [wanted["valid_words"], wanted["eval_words"]]
    for part, target in zip([*stream.megabatches, stream.valid, stream.test], targets, strict=True):
        numbers = [part.documents, part.items, part.tokens]
        shares = [f"{words / part.words:.1%}" for words in part.sources.values()]
        rows.append(
            [part.name, f"{part.words:,}", f"{part.words / target - 1:+.3%}"]
            + [f"{number:,}" for number in numbers]
            + [f"{part.bytes / 1e6:.1f}", *shares]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    corpus = stream.corpus
    lines.append(
        f"read {corpus['words']:,} words in {corpus['documents']:,} documents; dropped "
        f"{corpus['duplicate_documents']:,} duplicates ({corpus['duplicate_words']:,} words); left out "
        f"{corpus['surplus_words']:,} surplus words; spread of the mega-batches {corpus['spread']:.3%}"
    )
    if corpus["spread"] > _WIDE:
        lines.append("documents are long for mega-batches of this size; --max-document-words splits them")
    return "\n".join(lines)


@command
def main() -> None:
    """Make the stream and print its table."""
    arguments = parser().parse_args()
    stream, seconds = make_stream(settings_of(arguments), arguments.out, arguments.workers)
    print(summary(stream))
    if seconds:
        print("seconds: " + "  ".join(f"{stage} {value:.1f}" for stage, value in seconds.items()))
    else:
        print(
            f"{stream.directory}: was finished before with the same settings; nothing to do", file=sys.stderr
        )


if __name__ == "__main__":
    main()
