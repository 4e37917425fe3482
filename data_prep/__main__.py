"""Turn raw text into a stream of mega-batches: `alma data`. The heavy imports come after parsing."""

import argparse
import functools
import os
import signal
from pathlib import Path

from alma.dates import date_format, span
from alma.errors import Parser, command, count, hint
from alma.help_texts import WORKERS
from data_prep.formats import KNOWN, MODES
from slurm.engine import resources
from slurm.engine.resources import Resources

USUAL = Resources(gpus_per_node=0, cpus_per_task=1, mem_gb=4)
_EXAMPLES = """\
examples:
  # four mega-batches of 0.5M words each, from three sources
  alma data wiki=wiki.txt.zst books=books/ web=crawl.jsonl.gz --out stream \\
      --mega-batches 4 --words 0.5M --valid-words 50k --vocab-size 8000
  # the next crawl becomes the next mega-batch of the same stream
  alma data web=crawl2.jsonl.gz --out stream --append
  # a mega-batch for each year, by the field `date` of each document
  alma data news.jsonl.gz --out stream_by_date --by year \\
      --eval-words 50k --valid-words 50k --vocab-size 8000
  # on SLURM, 64 jobs for each step; start it in tmux or in a job, because it waits for them
  alma data 'web=cc/**/*.wet.gz' --out stream_cc --mega-batches 5 --words 440M \\
      --valid-words 0.5M --vocab-size 50000 --cluster slurm --workers 64 --partition cpu
"""


def documents_mode(text: str) -> tuple[str, str]:
    """An argparse type: (source, mode) of [NAME=]MODE; an empty source means all."""
    name, _, mode = text.rpartition("=")
    if mode not in MODES or text.startswith("="):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (give [NAME=]MODE; {hint(mode, MODES)})")
    return name, mode


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m data_prep",
        usage="%(prog)s CORPUS... --out STREAM --mega-batches B --words N --valid-words N --vocab-size V\n"
        "       %(prog)s CORPUS... --out STREAM --ordered --eval-words N --valid-words N --vocab-size V\n"
        "       %(prog)s CORPUS... --out STREAM --by PERIOD --eval-words N --valid-words N --vocab-size V\n"
        "       %(prog)s CORPUS... --out STREAM --append [options]",
        description="Turn raw text into a stream of deduplicated, i.i.d. mega-batches of tokens for fairseq. "
        "The result depends on the text, its sources and the seed alone. Rerun the command to resume it.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    corpus = (
        "PATH or NAME=PATH of a source: a file, a directory or a quoted pattern such as 'cc/**/*.gz'; files "
        f"are {KNOWN}. NAME may repeat; its default is the name of the file or directory. Names that "
        "begin with . or _ are skipped unless PATH contains them"
    )
    made.add_argument("corpus", nargs="+", metavar="CORPUS", help=corpus)

    add = made.add_argument_group("text", "How files are read and cut into documents.").add_argument
    what = (
        "what a document of .txt and .md files is, for all sources or NAME: blank-line (text between blank "
        "lines), file, line, wikiextractor (<doc id=...> to </doc>); may be repeated (default: blank-line)"
    )
    add("--documents", type=documents_mode, action="append", default=[], metavar="[NAME=]MODE", help=what)
    key = "field of the text in .jsonl, .json and .parquet; in JSON, data.text is within data (default: text)"
    add("--text-key", default="text", metavar="FIELD", help=key)
    bad = "exit at damaged or malformed input, or leave it out and count it in stream.json (default: error)"
    add("--on-bad-input", choices=("error", "skip"), default="error", help=bad)
    near = "keep or drop documents that repeat about 80%% of the word 5-grams of another (default: keep)"
    add("--near-duplicates", choices=("keep", "drop"), help=near)
    split = "split longer documents between lines; all pieces of one go to one part (default: never split)"
    add("--max-document-words", type=count, default=0, metavar="N", help=split)

    _add_stream_flags(made)

    group = made.add_argument_group("tokenizer", "A new stream needs one of the first three.")
    either = group.add_mutually_exclusive_group().add_argument
    train = "train a BPE of V tokens, without the special tokens, on the first mega-batch"
    either("--vocab-size", type=count, metavar="V", help=train)
    own = "use your own SentencePiece .model, or the byte-level BPE of a Hugging Face folder, with its ids"
    either("--tokenizer", metavar="MODEL", help=own)
    either("--bpe", choices=("gpt2",), help="use the byte-level BPE of GPT-2, from the next two files")
    group.add_argument("--gpt2-encoder-json", metavar="FILE", help="encoder.json, the ids of the tokens")
    group.add_argument("--gpt2-vocab-bpe", metavar="FILE", help="vocab.bpe, the merges")

    group = made.add_argument_group("where to run")
    cores = len(os.sched_getaffinity(0))
    workers = f"{WORKERS}; with --cluster slurm the jobs of each step"
    group.add_argument("--workers", type=count, default=cores, metavar="K", help=workers)
    resources.add_cluster(group, "local", "slurm")
    resources.add_flags(made, USUAL, "job")
    return made


