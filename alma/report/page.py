"""Write the report page: text, figures and style in one HTML file that needs no network.

Everything from run records is escaped: none of it is markup.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.records import Run
from alma.report import differences, drift, front, newest, newest_figure, style
from alma.report.displays import DISPLAYS
from alma.report.figures import over_time_figure
from alma.report.results import Result, Section, find_sections
from alma.report.tables import TitledTable

if TYPE_CHECKING:
    from alma.report.advice.advice import Advice

_INCHES = 7.5  # least width of a figure
_MOST_OPEN_ROWS = 12
_CURVES = (
    "After each mega-batch: the mean over seeds, with a band of ±1 standard deviation. A value "
    "is held until the next stage. Untrained errors are dotted and pale."
)


def write_page(
    runs: Sequence[Run], path: Path, remarks: Sequence[str] = (), baseline: str | None = None
) -> None:
    """Write the page about `runs` to `path`, with `remarks` on runs that were left out.

    `baseline` is the label of the configuration whose differences from the others have a table.
    UserError: `path` is a folder, no run has rows, repeats share no t, or there is no such
    baseline.
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
    parts = []
    if len(sections) > 1:
        links = []
        for i, section in enumerate(sections):
            links.append(f'<a href="#s{i}">{escape(section.title)}</a>')
        parts.append(f"<nav>{_listed(links)}</nav>")
    if remarks:
        parts.append(_listed(map(escape, remarks)))
    for i, (section, baseline_result) in enumerate(zip(sections, baselines, strict=True)):
        parts.append(f'<h2 id="s{i}">{escape(section.title)}</h2>')
        parts += _section(section, baseline_result)
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    parts.append(f"<footer><p>Run directories: {len(directories)}; written {written}</p></footer>")
    return "\n".join(parts)


def _section(section: Section, baseline: Result | None) -> Iterator[str]:
    """The decision, the newest held-out part of a stream with periods, figures, further tables."""
    advice = _advice(section)
    if advice:
        from alma.report.advice.brief import article

        yield f"<article>{article(advice, 'h3')}</article>"
    further_tables = list(tables(section, baseline, advice))
    if newest.with_periods(section.results):
        yield _table(further_tables.pop(0))
    with style.drawing():
        for name, figure, caption in _figures(section.results):
            yield _image(name, figure) + f"<p>{escape(caption)}</p>"
    yield "<h3>Tables</h3>"
    yield from map(_table, further_tables)


def _advice(section: Section) -> "Advice | None":
    """The advice on a section; None for scores, and where no stage is complete."""
    if section.results[0].metric not in DISPLAYS:
        return None
    from alma.report.advice.advice import advise  # loads NumPy and SciPy

    try:
        return advise(section)
    except UserError:  # no stage is complete, or a value is not finite
        return None


def _figures(results: Sequence[Result]) -> Iterator[tuple[str, Any, str]]:
    """Name, figure and caption of each figure that the results have numbers for."""
    of_newest = newest_figure.figure(results)
    if of_newest:
        drawing, caption = of_newest
        yield "newest", drawing, caption
    points = front.front(results)
    if points:
        yield "front", points, front.caption(results)
    yield "over_time", over_time_figure(results), _CURVES
    yield from drift.figures(results)


def tables(
    section: Section, baseline: Result | None, advice: "Advice | None" = None
) -> Iterator[TitledTable]:
    """The tables that `alma report` prints, and that of `alma advise`."""
    yield from differences.tables(section.results, baseline)
    if advice and advice.comparisons:
        from alma.report.advice.advice import NOTE, decision_table

        note = " ".join([advice.summary, NOTE, *advice.remarks])
        yield TitledTable("Advice", decision_table(advice), note)


def _image(name: str, figure: Any) -> str:
    """The figure as an image whose SVG is part of the page, drawn for the width of a page."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, _INCHES), height)
    file = io.BytesIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata=style.METADATA["svg"])
    encoded = base64.b64encode(file.getvalue()).decode()
    image = f'<img alt="{name}" src="data:image/svg+xml;base64,{encoded}">'
    return f'<div class="figure">{image}</div>'


def _table(table: TitledTable) -> str:
    """The table in a block that folds; a large one is folded."""
    header, *rows = table.cells
    head = _row(header, "th")
    body = "".join(_row(row, "td") for row in rows)
    above = "".join(f"<p>{escape(line)}</p>" for line in table.above)
    cells = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    note = escape(table.note).replace("\n", "<br>")
    state = " open" if len(rows) <= _MOST_OPEN_ROWS else ""
    rows_text = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    summary = f"<summary><h4>{escape(table.title)}</h4> <small>{rows_text}</small></summary>"
    return (
        f'<details{state}>{summary}\n{above}<div class="scroll">{cells}</div>\n'
        f"<p>{note}</p></details>"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    inner = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"


def _listed(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
