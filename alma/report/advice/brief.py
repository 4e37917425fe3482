"""`alma advise --brief`: one screen for readers who train no models, and a picture."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from alma.escape import markdown
from alma.files import atomic_write, make_directory
from alma.report.advice.advice import Advice
from alma.report.advice.brief_picture import picture
from alma.report.advice.candidates import Candidate
from alma.report.advice.comparison import Comparison
from alma.report.advice.period import Period
from alma.report.advice.plain_words import capitalised, configuration, duration, side
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport
from alma.report.advice.retraining_words import answer, has_evidence, of_old_models, would_change
from alma.report.newest import models_of, shown_models
from alma.report.periods import dated_names, holes
from alma.tables import number

_SURE = """\
Two numbers after a value are its 90% interval: nine of ten such intervals hold the true value."""
_PERPLEXITY = """\
The number of equally likely tokens that a model in effect chooses from; lower is better."""
_PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body{{font:16px/1.5 sans-serif;max-width:44em;margin:2em auto;\
padding:0 1em}}
img{{max-width:100%}}</style><h1>{title}</h1>
"""
_FEW_STAGES = 3  # fewer trainings do not tell how a curve goes on
_HOW_OFTEN = "How often to retrain"


def title_of(report: Advice | MatrixReport) -> str:
    """The question that was asked, and of which data."""
    if isinstance(report, MatrixReport):
        labels = [retraining.losses.label for retraining in report.groups]
        return f"{_HOW_OFTEN} {labels[0]}" if len(labels) == 1 else _HOW_OFTEN
    question = _HOW_OFTEN if report.asks_how_often else "Which model to use"
    data = report.candidates[0].result.data
    return f"{question}: {data}" if data else question


def lines(report: Advice | MatrixReport) -> dict[str, str]:
    """Sentences by heading: what to do, what it gains and costs, how sure, what would change it."""
    if isinstance(report, MatrixReport):
        return _lines_of_matrix(report.groups)
    if not report.choice:
        return {"Recommendation": report.summary}
    if report.asks_how_often:
        return _lines_of_cadence(report, report.choice)
    return _lines_of_choice(report, report.choice)


def _lines_of_matrix(groups: Sequence[Retraining]) -> dict[str, str]:
    """The sentences about losses from elsewhere."""
    sections = {}
    changes = []
    certainties = []
    for retraining in groups:
        label = retraining.losses.label
        sentences = [f"{answer(retraining, plain=True)}.", *of_old_models(retraining)]
        sections[f"{_HOW_OFTEN} {label}"] = " ".join(sentences)
        prefix = f"{label}: " if len(groups) > 1 else ""
        certainty = _certainty(has_evidence(retraining))
        certainties.append(f"{prefix}{certainty}." if prefix else f"{capitalised(certainty)}.")
        changes.append(f"{prefix}{would_change(retraining)}")
    sections["How sure"] = " ".join([*certainties, _SURE])
    sections["What would change it"] = " ".join(changes)
    return sections


def _certainty(evident: bool) -> str:
    return "there is evidence" if evident else "no evidence yet"


def _lines_of_cadence(report: Advice, choice: Candidate) -> dict[str, str]:
    """The sentences of a report that was asked how often to retrain."""
    model = capitalised(_name_of_choice(report, choice))
    sections = {"Recommendation": _how_often(report), "The model": f"{model}."}
    if report.retraining:
        sections["Older models"] = " ".join(of_old_models(report.retraining))
    sections |= _newest(report, choice)
    evident = report.retraining is not None and has_evidence(report.retraining)
    sections["How sure"] = f"{_HOW_OFTEN}: {_certainty(evident)}. {_SURE}"
    sections["What would change it"] = " ".join(_changes_of_cadence(report))
    return {heading: text for heading, text in sections.items() if text}


def _how_often(report: Advice) -> str:
    """The answer to how often to retrain; "" if there is nothing to say."""
    if report.retraining:
        return f"{answer(report.retraining, plain=True)}."
    return report.shortage.plain if report.shortage else ""