def _add_stream_flags(made: Parser) -> None:
    """The flags for the parts of the stream and their sizes, and for streams by date."""
    sizes = "Sizes are counts of words, separated by white space; N may be written as 500k, 0.5M or 2.2G."
    add = made.add_argument_group("stream", sizes).add_argument
    number = functools.partial(add, type=count)
    add("--out", type=Path, required=True, metavar="STREAM", help="directory of the stream to make")
    write = "write the documents of each part for other software too (default: fairseq, nothing else)"
    add("--write", choices=("fairseq", "jsonl", "parquet", "megatron"), help=write)
    dropped = "list in dropped.jsonl the documents dropped as duplicates, and the one that each repeats"
    add("--write-dropped", action="store_true", help=dropped)
    append = "add mega-batches to the finished stream --out; documents that it already contains are dropped"
    add("--append", action="store_true", help=append)
    ordered = "a mega-batch for each CORPUS, in the order given; NAME+=PATH joins the mega-batch before"
    add("--ordered", action="store_true", help=ordered)
    number("--mega-batches", metavar="B", help="mega-batches to train on (default with --append: 1)")
    words = "words of each mega-batch (default with --append: as before; with --ordered: all)"
    number("--words", metavar="N", help=words)
    evaluation = "words of the test set; with --ordered of that of each mega-batch (default: --words)"
    number("--eval-words", metavar="N", help=evaluation)
    valid = "words of the validation set; with --ordered of that of each mega-batch"
    number("--valid-words", metavar="N", help=valid)
    valid = "source from which the validation set is taken (default: the last CORPUS)"
    add("--valid-source", metavar="NAME", help=valid)
    add("--seed", type=int, metavar="S", help="seed of the random order of documents (default: 0)")

    about = "A mega-batch for each period. DATE is ISO 8601 in UTC, such as 2023, 2023-05 or 2023-05-17."
    add = made.add_argument_group("dates", about).add_argument
    by = "year, quarter, month, week (ISO), or N-years, which begin at multiples of N; in UTC"
    add("--by", type=span, metavar="PERIOD", help=by)
    key = "field of the date, as --text-key; .wet files have WARC-Date (default: date)"
    add("--date-key", metavar="FIELD", help=key)
    written = "days, seconds, milliseconds or microseconds since 1970, or as %%Y%%m%%d (default: ISO 8601)"
    add("--date-format", type=date_format, metavar="FORMAT", help=written)
    add("--from", metavar="DATE", help="leave out documents before DATE, which is itself included")
    until = "leave out documents after DATE, all of which is included: 2023 ends with its last second"
    add("--until", metavar="DATE", help=until)
    undated = "exit at documents without a date within one period, or skip and count them (default: error)"
    add("--undated", choices=("error", "skip"), help=undated)
    small = "merge a period that is too small for its parts with the next, and the last with the one before"
    add("--merge-small", action="store_true", help=small)


@command
def main() -> None:
    """Make the stream and print its table."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop workers or jobs, as on Ctrl-C
    resources.check_cluster(arguments)
    wanted = resources.read(arguments, USUAL)
    # NumPy and SentencePiece take a while to import.
    from data_prep.cluster import ClusterWork
    from data_prep.describe import summary
    from data_prep.pipeline import append, make_stream
    from data_prep.settings import settings_of
    from data_prep.work import Work

    on_slurm = arguments.cluster == "slurm"
    with ClusterWork(arguments.workers, wanted) if on_slurm else Work(arguments.workers) as work:
        if arguments.append:
            stream = append(functools.partial(settings_of, arguments), arguments.out, work)
        else:
            stream = make_stream(settings_of(arguments), arguments.out, work)
    print(summary(stream))
    if work.seconds:  # else the stream was already finished
        print("seconds: " + "  ".join(f"{stage} {seconds:.2f}" for stage, seconds in work.seconds.items()))


if __name__ == "__main__":
    main()
