"""Compare runs: a table, and on request a page, Markdown, CSV and figures: `alma report`."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from alma.help_texts import RUNS
from alma.options import names_of
from alma.records import Run
from alma.report import compare, differences
from alma.report.advice.trackers.flags import add_report_flags, check_report_flags
from alma.report.files import write_report
from alma.report.lm import figures as lm_figures
from alma.report.lm import tables as lm_tables
from alma.report.lm.entries import Entry, find_entries
from alma.report.page import write_page
from alma.report.periods import holes
from alma.report.results import Result, find_runs, group, left_out
from alma.report.scores import BITS, scored
from alma.report.selection import CHOOSABLE, SELECTIONS, best_by_validation
from alma.report.style import Picture
from alma.report.tables import TitledTable
from alma.report.vision import figures as vision_figures
from alma.report.vision.select import is_image

_EXAMPLES = """\
Exit code 1: a run was left out, because its run.json or results.jsonl is damaged.

examples:
  alma report runs
  alma report runs --html report.html
  alma report runs/mnist --figures vision --out report
  alma report runs/tune --select valid-first
  alma report runs --baseline "sm w=1"
  alma report runs/table2 --table lm
  alma report runs --metric bits-per-byte
  alma report runs --mlflow http://localhost:5000 --experiment digits
