"""The files of a report: report.md, report.csv, age.csv, figures, and the paper's tables."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.configs import flatten
from alma.files import atomic_write
from alma.records import Run
from alma.report import age_table, compare, differences
from alma.report.age_table import Aged, aged
from alma.report.drift import write_drift, write_staleness
from alma.report.figures import write_figures
from alma.report.results import Result, matrix
from alma.report.style import Picture
from alma.report.tables import PaperTable, Table, as_markdown, markdown


def write_report(
    groups: Sequence[Sequence[Result]],
    runs: Sequence[Run],
    out: Path,
    pictures: Sequence[Picture] | None,
    tables: Mapping[str, PaperTable],
    choices: Sequence[str],
    baselines: Sequence[Result | None],
) -> list[Path]:
    """Write report.md, report.csv, figures and, of streams that drift, age.csv to the directory `out`.

    Returns their paths. `groups` are lists of results for a general table each. `pictures` are the paper's
    figures, in place of the general ones (None). `tables` are the paper's tables by file name without suffix,
    `choices` the lines of `alma.report.selection`. `baselines` are those of the tables of
    differences, one for each group or None.
    """
    found = [aged(results) for results in groups]
    records = [record for each in found for record in age_table.records(each)]
    written = [out / "report.md", out / "report.csv", *([out / "age.csv"] if records else [])]
    written += _write_tables(tables, out)
    parts = ["# ALMA report", *map(markdown, choices), *(table.as_markdown() for table in tables.values())]
    for results, ages, baseline in zip(groups, found, baselines, strict=True):
        drawn = write_figures(results, out) if pictures is None else []
        parts += [f"## {markdown(compare.heading(results))}", as_markdown(compare.table(results))]
        parts += [markdown(compare.note(results))]
        parts += [f"![{path.stem}]({path.name})" for path in drawn]
        written += drawn
        if ages:
            parts += [f"### {markdown(age_table.heading(ages))}", as_markdown(age_table.table(ages))]
            parts += [age_table.note(ages)]
        if baseline:
            parts += [f"### {markdown(differences.heading(baseline))}"]
            parts += [as_markdown(differences.table(baseline, results)), markdown(differences.note(baseline))]
        for path, caption in [*write_drift(results, out), *write_staleness(ages, out)]:
            parts += [f"![{path.stem}]({path.name})", caption]
            written.append(path)
    if pictures:
        parts.append("## Figures")
        parts.append("Bands and bars are ±1 standard deviation over seeds, where there are several.")
    for path, caption in pictures or []:
        parts += [f"![{path.stem}]({path.name})", caption]
        written.append(path)
    parts += ["## Runs", as_markdown(_provenance(runs))]
    write_csv(runs, out / "report.csv", found)
    if records:
        _write_records(records, out / "age.csv")
    with atomic_write(out / "report.md") as file:
        file.write("\n\n".join(parts) + "\n")
    return written


def _write_tables(tables: Mapping[str, PaperTable], out: Path) -> list[Path]:
    """Write the paper's tables as CSV, LaTeX and Markdown; returns their paths."""
    written = []
    for stem, table in tables.items():
        texts = {".csv": table.as_csv(), ".tex": table.as_latex(), ".md": table.as_markdown() + "\n"}
        for suffix, text in texts.items():
            written.append(out / f"{stem}{suffix}")
            with atomic_write(written[-1]) as file:
                file.write(text)
    return written


def write_csv(runs: Sequence[Run], path: Path, ages: Sequence[Sequence[Aged]]) -> None:
    """Write all rows in long format: a line per run and t, with all settings and all fields.

    A run with an average has a second line per t, without `config.average`, for its raw weights. The means
    over an evaluation matrix are on each line of the run, and so is its loss against age.
    """
    of_age = {run: record for found in ages for run, record in age_table.per_run(found).items()}
    records: list[dict[str, Any]] = []
    for run in runs:
        config = {f"config.{key}": value for key, value in flatten(run.config).items()}
        same = {"run": str(run.directory), **config, **_transfers(run), **of_age.get(id(run), {})}
        for row in run.rows:
            trained_on = " ".join(map(str, row["trained_on"]))
            records.append({**same, **flatten(_by_part(row)), "trained_on": trained_on})
    _write_records(records, path)


def _write_records(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write CSV, with the fields of all records as columns."""
    fields = dict.fromkeys(key for record in records for key in record)
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    with atomic_write(path, "wb") as file:  # a learner's own text may hold halves of surrogate pairs
        file.write(text.getvalue().encode("utf-8", "backslashreplace"))


def _transfers(run: Run) -> dict[str, float | None]:
    """The means over the evaluation matrix of a run, if it has one."""
    rows = {row["t"]: row for row in run.rows}
    return compare.transfer(rows)._asdict() if matrix(rows) else {}


def _by_part(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its lists over held-out parts as mappings, so that each part has a column."""
    lists = {name: row["extra"][name] for name in ("matrix", "matrix_experts") if name in row["extra"]}
    return row | {"extra": row["extra"] | {name: dict(enumerate(each, 1)) for name, each in lists.items()}}


def _provenance(runs: Sequence[Run]) -> Table:
    rows = [(r.directory, r.config["seed"], r.info.get("created"), r.info.get("commit")) for r in runs]
    different = {str(row): list(map(str, row)) for row in rows}  # a directory with an average is two runs
    return [["run", "seed", "started", "commit"], *different.values()]