def _changes_of_cadence(report: Advice) -> list[str]:
    """What would change how often to retrain."""
    if report.retraining:
        return [would_change(report.retraining)]
    return [report.shortage.would_change] if report.shortage else []


def _period(candidate: Candidate) -> Period:
    return Period.of(dated_names(candidate.result))


def _name_of_choice(report: Advice, choice: Candidate) -> str:
    """What the choice is, such as "a single model: new data only"."""
    period = _period(choice)
    sides = []
    for comparison in report.comparisons:
        sides.append(side(choice.sides[comparison.question], period))
    name = configuration(choice)
    return f"{name}: {', '.join(sides)}" if sides else name


def _newest(report: Advice, choice: Candidate) -> dict[str, str]:
    """What the models of the choice lose on the newest held-out part; {} without periods."""
    of_newest = report.newest
    if not of_newest:
        return {}
    result = next((r for r in of_newest.results if r.label == choice.label), None)
    if result is None:
        return {}
    parts = []
    names = ("the newest model", "the one before", "the oldest")
    models = shown_models(models_of(result, of_newest.part))
    for name, model in zip(names, models, strict=True):
        if model and model.tested:
            mean = result.display.factor * sum(model.values) / len(model.values)
            parts.append(f"{name}, trained until {model.until}, has {number(mean)}{_unit(report)}")
    if not parts:
        return {}
    test = result.over_seeds(lambda rows: rows[max(rows)]["value"])[0]
    text = f"On {of_newest.name}, {_and(parts)}."
    spans = dated_names(result)
    if choice.result.part and spans:
        text += (
            f" On the test set, which has none of {of_newest.name}, the newest model has "
            f"{number(result.display.factor * test)}{_unit(report)}."
        )
    return {"The newest data": text}


def _unit(report: Advice) -> str:
    """What follows a value of the metric."""
    return "% error" if report.display.factor > 1 else f" {report.display.name}"


