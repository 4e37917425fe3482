"""`alma advise`: advice from the records of runs on what to do with the mega-batches to come."""

import argparse
import itertools
import math
import re
import sys
from pathlib import Path

from alma.errors import Parser, UserError, command, count, number_list
from alma.files import atomic_write, make_directory, write_json_atomic
from alma.help_texts import RUNS
from alma.report.advice.metric_of_column import NAMES, MetricOptions
from alma.report.advice.terms import PRICE, bounds_of, price_of, worth_of
from alma.report.advice.trackers.flags import add_flags, check_flags
from alma.report.results import find_runs

_MOST_CADENCES = 20
_RAREST = 1000  # largest cadence, in periods between trainings
_FLOPS = re.compile("flops?$", re.IGNORECASE)
_EXAMPLES = """\
Exit code 1: a run was left out, because its run.json or results.jsonl is damaged.

examples:
  alma advise runs/mnist
  alma advise runs/mnist --from 100 --budget 2TFLOPs --out advice
  alma advise runs/mnist --brief advice.html
  alma advise --matrix accuracy.csv --worth 0.5%
  alma advise --matrix scores.csv --metric score --higher-is-better --bounds 0,1
  alma advise --matrix losses.csv --groups '1b/*' --every 1,3,12 --price 0.05
  alma advise --mlflow churn --metric accuracy --tracking-uri http://localhost:5000
"""


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m alma.report.advice",
        usage="%(prog)s [RUN...] [options]",
        description="Advice for the mega-batches to come, from runs on one stream: the learner "
        "with the lowest expected error, and what each decision is worth, with 90% intervals. "
        "On a stream that drifts, also how often to retrain.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add("runs", nargs="*", metavar="RUN", help=RUNS)
    matrix = "in place of runs, values from elsewhere: a CSV file with the columns trained_until, "
    matrix += "tested_on, a metric such as loss (nats a token) or accuracy and, if there are "
    matrix += "several, model, domain and seed; repeatable"
    add("--matrix", type=Path, action="append", metavar="FILE", help=matrix)
    add_flags(command_line)
    metric = "with --matrix: the column with the values, or what the only such column has: "
    metric += f"{NAMES} (default: by the name of the column)"
    add("--metric", default="", metavar="NAME", help=metric)
    direction = command_line.add_mutually_exclusive_group()
    for better in ("higher", "lower"):
        text = f"with --matrix: {better} values of the metric are better"
        flag = f"--{better}-is-better"
        is_higher = better == "higher"
        direction.add_argument(
            flag, dest="higher_is_better", action="store_const", const=is_higher, help=text
        )
    bounds = "with --matrix: lowest and highest value that the metric can have, such as 0,1 or "
    bounds += "0,inf; no forecast leaves them (default: those of a known metric)"
    add("--bounds", type=bounds_of, metavar="LOW,HIGH", help=bounds)
    groups = "with --matrix: MODEL/DOMAIN, or patterns, such as 1b/news,'3b/*' "
    groups += "(default: all, in turn)"
    add("--groups", type=lambda text: text.split(","), metavar="LIST", help=groups)
    budget = "most training compute of a run to come, such as 50TFLOPs (default: no limit)"
    add("--budget", type=_budget, metavar="FLOPS", help=budget)
    every = "how often to retrain: cadences in periods, such as 1,3,12 "
    every += "(default: as far as the data reach)"
    add("--every", type=_cadences, default=(), metavar="LIST", help=every)
    worth = "a gain below this is a tie: a number in the unit of the answer, or percent: of "
    worth += "perplexity, percentage points of accuracy or error, of the mean of other metrics "
    worth += "(default: 1%%)"
    add("--worth", type=worth_of, default="1%", metavar="LOSS|PERCENT", help=worth)
    price = f"{PRICE}. Gives one plan: when to retrain first, and how often then (default: no plan)"
    add("--price", type=price_of, default=(math.nan, 0.0), metavar="PRICE", help=price)
    now = "give the advice of mega-batch T: rows after it are not read (default: the last one)"
    add("--from", type=int, dest="now", metavar="T", help=now)
    brief = "one screen for readers who know no nats, with a picture: "
    brief += "to FILE.html or FILE.md, or printed"
    add("--brief", nargs="?", type=Path, const=Path(), metavar="FILE", help=brief)
    out = "folder for advice.md and advice.json (default: none)"
    add("--out", type=Path, metavar="DIR", help=out)
    return command_line


