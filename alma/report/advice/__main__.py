"""Advice from the records of runs: wait or train, grow or not, one model or several: `alma advise`."""

import argparse
import re
from pathlib import Path

from alma.errors import Parser, UserError, command, count
from alma.files import atomic_write, make_directory, write_json_atomic
from alma.help_texts import RUNS
from alma.report.advice import MEASURES
from alma.report.results import find_runs

_EXAMPLES = """\
examples:
  alma advise runs/mnist
  alma advise runs/mnist --budget 2TFLOPs --parameters 60k
  alma advise runs/mnist --from 100 --out advice
  alma advise runs/mnist --backtest
  alma advise --matrix losses.csv --groups '1b/*'
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m alma.report.advice",
        usage="%(prog)s [RUN...] [options]",
        description="Advice for the mega-batches to come, from runs on one stream: the front of error, "
        "compute and parameters, forecasts with 90% intervals, and what each decision is worth. On a stream "
        "that drifts, also how often to retrain.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add("runs", nargs="*", metavar="RUN", help=RUNS)
    matrix = "in place of runs, losses from elsewhere: a CSV file with the columns trained_until, tested_on, "
    matrix += "loss and, if there are several, model, domain and seed; repeatable"
    add("--matrix", type=Path, action="append", metavar="FILE", help=matrix)
    groups = "with --matrix: MODEL/DOMAIN, or patterns, such as 1b/news,'3b/*' (default: all, in turn)"
    add("--groups", type=lambda text: text.split(","), metavar="LIST", help=groups)
    by = "; ".join(f"{name}: {what}" for name, what in MEASURES.items())
    add("--by", choices=list(MEASURES), help=f"what is compared (default: coming). {by}")
    budget = "most training compute of a run up to the last mega-batch, such as 50TFLOPs (default: no limit)"
    add("--budget", type=_flops, metavar="FLOPS", help=budget)
    parameters = "most parameters of the model, such as 20M (default: no limit)"
    add("--parameters", type=count, metavar="N", help=parameters)
    now = "give the advice of mega-batch T: rows after it are not read (default: the last one)"
    add("--from", type=int, dest="now", metavar="T", help=now)
    backtest = (
        "look back: how often intervals held, how far forecasts were off, and the regret of the advice "
    )
    backtest += "beside that of naive rules"
    add("--backtest", action="store_true", help=backtest)
    out = "folder for advice.md and advice.json, or backtest.md and backtest.json (default: none)"
    add("--out", type=Path, metavar="DIR", help=out)
    return made


def _flops(text: str) -> float:
    """Compute in TFLOPs, such as 50TFLOPs."""
    return count(re.sub(r"flops?$", "", text, flags=re.IGNORECASE)) / 1e12


def _check(options: argparse.Namespace) -> None:
    """UserError: options that contradict each other."""
    given = [value is not None for value in (options.now, options.budget, options.parameters)]
    if bool(options.runs) == bool(options.matrix):
        raise UserError("give run directories, or --matrix FILE with losses from elsewhere")
    if options.groups and not options.matrix:
        raise UserError("--groups chooses among the losses of --matrix")
    if options.matrix and any([*given, options.by]):
        raise UserError("--by, --from, --budget and --parameters need runs: leave them out with --matrix")
    if options.backtest and any(given):
        raise UserError("--backtest tries all t and limits: leave out --from, --budget and --parameters")


@command
def main() -> None:
    """Entry point of `alma advise`."""
    options = parser().parse_args()
    _check(options)
    from alma.report.advice.advice import Advice, advise  # loads NumPy and SciPy, so the options come first
    from alma.report.advice.backtest import Backtest, look_back
    from alma.report.advice.candidates import one_section
    from alma.report.advice.choice import Limits
    from alma.report.advice.matrix import MatrixReport, read_groups, report_on
    from alma.report.advice.text import as_markdown, as_text

    by = options.by or "coming"
    report: Advice | Backtest | MatrixReport
    if options.matrix:
        report = report_on(read_groups(options.matrix, options.groups or ()), options.backtest)
    elif options.backtest:
        report = look_back(one_section(find_runs(options.runs)), by)
    else:
        section = one_section(find_runs(options.runs), options.now)
        report = advise(section, by, options.now, Limits(options.budget, options.parameters))
    print(as_text(report.parts))
    if options.out:
        stem = "backtest" if options.backtest else "advice"
        make_directory(options.out)
        with atomic_write(options.out / f"{stem}.md") as file:
            file.write(as_markdown(report.parts))
        write_json_atomic(options.out / f"{stem}.json", report.record())
        print(options.out / f"{stem}.md", options.out / f"{stem}.json", sep="\n")


if __name__ == "__main__":
    main()
