"""Write text that every machine has as JSON lines: `alma corpus`."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import orjson
from tqdm import tqdm

from alma.dates import interval
from alma.errors import Parser, UserError, command, count
from alma.files import atomic_write, make_directory
from data_prep.compressed import Document
from data_prep.corpus import git, pydoc
from data_prep.formats import kind


class Recipe(NamedTuple):
    """A way to make documents."""

    documents: Callable[[str, Counter[str]], Generator[Document, None, None]]
    """Yields each document of SOURCE; counts those that it leaves out, by the reason."""
    source: str | None  # default of SOURCE; None: SOURCE must be given


RECIPES = {"git": Recipe(git.documents, None), "pydoc": Recipe(pydoc.documents, "")}
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
    command_line = Parser(
        prog="python -m data_prep.corpus",
        usage="%(prog)s git REPOSITORY --out FILE.jsonl [--max-words N]\n"
        "       %(prog)s pydoc [topics|stdlib|packages] --out FILE.jsonl [--max-words N]",
        description="Write text that every machine has as JSON lines for `alma data`, without a "
        "download. Commits are dated, so `alma data --by year` makes a stream that drifts.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    recipe = (
        "git: the messages of the commits before HEAD; pydoc: the documentation of Python and of "
    )
    recipe += "installed packages, without dates"
    add("recipe", choices=RECIPES, metavar="RECIPE", help=recipe)
    parts = f"{', '.join(pydoc.PARTS[:-1])} or {pydoc.PARTS[-1]}"
    source = f"git: a repository; pydoc: {parts} (default: all)"
    add("source", nargs="?", metavar="SOURCE", help=source)
    add("--out", required=True, metavar="FILE.jsonl", help="file to write")
    words = "stop before the document that would exceed N words (default: write all)"
    add("--max-words", type=count, metavar="N", help=words)
    return command_line


def write(
    documents: Generator[Document, None, None],
    out: str,
    left_out: Counter[str],
    max_words: int | None = None,
) -> str:
    """Write a JSON line {"date": ..., "text": ...} for each document up to `max_words` words.

    `date` is left out if the document has none. Documents whose date `alma data` cannot read are
    counted in `left_out`. If the file already has the same bytes, it keeps its modification time;
    otherwise a stream made from it would no longer match it. Returns a summary with dates in UTC.
    Raises UserError for a bad `out`, or if there is no document.
    """
    count = 0
    words = 0
    first = datetime.max
    last = datetime.min
    make_directory(Path(out).parent)
    with (
        closing(documents),
        tqdm(documents, unit=" documents", disable=None, leave=False) as progress,
        atomic_write(out, "wb", keep_same=True) as file,
    ):
        for text, date, _ in progress:
            try:
                days = interval(date)
            except (ValueError, OverflowError):
                left_out["with an unreadable date"] += 1
                continue
            size = len(text.split())
            if max_words is not None and words + size > max_words:
                break
            record = {"text": text} if date is None else {"date": date, "text": text}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
            words += size
            if days:
                first = min(first, days[0])
                last = max(last, days[0])
        omitted = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
        if not count:
            raise UserError(f"no document to write (left out: {omitted or 'none'})")
    summary = f"{count:,} documents, {words:,} words"
    if first <= last:
        summary += f", {first:%Y-%m-%d} to {last:%Y-%m-%d}"
    if omitted:
        summary += f"\nleft out: {omitted}"
    return summary


@command
def main() -> None:
    """Write the file and print what is in it."""
    arguments = parser().parse_intermixed_args()  # `git --out FILE REPOSITORY`, too
    recipe = RECIPES[arguments.recipe]
    out = arguments.out
    source = recipe.source if arguments.source is None else arguments.source
    if source is None:
        raise UserError("git: give the repository, such as `alma corpus git .`")
    if kind(out) not in (".jsonl", ".json"):
        reason = "because `alma data` tells formats by suffix"
        raise UserError(f"--out {out}: name it {out}.jsonl, {reason}")
    left_out: Counter[str] = Counter()
    print(write(recipe.documents(source, left_out), out, left_out, arguments.max_words))


if __name__ == "__main__":
    main()
