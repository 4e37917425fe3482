"""Compare runs: a table in the terminal; with --out also Markdown, CSV and figures.

python -m alma.report RUN... [--out DIR] [--figures vision]
"""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alma import metrics, vision_figures
from alma.errors import Parser, UserError, command
from alma.files import atomic_write, make_directory
from alma.image_runs import is_image
from alma.records import Run, flatten
from alma.results import Result, Rows, column, compute, find_runs, group, memory
from alma.vision_figures import Picture

CUMULATIVE = {
    "error": ("CER", metrics.cumulative_error_rate),
    "perplexity": ("cumulative PPL", metrics.cumulative_perplexity),
}
NOTE = """\
* no stage complete yet: the untrained model is evaluated, and counts in average and {cumulative}.
Average and {cumulative} are over t = 1..B; Mem (parameters) and Comp (training) over t = 0..B.
± is the sample standard deviation over n seeds."""

Table = list[list[str]]
"""Header and rows, all cells as text."""


def table(results: Sequence[Result]) -> Table:
    """One row per configuration for results of the same metric and the same B."""
    times = _columns(results[0].config["megabatches"])
    cumulative, _ = CUMULATIVE[results[0].metric]
    header = ["learner", "w", "replay", "n", "experts", "parameters", "untrained"]
    header += [*(f"t={t}" for t in times), "average", cumulative, "Mem", "Comp (TFLOPs)"]
    lines = [header, *(_line(result, times) for result in results)]
    empty = {
        i for i, name in enumerate(header) if name == "experts" and not any(line[i] for line in lines[1:])
    }
    return [[cell for i, cell in enumerate(line) if i not in empty] for line in lines]


def _columns(megabatches: int) -> list[int]:
    """The t to show: all of a short stream, else the first, the quarters and the last."""
    if megabatches <= 8:
        return list(range(1, megabatches + 1))
    return sorted({1, *(round(megabatches * quarter / 4) for quarter in (1, 2, 3)), megabatches})


def _line(result: Result, times: Sequence[int]) -> list[str]:
    done, total = result.progress, result.config["megabatches"]
    _, cumulative = CUMULATIVE[result.metric]

    def value(t: int) -> str:
        return _spread(result, lambda rows: result.scale * rows[t]["value"]) if t in result.times else ""

    flops, _ = result.over_seeds(compute)
    return [
        result.learner + (f" (running t={done}/{total})" if done < total else ""),
        str(result.config["waiting_time"]),
        "yes" if result.config["replay"] else "no",
        str(len(result.repeats)),
        _experts(result),
        _si(result.over_seeds(lambda rows: rows[result.times[-1]]["parameters"])[0]),
        value(0),
        *("*" if t in result.times and result.waiting(t) else value(t) for t in times),
        _spread(result, lambda rows: result.scale * metrics.average(column(rows, "value"))) if done else "",
        _spread(result, lambda rows: cumulative(column(rows, "value"))) if done else "",
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


def as_text(lines: Table) -> str:
    """The table with aligned columns, names to the left and numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def as_markdown(lines: Table) -> str:
    """The table in Markdown."""
    rule = [":--", *("--:" for _ in lines[0][1:])]
    escaped = ([cell.replace("|", "\\|").replace("*", "\\*") for cell in line] for line in lines[1:])
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *escaped))


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
) -> list[Path]:
    """Figures, report.csv and report.md in `out`; returns their paths. The figures are those that `papers`
    (drawn by `alma.vision_figures`) holds; None: the general ones."""
    from alma import figures

    make_directory(out)
    written = [out / "report.md", out / "report.csv"]
    parts = ["# ALMA report"]
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
    return NOTE.format(cumulative=CUMULATIVE[results[0].metric][0])


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m alma.report", description="Compare runs.")
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder that holds some")
    made.add_argument("--out", type=Path, help="also write report.md, report.csv and figures there")
    made.add_argument(
        "--figures",
        choices=("vision",),
        help="draw the paper's figures of image runs, in --out or else report/",
    )
    return made


@command
def main() -> None:
    """Entry point of `python -m alma.report`."""
    options = parser().parse_args()
    runs = find_runs(options.runs)
    if options.figures and not any(map(is_image, runs)):
        raise UserError(f"no image run in {', '.join(options.runs)}: --figures vision draws those alone")
    tables = group(runs)
    if not tables:
        raise UserError(f"no rows yet in {', '.join(options.runs)}: nothing has been evaluated so far")
    for results in tables:
        print(heading(results), as_text(table(results)), _note(results), sep="\n", end="\n\n")
    for remark in _remarks(runs):
        print(remark)
    if options.figures:
        out = options.out or Path("report")
        make_directory(out)
        pictures, remarks = vision_figures.draw(runs, out)
        print(*remarks, *write_report(tables, runs, out, pictures), sep="\n")
    elif options.out:
        print(*write_report(tables, runs, options.out), sep="\n")


if __name__ == "__main__":
    main()