def _budget(text: str) -> float:
    """TFLOPs from a number of FLOPs with a prefix, such as 50TFLOPs."""
    return count(_FLOPS.sub("", text)) / 1e12


def _cadences(text: str) -> list[int]:
    """Two or more whole numbers from 1 to _RAREST."""
    cadences = number_list(text)
    is_list = 2 <= len(cadences) <= _MOST_CADENCES
    if not is_list or not 0 < min(cadences) <= max(cadences) <= _RAREST:
        form = f"from 2 to {_MOST_CADENCES} whole numbers from 1 to {_RAREST}, such as 1,3,12"
        raise argparse.ArgumentTypeError(f"{text!r}: {form}")
    return cadences


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError if options contradict one another."""
    brief = options.brief
    if brief and brief.name and brief.suffix not in (".md", ".html"):
        raise UserError(f"--brief {brief}: give a .md or .html file, or --brief after the runs")
    check_flags(options)
    reads_values = bool(options.matrix or options.mlflow)
    if bool(options.runs) == reads_values:
        both = ", not both" if options.runs else ""
        raise UserError(f"give run directories, or --matrix FILE with losses from elsewhere{both}")
    out = options.out
    if out and out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a folder and cannot become one: choose another --out")
    if options.groups and not reads_values:
        raise UserError("--groups chooses among the losses of --matrix")
    of_metric = options.metric or options.bounds or options.higher_is_better is not None
    if of_metric and not reads_values:
        raise UserError(
            "--metric, --bounds, --higher-is-better and --lower-is-better tell what the values of "
            "--matrix are: leave them out with runs"
        )
    if reads_values and (options.now is not None or options.budget is not None):
        raise UserError("--from and --budget need runs: leave them out with --matrix")


@command
def main() -> None:
    """Entry point of `alma advise`."""
    options = parser().parse_args()
    _check(options)
    # These imports load NumPy and SciPy, so the options are parsed before.
    from alma.report.advice.advice import Advice, advise
    from alma.report.advice.brief import write_brief
    from alma.report.advice.candidates import one_section
    from alma.report.advice.matrix import groups_of, read_groups
    from alma.report.advice.retraining_table import MatrixReport
    from alma.report.advice.shortage import NEEDS
    from alma.report.advice.trackers.decisions import log_advice
    from alma.report.advice.trackers.layouts import Reading
    from alma.report.advice.trackers.reading import read_matrix
    from alma.report.tables import TitledTable

    report: Advice | MatrixReport
    price, money = options.price
    damaged: list[str] = []
    terms = {"every": options.every, "worth": options.worth, "price": price, "money": money}
    experiment = options.mlflow or ""
    reading = Reading(experiment, options.metric, options.model_date_tag, options.period_tag)
    remarks: list[str] = []
    if options.matrix or options.mlflow:
        of_metric = MetricOptions(options.metric, options.higher_is_better, options.bounds)
        if options.mlflow:
            matrix = read_matrix(options.tracking_uri or "", reading)
            groups = groups_of([matrix.table], options.groups or (), of_metric)
            remarks = matrix.remarks
        else:
            groups = read_groups(options.matrix, options.groups or (), of_metric)
        report = MatrixReport(groups, **terms)
    else:
        section = one_section(find_runs(options.runs, damaged), options.now)
        report = advise(section, options.now, options.budget, **terms)
        has_answer = report.retraining or report.shortage
        if report.asks_how_often and report.choice and not has_answer:
            raise UserError(f"--every and --price are for a stream that drifts. {NEEDS}")
    if options.brief:
        print(write_brief(report, options.brief if options.brief.name else None))
    else:
        print("\n\n".join(part.as_text() for part in report.parts))
    if remarks:
        print("", *remarks, sep="\n")
    if options.log_decision and isinstance(report, MatrixReport):
        print(log_advice(options.tracking_uri or "", reading, report))
    if options.out:
        make_directory(options.out)
        with atomic_write(options.out / "advice.md") as file:
            levels = itertools.chain(["#"], itertools.repeat("##"))
            blocks = itertools.chain(*map(TitledTable.as_markdown, report.parts, levels))
            file.write("\n\n".join(blocks) + "\n")
        write_json_atomic(options.out / "advice.json", report.record())
        print(options.out / "advice.md", options.out / "advice.json", sep="\n")
    if damaged:
        print(*damaged, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
