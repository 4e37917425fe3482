"""Describe a stream, or verify its files: `alma inspect`. The heavy imports come after parsing."""

import os

from alma.errors import Parser, command, count
from alma.help_texts import WORKERS

_EXAMPLES = (
    "examples:\n"
    "  alma inspect stream            # sizes, lengths of documents, sources, what the held-out "
    "parts repeat\n"
    "  alma inspect stream_by_year    # of an ordered stream: the drift between its mega-batches, "
    "too\n"
    "  alma inspect stream --verify   # after a copy: are all files complete and unchanged?\n"
)


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m data_prep.inspect",
        usage="%(prog)s STREAM [options]",
        description="Describe a stream, of an ordered one also its drift, or verify its files.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    command_line.add_argument("stream", metavar="STREAM", help="a stream made by `alma data`")
    verify = (
        "check all files for changes and all documents for duplicates; exit with 2 if there is "
    )
    verify += "a problem"
    command_line.add_argument("--verify", action="store_true", help=verify)
    cores = len(os.sched_getaffinity(0))
    command_line.add_argument("--workers", type=count, default=cores, metavar="K", help=WORKERS)
    return command_line


@command
def main() -> None:
    """Describe or verify the stream."""
    options = parser().parse_args()
    # Imported after parsing, because NumPy takes a while.
    from alma.stream import Stream
    from alma.workers import Workers
    from data_prep import describe, verify

    stream = Stream.load(options.stream)
    with Workers(options.workers) as workers:
        if options.verify:
            verify.check(stream, workers)
        else:
            print(describe.describe(stream, workers))


if __name__ == "__main__":
    main()
