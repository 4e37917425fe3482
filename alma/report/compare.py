"""The general table: a row per configuration, a column per measure."""

import math
from collections.abc import Sequence
from functools import partial

from alma import metrics
from alma.report.labels import replay
from alma.report.periods import PeriodSpan, span_of_test_set
from alma.report.results import (
    Measure,
    Result,
    Rows,
    column,
    compute,
    matrix,
    mean_and_deviation,
    memory,
    trained,
    validation,
)
from alma.report.tables import Table, TitledTable
from alma.tables import decimals, fixed

NOTE = """\
* no stage complete yet: the untrained model is evaluated, and counts in average and {total}.
Average and {total} are over t = 1..B (eq. 1 of the paper's final version; earlier versions start \
at t = 0){test}; Mem (parameters) and Comp (training) are over t = 0..B.
± is the sample standard deviation over n seeds."""
WAITED = """
The untrained {metric} varies between learners, by chance of the initial weights. {total} trained \
is the sum from the first trained stage on: compare it at equal w."""
VALIDATED = """
Validation is the mean {metric} on the learner's own validation data, over t since the first \
stage."""
ONE_SOURCE = (
    " In an i.i.d. stream of text these are documents of one source (data prep's --valid-source, "
    "by default the last), while the test set has all sources: compare validation with validation "
    "only."
)

TRANSFERRED = """
In-distribution is the mean {metric} over t = 1..B on the held-out part of mega-batch t; backward \
and forward transfer are the means on the parts of earlier and of later mega-batches; average seen \
is the mean over t of the mean on parts 1..t."""
GEOMETRIC = " These are means of log perplexity, shown as perplexity."


def _values(rows: Rows) -> dict[int, float]:
    """The metric by t; {} if mega-batch 1 is missing."""
    return column(rows, "value") if 1 in rows else {}


def _total(values: dict[int, float]) -> float:
    return metrics.cumulative_error_rate(values) if values else math.nan


def transfer(rows: Rows) -> metrics.Transfer:
    """The means over the evaluation matrix; all None on a stream without held-out parts."""
    metric = next(iter(rows.values()))["metric"]
    return metrics.transfer(matrix(rows), logarithmic=metric == "perplexity")


def _transfer(field: str, rows: Rows) -> float:
    value = getattr(transfer(rows), field)
    return math.nan if value is None else value


TRANSFERS: dict[str, Measure] = {
    name: partial(_transfer, name.replace("-", "_").replace(" ", "_"))
    for name in ("in-distribution", "backward transfer", "forward transfer", "average seen")
}
"""Columns of runs on streams that drift."""
AVERAGES: dict[str, Measure] = {
    "average": lambda rows: metrics.average(_values(rows)),
    "validation": lambda rows: metrics.average(validation(rows)),
    **TRANSFERS,
}
"""Columns in the unit of the metric (errors in percent), by title; NaN leaves a cell empty.

Add new columns here.
"""
TOTALS: dict[str, Measure] = {
    "{total}": lambda rows: _total(_values(rows)),
    "{total} trained": lambda rows: _total({t: rows[t]["value"] for t in trained(rows)}),
}
"""Columns of unscaled sums, where {total} is CER or cumulative PPL."""


def table(results: Sequence[Result]) -> Table:
    """The table of results of one metric, B and data; columns without any number are left out."""
    total = results[0].display.total
    last = results[0].megabatches
    times: Sequence[int] = range(1, last + 1)
    if last > 8:  # show only the first t, the quarters of the stream and the last t
        times = sorted({1, *(round(last * quarter / 4) for quarter in (1, 2, 3)), last})
    rows = []
    for result in results:
        experts = [
            row["extra"]["experts"]
            for row in result.repeats[0].values()
            if "experts" in row["extra"]
        ]
        parameters = result.over_seeds(lambda rows: rows[max(rows)]["parameters"])[0]
        cells = {
            "learner": method(result),
            "w": str(result.waiting_time),
            "replay": replay(result.config),
            "n": str(len(result.repeats)),
            "experts": "->".join(dict.fromkeys(map(str, [*experts[:1], *experts[-1:]]))),
            "parameters": abbreviated(parameters),
            "untrained": spread(lambda rows: rows[0]["value"], result) if 0 in result.times else "",
        }
        for t in times:
            cells[f"t={t}"] = ""
            if t in result.times:
                value = partial(lambda t, rows: rows[t]["value"], t)
                cells[f"t={t}"] = "*" if result.waiting(t) else spread(value, result)
        for name, measure in AVERAGES.items():
            cells[name] = spread(measure, result)
        for name, measure in TOTALS.items():
            cells[name.format(total=total)] = spread(measure, result, scaled=False)
        cells["Mem"] = abbreviated(result.over_seeds(memory)[0])
        cells["Comp (TFLOPs)"] = fixed(result.over_seeds(compute)[0])
        rows.append(cells)
    hidden = set()
    for name in ("experts", "validation", *TRANSFERS):
        if not any(row[name] for row in rows):
            hidden.add(name)
    if not _waiting(results):
        hidden.add(f"{total} trained")  # equal to the total
    shown = [name for name in rows[0] if name not in hidden]
    lines = [shown]
    for row in rows:
        lines.append([row[name] for name in shown])
    return lines


