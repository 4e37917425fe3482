"""Write the report page: text, data, style and scripts in one HTML file that needs no network.

Everything from run records travels as JSON, which page.js turns into text nodes; none of it is markup.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.learners import colour_of
from alma.records import Run
from alma.report.differences import find_baselines
from alma.report.html.panels import panels
from alma.report.html.summary import count, summarize
from alma.report.sections import configuration, find_sections

SCRIPTS = ("page.js", "table.js", "figures.js")


def plotly() -> str:
    """The JavaScript of Plotly. UserError: the package `plotly` is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("--html needs the package plotly: pip install plotly") from None
    return get_plotlyjs()


def write_page(
    runs: Sequence[Run], path: Path, remarks: Sequence[str] = (), baseline: str | None = None
) -> None:
    """Write the page about `runs` to `path`; `remarks` say what was chosen, left out or counted twice.

    `baseline` is the label of the configuration whose differences from the others have a table. UserError:
    plotly is missing, `path` is a folder, no run has rows, repeats share no t, or there is no such baseline.
    """
    if path.is_dir():
        raise UserError(f"--html: {path} is a folder; give a file, such as {path / 'report.html'}")
    files = resources.files(__package__)
    parts = {
        "style": files.joinpath("page.css").read_text("utf-8"),
        "scripts": "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS),
        "plotly": plotly(),
        "data": embedded(page_data(runs, remarks, baseline)),
    }
    page = Template(files.joinpath("page.html").read_text("utf-8")).substitute(parts)
    make_directory(path.parent)
    with atomic_write(path) as file:
        file.write(page)


def page_data(
    runs: Sequence[Run], remarks: Sequence[str] = (), baseline: str | None = None
) -> dict[str, Any]:
    """All that the page shows, as JSON values. UserError: no run has rows, or there is no such baseline."""
    sections = find_sections(runs)
    baselines = find_baselines([section.results for section in sections], baseline)
    return {
        "about": [
            count(len({run.directory for run in runs if run.rows}), "run"),
            f"written {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC",
        ],
        "remarks": list(remarks),
        "colours": {run.config["learner"]: colour_of(run.config["learner"]) for run in runs},
        "sections": [
            {
                "title": section.title,
                "summary": summarize(section),
                "configurations": list(map(configuration, section.results)),
                "panels": panels(section._replace(baseline=compared)),
            }
            for section, compared in zip(sections, baselines, strict=True)
        ],
    }


def embedded(data: Any) -> str:
    """JSON text that cannot end the <script> element around it. ValueError: NaN or infinity."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII, so that no character is special
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
