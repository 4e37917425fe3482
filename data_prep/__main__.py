"""Turn raw text into a stream of mega-batches: `alma data`.

The heavy imports come after parsing.
"""

import argparse
import functools
import os
import signal
from pathlib import Path

from alma.dates import date_format, span
from alma.errors import Parser, command, count, hint, interrupt, require_extra
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


_USAGE = """\
%(prog)s CORPUS... --out STREAM --mega-batches B --words N --valid-words N --vocab-size V
       %(prog)s CORPUS... --out STREAM --ordered --eval-words N --valid-words N --vocab-size V
       %(prog)s CORPUS... --out STREAM --by PERIOD --eval-words N --valid-words N --vocab-size V
       %(prog)s CORPUS... --out STREAM --append [options]"""


def documents_mode(text: str) -> tuple[str, str]:
    """An argparse type: (source, mode) of [NAME=]MODE; an empty source means all."""
    name, _, mode = text.rpartition("=")
    if mode not in MODES or text.startswith("="):
        remedy = f"give [NAME=]MODE; {hint(mode, MODES)}"
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} ({remedy})")
    return name, mode


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m data_prep",
        usage=_USAGE,
        description="Turn raw text into a stream of deduplicated, i.i.d. mega-batches of tokens "
        "for fairseq. The result depends on the text, its sources and the seed alone. Rerun the "
        "command to resume it.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    corpus = (
        "PATH or NAME=PATH of a source: a file, a directory or a quoted pattern such as "
        f"'cc/**/*.gz'; files are {KNOWN}. NAME may repeat; its default is the name of the file or "
        "directory. Names that begin with . or _ are skipped unless PATH contains them"
    )
    command_line.add_argument("corpus", nargs="+", metavar="CORPUS", help=corpus)
    _add_text_flags(command_line)
    _add_stream_flags(command_line)
    _add_date_flags(command_line)
    _add_tokenizer_flags(command_line)
    group = command_line.add_argument_group("where to run")
    cores = len(os.sched_getaffinity(0))
    workers = f"{WORKERS}; with --cluster slurm the jobs of each step"
    group.add_argument("--workers", type=count, default=cores, metavar="K", help=workers)
    resources.add_cluster(group, "local", "slurm")
    resources.add_flags(command_line, USUAL, "job")
    return command_line


def _add_text_flags(command_line: Parser) -> None:
    """The flags for reading files and cutting them into documents."""
    title = "How files are read and cut into documents."
    add = command_line.add_argument_group("text", title).add_argument
    documents = (
        "what a document of .txt and .md files is, for all sources or NAME: blank-line (text "
        "between blank lines), file, line, wikiextractor (<doc id=...> to </doc>); may be repeated "
        "(default: blank-line)"
    )
    add(
        "--documents",
        type=documents_mode,
        action="append",
        default=[],
        metavar="[NAME=]MODE",
        help=documents,
    )
    key = (
        "field or column of the text in .jsonl, .json, .csv, .parquet and .arrow; in JSON, "
        "data.text is within data (default: text, with --chat-template messages)"
    )
    add("--text-key", metavar="FIELD", help=key)
    split = (
        "split of a data set's folder, as the Hub of Hugging Face or datasets.save_to_disk has it "
        "(default: train)"
    )
    add("--split", metavar="SPLIT", help=split)
    bad = (
        "exit at damaged or malformed input, or leave it out and count it in stream.json (default: "
        "error)"
    )
    add("--on-bad-input", choices=("error", "skip"), default="error", help=bad)
    near = "keep or drop documents that repeat about 80%% of the word 5-grams of another (default: "
    near += "keep)"
    add("--near-duplicates", choices=("keep", "drop"), help=near)
    split = (
        "split longer documents between lines; all pieces of one go to one part (default: never "
        "split)"
    )
    add("--max-document-words", type=count, default=0, metavar="N", help=split)


