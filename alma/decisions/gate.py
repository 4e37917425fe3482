"""`alma gate`: may the newest model replace the deployed one?"""

from pathlib import Path

from alma.decisions.help_texts import EXIT_CODES, JSON, RUN
from alma.errors import Parser, command
from alma.report.advice.terms import worth_of

_EXAMPLES = f"""\
{EXIT_CODES} Only the record of the run is read: `alma test RUN` adds what is missing.

examples:
  alma gate runs/monthly
  alma gate runs/monthly --deployed 2024-05 --worth 1% --forget 2% --json
"""


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m alma.decisions.gate",
        usage="%(prog)s RUN [options]",
        description="May the newest model of a run replace the deployed one? Yes if it is better "
        "on the newest held-out part, by a 90% interval over the same documents or images.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add("run", type=Path, metavar="RUN", help=RUN)
    deployed = "the deployed model, by the mega-batch or period that it was trained until "
    deployed += "(default: the model before the newest)"
    add("--deployed", metavar="T", help=deployed)
    worth = "the gain must be above this: a loss, or percent of perplexity or points of error "
    worth += "(default: 0)"
    add("--worth", type=worth_of, default="0", metavar="LOSS|PERCENT", help=worth)
    forget = "the loss on the past, until the deployed model was trained, may rise by this at "
    forget += "most, as --worth (default: not asked)"
    add("--forget", type=worth_of, metavar="LOSS|PERCENT", help=forget)
    add("--json", action="store_true", help=JSON)
    return command_line


@command
def main() -> None:
    """Entry point of `alma gate`."""
    options = parser().parse_args()
    # these load NumPy, so the options come first
    from alma.decisions.answer import finish
    from alma.decisions.record import Record
    from alma.decisions.replacement import Margins, may_replace

    margins = Margins(options.worth, options.forget)
    answer = may_replace(Record.read(options.run), options.deployed, margins)
    finish(answer, options.json)


if __name__ == "__main__":
    main()
