"""Compare runs: a table, and on request a page, Markdown, CSV and figures: `alma report`."""

import sys
from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from alma.help_texts import RUNS
from alma.report import differences
from alma.report.files import write_report
from alma.report.lm import figures as lm_figures
from alma.report.lm import tables as lm_tables
from alma.report.lm.entries import find_entries
from alma.report.page import write_page
from alma.report.results import find_runs, group, left_out
from alma.report.scores import BITS, scored
from alma.report.selection import CHOOSABLE, SELECTIONS, best_by_validation
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
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m alma.report",
        usage="%(prog)s RUN... [options]",
        description="Compare runs: print a table for each data set: cumulative error, parameters, FLOPs.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add("runs", nargs="+", metavar="RUN", help=RUNS)
    select = "keep the settings with the best validation score, for each learner, waiting time and replay; "
    select += "valid: mean over t since the first stage; valid-first: after the first stage, as in the paper"
    add("--select", choices=SELECTIONS, help=select)
    hold = "with --select: settings to keep apart too, such as average,schedule,hidden (default: choose "
    add("--hold", metavar="NAMES", help=hold + "among all of them)")
    choose = f"with --select: settings to choose too, of {', '.join(CHOOSABLE)}"
    add("--choose", metavar="NAMES", help=choose)
    number = f"compare runs by {BITS} of the test text, which compares tokenizers too, or by a score of "
    add("--metric", metavar="NAME", help=number + "`alma train --evaluate` (default: perplexity or error)")
    baseline = "add a table of the differences from this configuration, paired by seed, with 90%% intervals; "
    baseline += 'LABEL: the learner as in the table or, with w and replay, as in figures, such as "sm w=1"'
    add("--baseline", metavar="LABEL", help=baseline)
    out = "folder for report.md, report.csv and figures (default: none; report with --figures)"
    add("--out", type=Path, metavar="DIR", help=out)
    page = "write a page too: one self-contained file, such as report.html"
    add("--html", type=Path, metavar="FILE", help=page)
    figures = "draw the figures of the paper for image runs (vision) or language models (lm)"
    add("--figures", choices=("vision", "lm"), help=figures)
    table = "print Tables 1 and 2 of the paper for language models; with --out write them as Markdown, too"
    add("--table", choices=("lm",), help=table)
    return made


@command
def main() -> None:
    """Entry point of `python -m alma.report`."""
    options = parser().parse_args()
    for_lm = "lm" in (options.table, options.figures)
    for flag in ("hold", "choose"):
        if getattr(options, flag) and not options.select:
            raise UserError(f"--{flag} needs --select valid or valid-first")
    damaged: list[str] = []
    runs = find_runs(options.runs, damaged)
    if options.metric:
        runs = scored(runs, options.metric)
    if options.figures == "vision" and not any(map(is_image, runs)):
        raise UserError(f"no image run in {', '.join(options.runs)}, which --figures vision needs")
    choices: list[str] = []
    if options.select:
        hold, choose = (names.split(",") if names else [] for names in (options.hold, options.choose))
        runs, choices = best_by_validation(runs, options.select, hold, choose)
    groups = group(runs)
    if not groups:
        raise UserError(f"no rows yet in {', '.join(options.runs)}: nothing has been evaluated so far")
    grouped = [result for results in groups for result in results]
    counted, not_counted = {id(run) for result in grouped for run in result.runs}, left_out(grouped)
    runs = [run for run in runs if id(run) in counted or not run.rows]
    baselines = differences.find_baselines(groups, options.baseline)
    entries, lm_remarks = find_entries(runs) if for_lm else ({}, [])
    tables, missing = lm_tables.tables(entries) if options.table else ({}, [])
    printed = list(tables.values())
    for baseline, results in zip(baselines, groups, strict=True):
        printed += differences.tables(results, baseline)[bool(tables) :]  # Table 2 replaces the general one
    for table in printed:
        print(table.as_text(), end="\n\n")
    remarks = [
        *damaged,
        *choices,
        *not_counted,
        *(f"no rows yet: {run.directory}" for run in runs if not run.rows),
    ]
    for remark in [*remarks, *lm_remarks, *missing]:
        print(remark)
    if options.html:
        write_page(runs, options.html, remarks, options.baseline)
        print(options.html)
    out = options.out or (Path("report") if options.figures else None)
    if out is None:
        sys.exit(1 if damaged else 0)
    make_directory(out)
    pictures, missing = None, []
    if options.figures == "vision":
        pictures, missing = vision_figures.write_paper_figures(runs, out)
    elif options.figures == "lm":
        pictures, missing = lm_figures.write_figures(entries, out)
    lines = [*damaged, *choices, *not_counted]
    written = write_report(groups, runs, out, pictures, tables, lines, baselines)
    print(*missing, *written, sep="\n")
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    main()