def _and(parts: Sequence[str]) -> str:
    """The parts as a list in a sentence."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _lines_of_choice(report: Advice, choice: Candidate) -> dict[str, str]:
    """The sentences of a report with a choice."""
    gains = []
    certainties = []
    changes = []
    for comparison in report.comparisons:
        question = capitalised(comparison.question.removesuffix("?"))
        certainties.append(f"{question}: {_certainty(comparison.evidence)}.")
        if comparison.evidence:
            gains.append(_gain(report, comparison))
        else:
            changes.append(_would_settle(comparison))
    how_often = _how_often(report)
    if how_often:
        evident = report.retraining is not None and has_evidence(report.retraining)
        certainties.append(f"{_HOW_OFTEN}: {_certainty(evident)}.")
        changes += _changes_of_cadence(report)
    if report.retraining:
        how_often = " ".join([how_often, *of_old_models(report.retraining)])
    changes += _weaknesses(report, choice)
    hours = duration(choice.hours)
    sections = {
        "Recommendation": f"Use {_name_of_choice(report, choice)}. {_expected(report)}",
        **_newest(report, choice),
        _HOW_OFTEN: how_often,
        "What it gains": " ".join(gains) or "No difference is certain yet.",
        "What it costs": f"Training until mega-batch {choice.until}: {hours} on such a machine.",
        "How sure": " ".join([*certainties, _SURE]),
        "What would change it": " ".join(changes) or "Nothing that was measured.",
    }
    return {heading: text for heading, text in sections.items() if text}


def _expected(report: Advice) -> str:
    """The forecast of the choice in a sentence."""
    assert report.choice
    forecast = report.choice.forecast
    factor = report.display.factor
    mean, low, high = (number(factor * value) for value in forecast)
    interval = f" [{low}, {high}]" if forecast.low <= forecast.high else ""
    first = report.choice.start + 1
    last = report.choice.until
    times = f"mega-batches {first} to {last}" if first < last else f"mega-batch {last}"
    return f"Expected{report.tested_on} after {times}: {mean}{interval}{_unit(report)}."


def _weaknesses(report: Advice, choice: Candidate) -> list[str]:
    """What weakens the forecasts."""
    weaknesses = []
    if any(len(candidate.ends) < _FEW_STAGES for candidate in report.candidates):
        weaknesses.append(
            f"Fewer than {_FEW_STAGES} trainings so far, so the forecast is mostly assumed."
        )
    if holes(candidate.result for candidate in report.candidates) and not report.shortage:
        place = choice.result.runs[0].directory
        weaknesses.append(
            f"Not all models were tested on all periods: `alma test {place}` makes these tests."
        )
    return weaknesses


def _gain(report: Advice, comparison: Comparison) -> str:
    """A sentence: how much the better side of a comparison gains over the worse one."""
    better = comparison.choice
    worse = comparison.other
    if comparison.difference < 0:
        better, worse = worse, better
    kind = " points of error" if report.display.factor > 1 else "% of perplexity"
    mean, *ends = (abs(value) for value in report.difference(comparison))
    period = _period(comparison.choice)
    sides = [side(one.sides[comparison.question], period) for one in (better, worse)]
    least, most = (number(end) for end in sorted(ends))
    gain = f"{number(mean)}{kind} less ({least} to {most})"
    return f"{capitalised(sides[0])} instead of {sides[1]}: {gain}."


def _would_settle(comparison: Comparison) -> str:
    """A sentence: how many seeds would give evidence, and whether the other side is cheaper."""
    question = comparison.question
    period = _period(comparison.choice)
    candidates = (comparison.choice, comparison.other)
    sides = " against ".join(side(one.sides[question], period) for one in candidates)
    repeats = min(len(one.seeds) for one in candidates)
    if comparison.seeds:
        remedy = f"{comparison.seeds} repeats (seeds) of each would tell"
    elif repeats < 2:
        remedy = "one run of each cannot tell, 3 repeats (seeds) may"
    else:
        remedy = "too close to call"
    share = 1.0
    if comparison.choice.compute:
        share = comparison.other.compute / comparison.choice.compute
    cheaper = ""
    if share < 0.9:
        cheaper = f"; the latter takes {share:.2g} of the compute"
    return f"{capitalised(question)} {capitalised(sides)}: {remedy}{cheaper}."


def write_brief(report: Advice | MatrixReport, path: Path | None) -> str:
    """Write the brief to `path`, unless it is None, and return its text.

    A .md file has a picture beside it, a .html file inside.
    """
    sections = lines(report)
    if "perplexity" in " ".join(sections.values()):
        sections["Perplexity"] = _PERPLEXITY
    title = title_of(report)
    paragraphs = [f"**{heading}.** {body}" for heading, body in sections.items()]
    text = "\n\n".join([f"# {title}", *paragraphs]) + "\n"
    if path is None:
        return text
    make_directory(path.parent)
    drawing = picture(report)
    if path.suffix == ".html":
        page = _html(title, sections, drawing)
    else:
        with atomic_write(path.with_suffix(".svg"), "wb") as image:
            image.write(drawing)
        page = _markdown(title, sections, path.with_suffix(".svg").name)
    with atomic_write(path) as file:
        file.write(page)
    return text


def _markdown(title: str, sections: dict[str, str], picture: str) -> str:
    """The brief in Markdown, with a link to the file `picture`; text from records is escaped."""
    parts = [f"# {markdown(title)}"]
    for heading, body in sections.items():
        parts.append(f"**{heading}.** {markdown(body)}")
    parts.append(f"![{markdown(title)}]({quote(picture)})\n")
    return "\n\n".join(parts)


def _html(title: str, sections: dict[str, str], picture: bytes) -> str:
    """The page with the picture inside."""
    parts = [_PAGE.format(title=escape(title))]
    for heading, body in sections.items():
        parts.append(f"<p><b>{escape(heading)}.</b> {escape(body)}</p>\n")
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
    parts.append(f'<img alt="{escape(title)}" src="{source}">\n')
    return "".join(parts)
