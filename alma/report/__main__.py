"""Compare runs: a table in the terminal; with --out also Markdown, CSV and figures.

python -m alma.report RUN... [--select valid] [--out DIR] [--figures vision|lm] [--table lm] [--per-word]
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alma import metrics
from alma.errors import Parser, UserError, command
from alma.files import atomic_write, make_directory
from alma.records import Run, flatten
from alma.report.lm import figures as lm_figures
from alma.report.lm import tables as lm_tables
from alma.report.results import Result, Rows, column, compute, find_runs, group, memory, trained, validation
from alma.report.selection import select
from alma.report.tables import (
    Sheet,
    Table,
    as_markdown,
    as_text,
    sheet_as_csv,
    sheet_as_latex,
    sheet_as_markdown,
    sheet_as_text,
)
from alma.report.vision import figures as vision_figures
from alma.report.vision.entries import is_image
from alma.report.vision.figures import Picture

CUMULATIVE = {
    "error": ("CER", metrics.cumulative_error_rate),
    "perplexity": ("cumulative PPL", metrics.cumulative_perplexity),
}
NOTE = """\
* no stage complete yet: the untrained model is evaluated, and counts in average and {cumulative}.
Average and {cumulative} are over t = 1..B (eq. 1 of the paper's final version; earlier ones start at 0); \
Mem (parameters) and Comp (training) over t = 0..B.
± is the sample standard deviation over n seeds."""
WAITED = """
The untrained {unit} is not the same for all learners: it is the luck of the initial weights. {cumulative} \
trained is the sum from the first trained stage on: compare it at equal w."""
VALIDATED = """
Validation is the mean {unit} on the learner's own validation data, over t since the first stage."""


def table(results: Sequence[Result]) -> Table:
    """One row per configuration for results of the same metric and the same B."""
    times = _columns(results[0].config["megabatches"])
    cumulative, _ = CUMULATIVE[results[0].metric]
    header = ["learner", "w", "replay", "n", "experts", "parameters", "untrained"]
    header += [*(f"t={t}" for t in times), "average", "validation", cumulative, f"{cumulative} trained"]
    lines = [[*header, "Mem", "Comp (TFLOPs)"], *(_line(result, times) for result in results)]
    hidden = {"experts", "validation"} - {
        name for i, name in enumerate(header) if any(line[i] for line in lines[1:])
    }
    if not any(map(_waits, results)):
        hidden.add(f"{cumulative} trained")  # the same as without
    kept = [i for i, name in enumerate(lines[0]) if name not in hidden]
    return [[line[i] for i in kept] for line in lines]


def _waits(result: Result) -> bool:
    """Whether an untrained model counts."""
    return any(result.waiting(t) for t in result.times if t >= 1)


def _columns(megabatches: int) -> list[int]:
    """The t to show: all of a short stream, else the first, the quarters and the last."""
    if megabatches <= 8:
        return list(range(1, megabatches + 1))
    return sorted({1, *(round(megabatches * quarter / 4) for quarter in (1, 2, 3)), megabatches})


def _line(result: Result, times: Sequence[int]) -> list[str]:
    done, total = result.progress, result.config["megabatches"]
    _, cumulative = CUMULATIVE[result.metric]
    learnt = bool(trained(result.repeats[0]))
    scored = learnt and all(map(validation, result.repeats))

    def value(t: int) -> str:
        return _spread(result, lambda rows: result.scale * rows[t]["value"]) if t in result.times else ""

    flops, _ = result.over_seeds(compute)
    mark = f"{'not finished, ' if result.unfinished else ''}t={done}/{total}"
    return [
        f"{result.learner} ({mark})" if done < total else result.learner,
        str(result.config["waiting_time"]),
        "yes" if result.config["replay"] else "no",
        str(len(result.repeats)),
        _experts(result),
        _si(result.over_seeds(lambda rows: rows[result.times[-1]]["parameters"])[0]),
        value(0),
        *("*" if t in result.times and result.waiting(t) else value(t) for t in times),
        _spread(result, lambda rows: result.scale * metrics.average(column(rows, "value"))) if done else "",
        _spread(result, lambda rows: result.scale * metrics.average(validation(rows))) if scored else "",
        _spread(result, lambda rows: cumulative(column(rows, "value"))) if done else "",
        _spread(result, lambda rows: cumulative({t: rows[t]["value"] for t in trained(rows)}))
        if learnt
        else "",
        _si(result.over_seeds(memory)[0]),
        f"{flops:{_style(flops)}}",
    ]


def _experts(result: Result) -> str:
    """Experts at the first and the last t, such as 4->12, where the rows tell."""
    known = [row["extra"]["experts"] for row in result.repeats[0].values() if "experts" in row["extra"]]
    ends = [str(known[0]), str(known[-1])] if known else []
    return "->".join(dict.fromkeys(ends))


def _spread(result: Result, measure: Callable[[Rows], float]) -> str:
    """Mean of a measure over the seeds, with its deviation (in the same decimals) when there are several."""
    mean, deviation = result.over_seeds(measure)
    style = _style(mean)
    return f"{mean:{style}} ±{deviation:{style}}" if len(result.repeats) > 1 else f"{mean:{style}}"


def _style(value: float) -> str:
    return ",.0f" if value >= 1000 else ".2f" if value >= 0.1 or not value else ".2g"


def _si(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:  # what rounds to 1000M is 1G
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"


def heading(results: Sequence[Result]) -> str:
    """What the numbers of a table are."""
    return f"Test {results[0].unit} after mega-batch t, B = {results[0].config['megabatches']}"


def _write_sheets(sheets: Mapping[str, Sheet], out: Path) -> list[Path]:
    """Each of the paper's tables as Markdown, CSV and LaTeX in `out`; returns their paths."""
    written = []
    for stem, sheet in sheets.items():
        texts = {".csv": sheet_as_csv(sheet), ".tex": sheet_as_latex(sheet)}
        texts[".md"] = sheet_as_markdown(sheet) + "\n"
        for suffix, text in texts.items():
            written.append(out / f"{stem}{suffix}")
            with atomic_write(written[-1]) as file:
                file.write(text)
    return written


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """All rows of all runs, long: one line per run and t, with every setting and every field."""
    records: list[dict[str, Any]] = []
    for run in runs:
        config = {f"config.{key}": value for key, value in flatten(run.config).items()}
        for row in run.rows:
            trained_on = " ".join(map(str, row["trained_on"]))
            records.append({"run": str(run.directory), **config, **flatten(row), "trained_on": trained_on})
    fields = dict.fromkeys(key for record in records for key in record)
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def write_report(
    tables: Sequence[Sequence[Result]],
    runs: Sequence[Run],
    out: Path,
    papers: Sequence[Picture] | None = None,
    sheets: Mapping[str, Sheet] | None = None,
    choices: Sequence[str] = (),
) -> list[Path]:
    """Figures, report.csv and report.md in `out`, and files of each of `sheets`; returns their paths. The
    figures are those of `papers` (drawn by `vision.figures` or `lm.figures`); None: the general ones.
    `choices` are the lines of `alma.report.selection`."""
    from alma.report import figures

    make_directory(out)
    written = [out / "report.md", out / "report.csv", *_write_sheets(sheets or {}, out)]
    parts = ["# ALMA report", *choices, *(sheet_as_markdown(sheet) for sheet in (sheets or {}).values())]
    for results in tables:
        pictures = figures.draw(results, out) if papers is None else []
        parts += [f"## {heading(results)}", as_markdown(table(results)), _note(results).replace("*", "\\*")]
        parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
        written += pictures
    if papers:
        parts += [
            "## Figures",
            "Bands and bars are ±1 standard deviation over seeds, where there are several.",
        ]
    for path, caption in papers or []:
        parts += [f"![{path.stem}]({path.name})", caption]
        written.append(path)
    parts += ["## Runs", as_markdown(_provenance(runs))]
    write_csv(runs, out / "report.csv")
    with atomic_write(out / "report.md") as file:
        file.write("\n\n".join(parts) + "\n")
    return written


def _provenance(runs: Sequence[Run]) -> Table:
    lines = [["run", "seed", "started", "commit"]]
    for run in runs:
        known = (run.config["seed"], run.info.get("created"), run.info.get("commit"))
        lines.append([str(run.directory), *map(str, known)])
    return lines


def _remarks(runs: Sequence[Run]) -> list[str]:
    """Runs that the tables leave out, or count as repeats although they are copies."""
    same: dict[str, list[str]] = {}
    for run in runs:
        same.setdefault(json.dumps(run.config, sort_keys=True), []).append(str(run.directory))
    copies = [places for places in same.values() if len(places) > 1]
    return [
        *(f"no rows yet: {run.directory}" for run in runs if not run.rows),
        *(f"same settings and same seed, yet counted as repeats: {', '.join(places)}" for places in copies),
    ]


def _note(results: Sequence[Result]) -> str:
    text = NOTE + WAITED * any(map(_waits, results))
    text += VALIDATED * any(validation(rows) for result in results for rows in result.repeats)
    return text.format(cumulative=CUMULATIVE[results[0].metric][0], unit=results[0].metric)


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m alma.report", description="Compare runs.")
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder that holds some")
    made.add_argument(
        "--select",
        choices=("valid",),
        help="of each learner, waiting time and replay keep the configuration with the best validation score",
    )
    made.add_argument("--out", type=Path, help="also write report.md, report.csv and figures there")
    made.add_argument(
        "--figures",
        choices=("vision", "lm"),
        help="draw the paper's figures of image runs or of language models, in --out or else report/",
    )
    made.add_argument(
        "--table",
        choices=("lm",),
        help="print the paper's Tables 1 and 2 of language models; with --out also .md, .csv and .tex",
    )
    made.add_argument(
        "--per-word", action="store_true", help="of --table lm and --figures lm: perplexity per word"
    )
    return made


@command
def main() -> None:
    """Entry point of `python -m alma.report`."""
    options = parser().parse_args()
    if options.per_word and "lm" not in (options.table, options.figures):
        raise UserError("--per-word is of --table lm and --figures lm: give one of them")
    runs = find_runs(options.runs)
    if options.figures == "vision" and not any(map(is_image, runs)):
        raise UserError(f"no image run in {', '.join(options.runs)}: --figures vision draws those alone")
    runs, choices = select(runs) if options.select else (runs, [])
    tables = group(runs)
    if not tables:
        raise UserError(f"no rows yet in {', '.join(options.runs)}: nothing has been evaluated so far")
    for_lm = "lm" in (options.table, options.figures)
    entries, remarks = lm_tables.entries(runs, options.per_word) if for_lm else ({}, [])
    sheets, missing = lm_tables.tables(entries, options.per_word) if options.table else ({}, [])
    shown = [sheet_as_text(sheet) for sheet in sheets.values()]
    shown += [] if sheets else [f"{heading(r)}\n{as_text(table(r))}\n{_note(r)}" for r in tables]
    for text in shown:
        print(text, end="\n\n")
    for remark in [*choices, *_remarks(runs), *remarks, *missing]:
        print(remark)
    out = options.out or (Path("report") if options.figures else None)
    if out is None:
        return
    make_directory(out)
    pictures = None
    if options.figures:
        vision = options.figures == "vision"
        drawn = vision_figures.draw(runs, out) if vision else lm_figures.draw(entries, out, options.per_word)
        pictures, undrawn = drawn
        for remark in undrawn:
            print(remark)
    print(*write_report(tables, runs, out, pictures, sheets, choices), sep="\n")


if __name__ == "__main__":
    main()