def _add_stream_flags(command_line: Parser) -> None:
    """The flags for the parts of the stream and their sizes."""
    sizes = (
        "Sizes are counts of words, separated by white space; N may be written as 500k, 0.5M or "
    )
    sizes += "2.2G."
    add = command_line.add_argument_group("stream", sizes).add_argument
    out = "directory of the stream to make"
    add("--out", type=Path, required=True, metavar="STREAM", help=out)
    write = (
        "write the documents of each part for other software too (default: fairseq, nothing else)"
    )
    add("--write", choices=("fairseq", "jsonl", "parquet", "megatron"), help=write)
    dropped = (
        "list in dropped.jsonl the documents dropped as duplicates, and the one that each repeats"
    )
    add("--write-dropped", action="store_true", help=dropped)
    append = (
        "add mega-batches to the finished stream --out; documents that it already contains are "
        "dropped"
    )
    add("--append", action="store_true", help=append)
    ordered = (
        "a mega-batch for each CORPUS, in the order given; NAME+=PATH joins the mega-batch before"
    )
    add("--ordered", action="store_true", help=ordered)
    mega_batches = "mega-batches to train on (default with --append: 1)"
    add("--mega-batches", type=count, metavar="B", help=mega_batches)
    words = "words of each mega-batch (default with --append: as before; with --ordered: all)"
    add("--words", type=count, metavar="N", help=words)
    evaluation = (
        "words of the test set; with --ordered of that of each mega-batch (default: --words)"
    )
    add("--eval-words", type=count, metavar="N", help=evaluation)
    valid = "words of the validation set; with --ordered of that of each mega-batch"
    add("--valid-words", type=count, metavar="N", help=valid)
    source = "source from which the validation set is taken (default: the last CORPUS)"
    add("--valid-source", metavar="NAME", help=source)
    add("--seed", type=int, metavar="S", help="seed of the random order of documents (default: 0)")


def _add_date_flags(command_line: Parser) -> None:
    """The flags for streams by date."""
    title = "A mega-batch for each period. DATE is ISO 8601 in UTC, such as 2023, 2023-05 or "
    title += "2023-05-17."
    add = command_line.add_argument_group("dates", title).add_argument
    by = "year, quarter, month, week (ISO), or N-years, which begin at multiples of N; in UTC"
    add("--by", type=span, metavar="PERIOD", help=by)
    key = "field of the date, as --text-key; .wet files have WARC-Date (default: date)"
    add("--date-key", metavar="FIELD", help=key)
    written = "days, seconds, milliseconds or microseconds since 1970, or as %%Y%%m%%d (default: "
    written += "ISO 8601)"
    add("--date-format", type=date_format, metavar="FORMAT", help=written)
    start = "leave out documents before DATE, which is itself included"
    add("--from", metavar="DATE", help=start)
    until = (
        "leave out documents after DATE, all of which is included: 2023 ends with its last second"
    )
    add("--until", metavar="DATE", help=until)
    undated = "exit at documents without a date within one period, or skip and count them "
    undated += "(default: error)"
    add("--undated", choices=("error", "skip"), help=undated)
    small = (
        "merge a period that is too small for its parts with the next, and the last with the one "
        "before"
    )
    add("--merge-small", action="store_true", help=small)


def _add_tokenizer_flags(command_line: Parser) -> None:
    """The flags for the tokenizer."""
    title = "A new stream needs one of the first three."
    group = command_line.add_argument_group("tokenizer", title)
    either = group.add_mutually_exclusive_group().add_argument
    train = "train a BPE of V tokens, without the special tokens, on the first mega-batch"
    either("--vocab-size", type=count, metavar="V", help=train)
    existing = (
        "use your own SentencePiece .model, or the tokenizer in the folder of a Hugging Face "
        "model, with its ids"
    )
    either("--tokenizer", metavar="MODEL", help=existing)
    chat = (
        "the field of the text has chat turns, role and content or from and value: write them by "
        "the chat template of --tokenizer FOLDER, with its special tokens"
    )
    group.add_argument("--chat-template", action="store_true", help=chat)
    bpe = "use the byte-level BPE of GPT-2, from the next two files"
    either("--bpe", choices=("gpt2",), help=bpe)
    ids = "encoder.json, the ids of the tokens"
    group.add_argument("--gpt2-encoder-json", metavar="FILE", help=ids)
    group.add_argument("--gpt2-vocab-bpe", metavar="FILE", help="vocab.bpe, the merges")


@command
def main() -> None:
    """Make the stream and print its table."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, interrupt)  # stop workers or jobs, as on Ctrl-C
    resources.check_cluster(arguments)
    job_resources = resources.read(arguments, USUAL)
    require_extra("corpus", "alma data")
    # Imported after parsing, because NumPy and SentencePiece take a while.
    from data_prep.cluster import ClusterWork
    from data_prep.describe import summary
    from data_prep.options import settings_of
    from data_prep.pipeline import append, make_stream
    from data_prep.work import Work
    from slurm.engine import submission

    if arguments.cluster == "slurm":
        work: Work = ClusterWork(arguments.workers, job_resources)
        submission.check_place(arguments.out)
        submission.check_job("step", job_resources)
    else:
        work = Work(arguments.workers)
    with work:
        if arguments.append:
            stream = append(functools.partial(settings_of, arguments), arguments.out, work)
        else:
            stream = make_stream(settings_of(arguments), arguments.out, work)
    print(summary(stream))
    if work.seconds:  # else the stream was already finished
        stages = [f"{stage} {seconds:.2f}" for stage, seconds in work.seconds.items()]
        print(f"seconds: {'  '.join(stages)}")


if __name__ == "__main__":
    main()
