"""Write the report page: text, figures and style in one HTML file that needs no network.

Everything from run records is escaped: none of it is markup.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.records import Run
from alma.report import differences, drift, front, style
from alma.report.figures import over_time_figure
from alma.report.results import DISPLAYS, Result, Section, find_sections
from alma.report.tables import TitledTable

_CURVES = (
    "After each mega-batch: the mean over seeds, with a band of ±1 standard deviation. A value is held until "
    "the next stage. Untrained errors are dotted and pale."
)


def write_page(
    runs: Sequence[Run], path: Path, remarks: Sequence[str] = (), baseline: str | None = None
) -> None:
    """Write the page about `runs` to `path`; `remarks` say what was chosen, left out or counted twice.

    `baseline` is the label of the configuration whose differences from the others have a table. UserError:
    `path` is a folder, no run has rows, repeats share no t, or there is no such baseline.
    """
    if path.is_dir():
        raise UserError(f"--html: {path} is a folder; give a file, such as {path / 'report.html'}")
    template = Template((resources.files(__package__) / "page.html").read_text("utf-8"))
    page = template.substitute(body=body(runs, remarks, baseline))
    make_directory(path.parent)
    with atomic_write(path) as file:
        file.write(page)


def body(runs: Sequence[Run], remarks: Sequence[str] = (), baseline: str | None = None) -> str:
    """The HTML of the page. UserError: no run has rows, or there is no such baseline."""
    sections = find_sections(runs)
    baselines = differences.find_baselines([section.results for section in sections], baseline)
    directories = {run.directory for run in runs if run.rows}
    parts = [
        f"<p>Run directories: {len(directories)}; written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>"
    ]
    if len(sections) > 1:
        links = (f'<a href="#s{i}">{escape(each.title)}</a>' for i, each in enumerate(sections))
        parts.append(f"<nav>{_listed(links)}</nav>")
    if remarks:
        parts.append(_listed(map(escape, remarks)))
    for i, (section, baseline_result) in enumerate(zip(sections, baselines, strict=True)):
        parts.append(f'<h2 id="s{i}">{escape(section.title)}</h2>')
        with style.drawing():
            curves = over_time_figure(section.results)
            shown = [
                ("front", front.front(section.results), front.CAPTION),
                ("over_time", curves, _CURVES),
            ]
            shown += drift.figures(section.results)
            for name, figure, caption in shown:
                if figure:
                    file = io.BytesIO()
                    figure.savefig(
                        file, format="svg", bbox_inches="tight", metadata=style.METADATA["svg"]
                    )
                    source = (
                        f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
                    )
                    parts.append(f'<img alt="{name}" src="{source}"><p>{escape(caption)}</p>')
        parts.append("<h3>Tables</h3>")
        parts += map(_table, tables(section, baseline_result))
    return "\n".join(parts)


def tables(section: Section, baseline: Result | None) -> Iterator[TitledTable]:
    """The tables that `alma report` prints, and that of `alma advise`."""
    yield from differences.tables(section.results, baseline)
    if section.results[0].metric not in DISPLAYS:  # advice knows no scores
        return
    from alma.report.advice.advice import NOTE, advise, decision_table  # loads NumPy and SciPy

    try:
        advice = advise(section)
    except UserError:  # no stage is complete, or a value is not finite
        return
    if advice.comparisons:
        note = " ".join([advice.summary, NOTE, *advice.remarks])
        yield TitledTable("Advice", decision_table(advice), note)


def _table(table: TitledTable) -> str:
    header, *rows = table.cells
    names = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    inner = f"<thead><tr>{names}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody>"
    note = escape(table.note).replace("\n", "<br>")
    return f'<h4>{escape(table.title)}</h4>\n<div class="scroll"><table>{inner}</table></div>\n<p>{note}</p>'


def _listed(items: Iterator[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
