"""The files of a report: report.md, report.csv, figures, and the paper's tables."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.configs import flatten
from alma.escape import csv_cell, markdown
from alma.files import atomic_write
from alma.records import Run
from alma.report import compare, differences, drift, newest_figure, style
from alma.report.figures import write_figures
from alma.report.results import Result, matrix
from alma.report.style import Picture
from alma.report.tables import TitledTable, as_markdown
from alma.tables import Table


def write_report(
    groups: Sequence[Sequence[Result]],
    runs: Sequence[Run],
    out: Path,
    pictures: Sequence[Picture] | None,
    tables: Mapping[str, TitledTable],
    choices: Sequence[str],
    baselines: Sequence[Result | None],
) -> list[Path]:
    """Write report.md, report.csv and figures to the directory `out`.

    Returns their paths.

    groups      results of each general table
    runs        all runs, for the table of their origins and report.csv
    pictures    the paper's figures, if they replace the general ones; None: draw the general ones
    tables      the paper's tables, by file name without suffix
    choices     lines about runs that are left out
    baselines   for each group, the baseline of its table of differences, or None
    """
    written = [out / "report.md", out / "report.csv"]
    parts = ["# ALMA report", *map(markdown, choices)]
    for stem, table in tables.items():
        parts += table.as_markdown("##")
        written.append(out / f"{stem}.md")
        with atomic_write(written[-1]) as file:
            file.write("\n\n".join(table.as_markdown("##")) + "\n")
    for results, baseline in zip(groups, baselines, strict=True):
        first_table, *further_tables = differences.tables(results, baseline)
        parts += first_table.as_markdown("##")
        for table in further_tables:
            parts += table.as_markdown("###")
        with style.drawing():
            of_newest = newest_figure.figure(results)
            if of_newest:
                drawing, caption = of_newest
                written.append(out / f"{results[0].stem}_newest.png")
                style.save(drawing, written[-1])
                parts += [f"![{written[-1].stem}]({written[-1].name})", caption]
        general = write_figures(results, out) if pictures is None else []
        parts += [f"![{path.stem}]({path.name})" for path in general]
        written += general
        with style.drawing():
            for name, figure, caption in drift.figures(results):
                written.append(out / f"{results[0].stem}_{name}.png")
                style.save(figure, written[-1])
                parts += [f"![{written[-1].stem}]({written[-1].name})", caption]
    if pictures:
        note = "Bands and bars are ±1 standard deviation over seeds, where there are several."
        parts += ["## Figures", note]
    for path, caption in pictures or []:
        parts += [f"![{path.stem}]({path.name})", caption]
        written.append(path)
    parts += ["## Runs", as_markdown(_origins(runs))]
    write_csv(runs, out / "report.csv")
    with atomic_write(out / "report.md") as file:
        file.write("\n\n".join(parts) + "\n")
    return written


def _origins(runs: Sequence[Run]) -> Table:
    """A table of the runs' origins, a row per directory.

    A run with an average counts as two runs (see `raw`) but has one row here.
    """
    rows = {}
    for run in runs:
        cells = (
            str(run.directory),
            str(run.config["seed"]),
            str(run.info.get("created")),
            str(run.info.get("commit")),
        )
        rows[cells] = list(cells)
    return [["run", "seed", "started", "commit"], *rows.values()]


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Write all rows in long format: a line per run and t, with all settings and all fields.

    A run with an average has a second line per t, without `config.average`, for its raw weights.
    The means over an evaluation matrix are on each line of the run. Texts that a spreadsheet would
    compute begin with an apostrophe.
    """
    records: list[dict[str, Any]] = []
    for run in runs:
        rows = {row["t"]: row for row in run.rows}
        of_run: dict[str, Any] = {"run": str(run.directory)}
        of_run |= {f"config.{key}": value for key, value in flatten(run.config).items()}
        if matrix(rows):
            of_run |= compare.transfer(rows)._asdict()
        for measured in run.rows:
            extra = measured["extra"].copy()
            for name in ("matrix", "matrix_experts"):
                if name in extra:  # a column for each held-out part
                    extra[name] = dict(enumerate(extra[name], 1))
            raw = extra.get("raw") or {}
            if "matrix" in raw:
                extra["raw"] = raw | {"matrix": list(map(_or_none, raw["matrix"]))}
            trained_on = " ".join(map(str, measured["trained_on"]))
            of_row = flatten(measured | {"extra": extra})
            records.append({**of_run, **of_row, "trained_on": trained_on})
    fields = dict.fromkeys(key for record in records for key in record)
    with atomic_write(path) as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(map(csv_cell, fields))
        for record in records:
            write(csv_cell(_or_empty(record.get(name, ""))) for name in fields)


def _or_empty(value: Any) -> Any:
    """The value; "" of a NaN, where a model was not tested."""
    return "" if isinstance(value, float) and math.isnan(value) else value


def _or_none(value: float) -> float | None:
    """The value; None of a NaN."""
    return None if math.isnan(value) else value
