"""`alma advise --brief`: one screen for readers who train no models, and a picture."""

import base64
import math
from html import escape
from pathlib import Path
from urllib.parse import quote

from alma.escape import markdown
from alma.files import atomic_write, make_directory
from alma.report.advice import brief_of_cadence, brief_of_model
from alma.report.advice.advice import Advice
from alma.report.advice.brief_of_cadence import ANSWER, CHANGES, HOW_SURE, OLDER_MODELS
from alma.report.advice.brief_picture import picture
from alma.report.advice.candidates import Candidate
from alma.report.advice.plain_words import capitalised, listed
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport

_INTERVALS = """\
Two numbers after a value are its 90% interval: nine of ten such intervals hold the true value."""
_PERPLEXITY = """\
The number of equally likely tokens that a model in effect chooses from; lower is better."""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">\
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>body{{font:16px/1.5 sans-serif;max-width:44em;margin:2em auto;\
padding:0 1em;overflow-wrap:break-word}}
h1{{line-height:1.2}}p.answer{{font-size:1.25em}}img{{width:100%}}</style>
{article}</html>
"""
_HOW_OFTEN = "How often to retrain"
_WHEN = "When to train the next model"
_MOST_NAMES = 4  # of groups in the line below the title


def title_of(report: Advice | MatrixReport) -> str:
    """The question that was asked."""
    if isinstance(report, MatrixReport):
        return _question_of(report.groups[0])
    if not report.asks_how_often:
        return "Which model to use?"
    return _question_of(report.retraining) if report.retraining else f"{_HOW_OFTEN}?"


def _question_of(retraining: Retraining) -> str:
    """A price gives a plan with its first training, else there is a cadence alone."""
    return f"{_HOW_OFTEN if math.isnan(retraining.price) else _WHEN}?"


def subject_of(report: Advice | MatrixReport) -> str:
    """The data and the metric that the question is about, in a sentence without its period."""
    if not isinstance(report, MatrixReport):
        result = report.candidates[0].result
        return f"For {result.data}, by {result.metric}" if result.data else f"By {result.metric}"
    name = report.groups[0].metric.name
    labels = [group.losses.label for group in report.groups]
    models = listed(labels) if len(labels) <= _MOST_NAMES else f"{len(labels)} models"
    text = f"By {name}" if labels == [name] else f"For {models}, by {name}"
    newest = report.groups[0].counted_from
    return f"{text}, with values until {newest}" if newest and len(labels) == 1 else text


def lines(report: Advice | MatrixReport) -> dict[str, str]:
    """Sentences by heading: the answer, how sure it is, its cost, what would change it."""
    if isinstance(report, MatrixReport):
        sections = brief_of_cadence.sections_of_groups(report.groups)
    elif not report.choice:
        return {ANSWER: report.summary}
    elif report.asks_how_often:
        sections = _of_cadence(report, report.choice)
    else:
        sections = _of_model(report, report.choice)
    sections["Intervals"] = _INTERVALS
    if "perplexity" in " ".join(sections.values()):
        sections["Perplexity"] = _PERPLEXITY
    return sections


def _of_cadence(report: Advice, choice: Candidate) -> dict[str, str]:
    """The sections of a report that was asked how often to retrain."""
    sections = {}
    if report.retraining:
        sections = brief_of_cadence.sections_of(report.retraining)
    elif report.shortage:
        sections = {ANSWER: report.shortage.plain, CHANGES: report.shortage.would_change}
    model = brief_of_model.name_of_choice(report, choice)
    sections["The model"] = f"{capitalised(model)}."
    newest = brief_of_model.of_newest_data(report, choice)
    return sections | {"The newest data": newest} if newest else sections


def _of_model(report: Advice, choice: Candidate) -> dict[str, str]:
    """The sections of a report that was asked which model to use."""
    sections = brief_of_model.sections_of(report, choice)
    if report.retraining:
        of_cadence = brief_of_cadence.sections_of(report.retraining)
        parts = [of_cadence[ANSWER], of_cadence[HOW_SURE], of_cadence.get(OLDER_MODELS, "")]
        sections[f"{_HOW_OFTEN} it"] = " ".join(filter(None, parts))
    elif report.shortage:
        shortage = report.shortage
        sections[f"{_HOW_OFTEN} it"] = f"{shortage.plain} {shortage.would_change}"
    return sections


def write_brief(report: Advice | MatrixReport, path: Path | None) -> str:
    """Write the brief to `path`, unless it is None, and return its text.

    A .md file has a picture beside it, a .html file inside.
    """
    sections = lines(report)
    title = title_of(report)
    paragraphs = [f"**{heading}.** {body}" for heading, body in sections.items()]
    subject = f"{subject_of(report)}."
    text = "\n\n".join([f"# {title}", subject, *paragraphs]) + "\n"
    if path is None:
        return text
    make_directory(path.parent)
    if path.suffix == ".html":
        page = _PAGE.format(title=escape(title), article=article(report, "h1"))
    else:
        with atomic_write(path.with_suffix(".svg"), "wb") as image:
            image.write(picture(report))
        page = _markdown(title, subject, sections, path.with_suffix(".svg").name)
    with atomic_write(path) as file:
        file.write(page)
    return text


def _markdown(title: str, subject: str, sections: dict[str, str], picture: str) -> str:
    """The brief in Markdown, with a link to the file `picture`; text from records is escaped."""
    parts = [f"# {markdown(title)}", markdown(subject)]
    for heading, body in sections.items():
        parts.append(f"**{heading}.** {markdown(body)}")
    parts.append(f"![{markdown(title)}]({quote(picture)})\n")
    return "\n\n".join(parts)


def article(report: Advice | MatrixReport, heading: str) -> str:
    """The title, its subject, the answer, the picture and the other sections as HTML.

    Text is escaped.

    `heading`: the tag of the title, such as "h1".
    """
    title = escape(title_of(report))
    sections = lines(report)
    first = next(iter(sections))
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture(report)).decode()}"
    parts = [f"<{heading}>{title}</{heading}>", f"<p>{escape(subject_of(report))}.</p>"]
    parts.append(_paragraph(first, sections.pop(first)))
    parts.append(f'<img alt="{title}" src="{source}">')
    parts += [_paragraph(name, text) for name, text in sections.items()]
    return "\n".join(parts)


def _paragraph(heading: str, text: str) -> str:
    if heading == ANSWER:
        return f'<p class="answer">{escape(text)}</p>'
    return f"<p><b>{escape(heading)}.</b> {escape(text)}</p>"