def titled(results: Sequence[Result]) -> TitledTable:
    """The table with its title and what its columns mean."""
    repeats = [rows for result in results for rows in result.repeats]
    drifts = any(map(matrix, repeats))
    is_text = results[0].metric == "perplexity"
    note = NOTE
    if _waiting(results):
        note += WAITED
    if any(map(validation, repeats)):
        note += VALIDATED
        if is_text and not drifts:
            note += ONE_SOURCE
    if drifts:
        note += TRANSFERRED
        if is_text:
            note += GEOMETRIC
    first = results[0]
    title = f"Test {first.display.name} after mega-batch t, {first.stream}"
    spans = spans_of_test_sets(results)
    texts = {span.text for span in spans}
    test = ""
    if len(texts) == 1:
        title += f"; test: {spans[0].text}"
        test = f", on the test set, which has the held-out parts of {spans[0].text}"
    note = note.format(total=first.display.total, metric=first.metric, test=test)
    return TitledTable(title, table(results), note, lacking(results))


def spans_of_test_sets(results: Sequence[Result]) -> list[PeriodSpan]:
    """The periods of the test sets of results that have periods."""
    return [span for span in map(span_of_test_set, results) if span]


def lacking(results: Sequence[Result]) -> list[str]:
    """A line for each test set that lacks periods of the stream."""
    first = results[0]
    lines = {}
    for span in spans_of_test_sets(results):
        if span.whole:
            continue
        newest = span.names[-1]
        lines[span.text] = (
            f"The test set has {span.text}, the first {span.count} of {len(span.names)} periods: "
            f"t = 0..{first.megabatches}, average and {first.display.total} do not count later "
            f"ones, such as {newest}, nor classes and topics that came with them."
        )
    return list(lines.values())


def _waiting(results: Sequence[Result]) -> bool:
    """Whether the untrained model counts at some t >= 1."""
    return any(result.waiting(t) for result in results for t in result.times if t >= 1)


def configurations(results: Sequence[Result]) -> dict[str, list[str]]:
    """The columns that name the configuration of each row."""
    return {
        "learner": list(map(method, results)),
        "w": [str(result.waiting_time) for result in results],
        "replay": [replay(result.config) for result in results],
    }


def method(result: Result) -> str:
    """The method and, if the runs are unfinished, their progress."""
    done = result.progress
    total = result.megabatches
    if done == total:
        return result.method
    remark = f"t={done}/{total}"
    if result.unfinished:
        remark = f"not finished, {remark}"
    return f"{result.method} ({remark})"


def spread(measure: Measure, result: Result, scaled: bool = True) -> str:
    """Mean over seeds; with several seeds also the standard deviation, with the same decimals."""
    factor = result.display.factor if scaled else 1
    values = [measure(rows) for rows in result.repeats]
    if any(map(math.isnan, values)):
        return ""
    return spread_of([factor * value for value in values])


def spread_of(values: Sequence[float]) -> str:
    """Mean of values per seed; of several also the standard deviation, with the same decimals."""
    mean, deviation = mean_and_deviation(values)
    text = fixed(mean)
    if len(values) > 1:
        text += f" ±{deviation:{decimals(mean)}}"
    return text


def abbreviated(value: float) -> str:
    """A count with three digits, such as 436M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999.5M rounds to 1G
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f}"
