"""Write text that every machine has as JSON lines: `alma corpus`."""

from collections import Counter
from collections.abc import Generator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import orjson
from tqdm import tqdm

from alma.dates import interval
from alma.errors import Parser, UserError, command, count
from alma.files import atomic_write, make_directory
from data_prep.compressed import Document
from data_prep.corpus import git, pydoc
from data_prep.formats import kind

RECIPES = {"git": (git.documents, None), "pydoc": (pydoc.documents, "")}
"""What yields each document, given SOURCE and the counts of what is left out; and the default of SOURCE."""
_EXAMPLES = """\
examples:
  # the history of a project, a mega-batch for each year
  alma corpus git ~/linux --out commits.jsonl
  alma data git=commits.jsonl --by year --from 2006 --out stream \\
      --eval-words 50k --valid-words 50k --vocab-size 8000
  # the documentation of Python and of the installed packages
  alma corpus pydoc --out pydoc.jsonl
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m data_prep.corpus",
        usage="%(prog)s git REPOSITORY --out FILE.jsonl [--max-words N]\n"
        "       %(prog)s pydoc [topics|stdlib|packages] --out FILE.jsonl [--max-words N]",
        description="Write text that every machine has as JSON lines for `alma data`, without a download. "
        "Commits are dated, so `alma data --by year` makes a stream that drifts.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    recipe = "git: the messages of the commits before HEAD; pydoc: the documentation of Python and of "
    recipe += "installed packages, without dates"
    add("recipe", choices=RECIPES, metavar="RECIPE", help=recipe)
    source = f"git: a repository; pydoc: {', '.join(pydoc.PARTS[:-1])} or {pydoc.PARTS[-1]} (default: all)"
    add("source", nargs="?", metavar="SOURCE", help=source)
    add("--out", required=True, metavar="FILE.jsonl", help="file to write")
    words = "stop before the document that would exceed N words (default: write all)"
    add("--max-words", type=count, metavar="N", help=words)
    return made


def write(
    documents: Generator[Document, None, None], out: str, left_out: Counter[str], most: int | None = None
) -> str:
    """Write `{"date": ..., "text": ...}` for each document up to `most` words; without `date` if it has none.

    Returns a summary, with dates in UTC. `left_out` gains documents whose date `alma data` cannot read. The
    same bytes leave a file untouched: a stream made from it would not match a newer one. UserError: a bad
    `out`, or no document.
    """
    count = words = 0
    first, last = datetime.max, datetime.min
    make_directory(Path(out).parent)
    with (
        closing(documents),
        tqdm(documents, unit=" documents", disable=None, leave=False) as bar,
        atomic_write(out, "wb", keep_same=True) as file,
    ):
        for text, date, _ in bar:
            try:
                found = interval(date)
            except (ValueError, OverflowError):
                left_out["with an unreadable date"] += 1
                continue
            size = len(text.split())
            if most is not None and words + size > most:
                break
            record = {"text": text} if date is None else {"date": date, "text": text}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
            words += size
            if found:
                first, last = min(first, found[0]), max(last, found[0])
        omitted = ", ".join(f"{number:,} {what}" for what, number in left_out.items() if number)
        if not count:
            raise UserError(f"no document to write (left out: {omitted or 'none'})")
    dates = f", {first:%Y-%m-%d} to {last:%Y-%m-%d}" if first <= last else ""
    return f"{count:,} documents, {words:,} words{dates}" + (f"\nleft out: {omitted}" if omitted else "")


@command
def main() -> None:
    """Write the file and print what is in it."""
    arguments = parser().parse_intermixed_args()  # `git --out FILE REPOSITORY`, too
    (documents, default), out = RECIPES[arguments.recipe], arguments.out
    source = default if arguments.source is None else arguments.source
    if source is None:
        raise UserError("git: give the repository, such as `alma corpus git .`")
    if kind(out) not in (".jsonl", ".json"):
        raise UserError(f"--out {out}: name it {out}.jsonl, because `alma data` tells formats by suffix")
    left_out: Counter[str] = Counter()
    print(write(documents(source, left_out), out, left_out, arguments.max_words))


if __name__ == "__main__":
    main()