"""


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="python -m alma.report",
        usage="%(prog)s RUN... [options]",
        description="Compare runs: print a table for each data set: cumulative error, parameters, "
        "FLOPs.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add("runs", nargs="+", metavar="RUN", help=RUNS)
    add(
        "--select",
        choices=SELECTIONS,
        help="keep the settings with the best validation score, for each learner, waiting time and "
        "replay; valid: mean over t since the first stage; valid-first: after the first stage, as "
        "in the paper",
    )
    add(
        "--hold",
        metavar="NAMES",
        help="with --select: settings to keep apart too, such as average,schedule,hidden (default: "
        "choose among all of them)",
    )
    add(
        "--choose",
        metavar="NAMES",
        help=f"with --select: settings to choose too, of {', '.join(CHOOSABLE)}",
    )
    add(
        "--metric",
        metavar="NAME",
        help=f"compare runs by {BITS} of the test text, which compares tokenizers too, or by a "
        "score of `alma train --evaluate` (default: perplexity or error)",
    )
    add(
        "--baseline",
        metavar="LABEL",
        help="add a table of the differences from this configuration, paired by seed, with 90%% "
        "intervals; LABEL: the learner as in the table or, with w and replay, as in figures, such "
        'as "sm w=1"',
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for report.md, report.csv and figures (default: none; report with --figures)",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page too: one self-contained file, such as report.html",
    )
    add(
        "--figures",
        choices=("vision", "lm"),
        help="draw the figures of the paper for image runs (vision) or language models (lm)",
    )
    add(
        "--draw",
        **names_of(vision_figures.FIGURES) | {"metavar": "FIGURE,..."},
        default=[],
        help="with --figures vision: draw these only (default: all that the runs support)",
    )
    add(
        "--table",
        choices=("lm",),
        help="print Tables 1 and 2 of the paper for language models; with --out write them as "
        "Markdown, too",
    )
    add_report_flags(command_line)
    return command_line


@dataclass
class Report:
    """The content of a report, which `print` and `write` show."""

    runs: list[Run]  # runs that count, and runs without rows yet
    groups: list[list[Result]]  # the results of each general table
    baselines: list[Result | None]  # the baseline of each group (--baseline), if any
    left_out: list[str]  # lines on runs left out, not chosen, not tested everywhere
    entries: dict[str, list[Entry]]  # rows of the paper's Table 2 and Figure 5
    tables: dict[str, TitledTable]  # of the paper, by file name without suffix
    paper_remarks: list[str]  # lines about runs that the paper's tables leave out

    @property
    def remarks(self) -> list[str]:
        """Lines about runs that are left out, or without rows."""
        empty = [f"no rows yet: {run.directory}" for run in self.runs if not run.rows]
        return [*self.left_out, *empty]

    def print(self) -> None:
        """Print the tables, then the remarks."""
        printed = list(self.tables.values())
        for baseline, results in zip(self.baselines, self.groups, strict=True):
            has_general = not self.tables  # Table 2 replaces the general one
            printed += differences.tables(results, baseline, has_general)
        for table in printed:
            print(table.as_text(), end="\n\n")
        for remark in [*self.remarks, *self.paper_remarks]:
            print(remark)

    def write(self, out: Path, figures: str | None, names: Sequence[str] = ()) -> None:
        """Write the files, with the paper's `figures` (of image runs those of `names`) or the
        general ones; print their paths."""
        make_directory(out)
        pictures: list[Picture] | None = None
        missing: list[str] = []
        if figures == "vision":
            pictures, missing = vision_figures.write_paper_figures(self.runs, out, names)
        elif figures == "lm":
            pictures, missing = lm_figures.write_figures(self.entries, out)
        written = write_report(
            self.groups, self.runs, out, pictures, self.tables, self.left_out, self.baselines
        )
        print(*missing, *written, sep="\n")


def read_report(options: argparse.Namespace, damaged: list[str]) -> Report:
    """The report on the runs of a command line; `damaged` gets a line for each damaged run.

    UserError: there are no runs to report on, or an option does not fit them.
    """
    if options.draw and options.figures != "vision":
        raise UserError("--draw needs --figures vision")
    runs = find_runs(options.runs, damaged)
    if options.metric:
        runs = scored(runs, options.metric)
    places = ", ".join(options.runs)
    if options.figures == "vision" and not any(map(is_image, runs)):
        raise UserError(f"no image run in {places}, which --figures vision needs")
    choices: list[str] = []
    if options.select:
        hold = options.hold.split(",") if options.hold else []
        choose = options.choose.split(",") if options.choose else []
        runs, choices = best_by_validation(runs, options.select, hold, choose)
    groups = group(runs)
    if not groups:
        raise UserError(f"no rows yet in {places}: nothing has been evaluated so far")
    grouped = list(itertools.chain(*groups))
    counted = {id(run) for result in grouped for run in result.runs}
    runs = [run for run in runs if id(run) in counted or not run.rows]
    baselines = differences.find_baselines(groups, options.baseline)
    entries: dict[str, list[Entry]] = {}
    paper_remarks: list[str] = []
    if options.table or options.figures == "lm":
        entries, paper_remarks = find_entries(runs)
    tables: dict[str, TitledTable] = {}
    if options.table:
        tables, missing = lm_tables.tables(entries)
        paper_remarks += missing
        for results in groups:
            paper_remarks += compare.lacking(results)
    lines = [*damaged, *choices, *left_out(grouped), *holes(grouped)]
    return Report(runs, groups, baselines, lines, entries, tables, paper_remarks)


@command
def main() -> None:
    """Entry point of `python -m alma.report`."""
    options = parser().parse_args()
    for flag in ("hold", "choose"):
        if getattr(options, flag) and not options.select:
            raise UserError(f"--{flag} needs --select valid or valid-first")
    check_report_flags(options)
    damaged: list[str] = []
    report = read_report(options, damaged)
    report.print()
    if options.html:
        write_page(report.runs, options.html, report.remarks, options.baseline)
        print(options.html)
    if options.out:
        report.write(options.out, options.figures, options.draw)
    elif options.figures:
        report.write(Path("report"), options.figures, options.draw)
    if options.mlflow:
        from alma.report.advice.trackers.sending import send  # loads what `alma advise` needs

        print(*send(options.mlflow, report.runs, options.experiment, report.remarks), sep="\n")
    if damaged:
        sys.exit(1)


if __name__ == "__main__":
    main()
