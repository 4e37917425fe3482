"""The tables of docs/advice.md: made-up records and streams, then recorded runs.

python -m benchmarks advice --records 400 --worlds 16 runs/advice_mnist runs/time_git

It takes an hour and more.
"""

from collections.abc import Sequence

from alma.errors import Parser, UserError
from alma.report.advice.candidates import one_section
from alma.report.results import find_runs
from benchmarks import advice_calibration, cadence_calibration, waiting_rule
from benchmarks.backtest import backtest


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = Parser(prog="python -m benchmarks advice", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUNS", help="folders of runs, one stream each")
    add("--records", default="400", metavar="N", help="made-up records of a kind (default: 400)")
    add("--count", default="40", metavar="N", help="matrices of a kind and size (default: 40)")
    worlds = "deployments of a stream and ratio (default: 16)"
    add("--worlds", default="16", metavar="N", help=worlds)
    options = parser.parse_args(arguments)
    for place in options.runs:
        try:
            for part in backtest(one_section(find_runs([place]))):
                print(part.as_text(), end="\n\n", flush=True)
        except UserError as error:
            print(f"{place}: {error}\n")
        waiting_rule.main([place])
        print(flush=True)
    cadence_calibration.main(["--count", options.count, "--worlds", options.worlds])
    advice_calibration.main(["--records", options.records])
