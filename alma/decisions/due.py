"""`alma due`: is a training due now?"""

import math
from pathlib import Path

from alma.decisions.help_texts import EXIT_CODES, JSON, RUN
from alma.errors import Parser, command, count
from alma.report.advice.terms import PRICE, price_of

_EXAMPLES = f"""\
{EXIT_CODES} Only the record of the run is read: `alma test RUN` adds what arrived.

examples:
  alma due runs/monthly --every 3
  alma due runs/monthly --price 400/1000 --json
"""


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m alma.decisions.due",
        usage="%(prog)s RUN [options]",
        description="Is a training due now? Yes if the last losses of the newest model are out of "
        "the usual, by the calendar with --every, by what a training costs with --price.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add("run", type=Path, metavar="RUN", help=RUN)
    every = "due once N periods arrived since the newest model was trained (default: no calendar)"
    add("--every", type=count, metavar="N", help=every)
    price = f"{PRICE}. Due if the plan of least cost trains now (default: no plan)"
    add("--price", type=price_of, default=(math.nan, 0.0), metavar="PRICE", help=price)
    add("--json", action="store_true", help=JSON)
    return command_line


@command
def main() -> None:
    """Entry point of `alma due`."""
    options = parser().parse_args()
    # these load NumPy and SciPy, so the options come first
    from alma.decisions.answer import finish
    from alma.decisions.record import Record
    from alma.decisions.training import Terms, is_due

    terms = Terms(options.every, *options.price)
    finish(is_due(Record.read(options.run), terms), options.json)


if __name__ == "__main__":
    main()
