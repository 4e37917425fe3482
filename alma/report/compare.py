"""The general table: a row per configuration, a column per measure."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from alma import metrics
from alma.report.labels import replay
from alma.report.results import Measure, Result, Rows, column, compute, matrix, memory, trained, validation
from alma.report.tables import Table, for_terminal

NOTE = """\
* no stage complete yet: the untrained model is evaluated, and counts in average and {total}.
Average and {total} are over t = 1..B (eq. 1 of the paper's final version; earlier versions start at t = 0); \
Mem (parameters) and Comp (training) are over t = 0..B.
± is the sample standard deviation over n seeds."""
WAITED = """
The untrained {metric} varies between learners, by chance of the initial weights. {total} trained is the sum \
from the first trained stage on: compare it at equal w."""
VALIDATED = """
Validation is the mean {metric} on the learner's own validation data, over t since the first stage."""
ONE_SOURCE = " In an i.i.d. stream of text these are documents of one source (data prep's --valid-source, by \
default the last), while the test set has all sources: compare validation with validation only."

TRANSFERRED = """
In-distribution is the mean {metric} over t = 1..B on the held-out part of mega-batch t; backward and \
forward transfer are the means on the parts of earlier and of later mega-batches; average seen is the mean \
over t of the mean on parts 1..t."""
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
    "in-distribution": partial(_transfer, "in_distribution"),
    "backward transfer": partial(_transfer, "backward_transfer"),
    "forward transfer": partial(_transfer, "forward_transfer"),
    "average seen": partial(_transfer, "average_seen"),
}
"""Columns of runs on streams that drift."""
AVERAGES: dict[str, Measure] = {
    "average": lambda rows: metrics.average(_values(rows)),
    "validation": lambda rows: metrics.average(validation(rows)),
    **TRANSFERS,
}
"""Columns in the scale of the metric (errors in percent); NaN leaves a cell empty. Add new columns here."""
TOTALS: dict[str, Measure] = {
    "{total}": lambda rows: _total(_values(rows)),
    "{total} trained": lambda rows: _total({t: rows[t]["value"] for t in trained(rows)}),
}
"""Columns of unscaled sums, where {total} is CER or cumulative PPL."""


def heading(results: Sequence[Result]) -> str:
    """Title of the table."""
    first = results[0]
    return f"Test {first.display.name} after mega-batch t, {first.stream}"


def table(results: Sequence[Result]) -> Table:
    """The table of results of one metric, B and data."""
    total = results[0].display.total
    columns: dict[str, Callable[[Result], str]] = {
        "learner": method,
        "w": lambda result: str(result.waiting_time),
        "replay": lambda result: replay(result.config),
        "n": lambda result: str(len(result.repeats)),
        "experts": _experts,
        "parameters": lambda result: _mean(result, lambda rows: rows[max(rows)]["parameters"]),
        "untrained": partial(_at, 0),
        **{f"t={t}": partial(_at, t) for t in _times(results[0].megabatches)},
        **{name: partial(spread, each) for name, each in AVERAGES.items()},
        **{name.format(total=total): partial(spread, each, scaled=False) for name, each in TOTALS.items()},
        "Mem": lambda result: _mean(result, memory),
        "Comp (TFLOPs)": lambda result: _number(result.over_seeds(compute)[0]),
    }
    cells = {name: [cell(result) for result in results] for name, cell in columns.items()}
    hidden = {name for name in ("experts", "validation", *TRANSFERS) if not any(cells[name])}
    if not any(map(_waits, results)):
        hidden.add(f"{total} trained")  # equal to the total
    shown = [[name, *values] for name, values in cells.items() if name not in hidden]
    return [list(row) for row in zip(*shown, strict=True)]


def as_section(results: Sequence[Result]) -> str:
    """Heading, table and note for the terminal."""
    return "\n".join([heading(results), for_terminal(table(results)), note(results)])


def note(results: Sequence[Result]) -> str:
    """What the columns mean."""
    text = NOTE + WAITED * any(map(_waits, results))
    validated = any(validation(rows) for result in results for rows in result.repeats)
    drifts = any(matrix(rows) for result in results for rows in result.repeats)
    text += VALIDATED * validated + ONE_SOURCE * (
        validated and not drifts and results[0].metric == "perplexity"
    )
    if drifts:
        text += TRANSFERRED + GEOMETRIC * (results[0].metric == "perplexity")
    return text.format(total=results[0].display.total, metric=results[0].metric)


def _waits(result: Result) -> bool:
    """Whether the untrained model counts at some t >= 1."""
    return any(result.waiting(t) for t in result.times if t >= 1)


def _times(megabatches: int) -> list[int]:
    """The t to show: all of a short stream, else the first, the quarters and the last."""
    if megabatches <= 8:
        return list(range(1, megabatches + 1))
    return sorted({1, *(round(megabatches * quarter / 4) for quarter in (1, 2, 3)), megabatches})


def method(result: Result) -> str:
    """The method, and how far it is if it is not finished."""
    done, total = result.progress, result.megabatches
    if done == total:
        return result.method
    return f"{result.method} ({'not finished, ' if result.unfinished else ''}t={done}/{total})"


def _experts(result: Result) -> str:
    """Experts at the first and the last t, such as 4->12; "" if the rows lack them."""
    known = [row["extra"]["experts"] for row in result.repeats[0].values() if "experts" in row["extra"]]
    ends = [str(known[0]), str(known[-1])] if known else []
    return "->".join(dict.fromkeys(ends))


def _at(t: int, result: Result) -> str:
    """The metric at t; `*` while the learner waits."""
    if t not in result.times:
        return ""
    return "*" if t and result.waiting(t) else spread(lambda rows: rows[t]["value"], result)


def _mean(result: Result, measure: Measure) -> str:
    return abbreviated(result.over_seeds(measure)[0])


def spread(measure: Measure, result: Result, scaled: bool = True) -> str:
    """Mean over seeds; with several seeds also the standard deviation, with the same decimals."""
    if any(math.isnan(measure(rows)) for rows in result.repeats):
        return ""
    factor = result.display.factor if scaled else 1
    mean, deviation = result.over_seeds(lambda rows: factor * measure(rows))
    return f"{_number(mean)} ±{deviation:{_format(mean)}}" if len(result.repeats) > 1 else _number(mean)


def _number(value: float) -> str:
    return f"{value:{_format(value)}}"


def _format(value: float) -> str:
    return ",.0f" if abs(value) >= 1000 else ".2f" if abs(value) >= 0.1 or not value else ".2g"


def abbreviated(value: float) -> str:
    """A count with three digits, such as 436M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999.5M rounds to 1G
            return f"{value / size:.3g}{suffix}"
    return f"{value:.0f}"
