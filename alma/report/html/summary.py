"""The summary of a section in sentences: what ran, what is best, what is not ranked."""

from collections.abc import Sequence

from alma.report.compare import AVERAGES, TOTALS, spread
from alma.report.labels import listed
from alma.report.results import Measure, Result, Rows, compute, non_dominated, trained
from alma.report.sections import Section

_MOST = 12  # names in a list; the rest is counted


def summarize(section: Section) -> list[str]:
    """Sentences about the runs of a section, the best configurations and the unfinished ones."""
    ranked = [r for r in section.results if r.finished and trained(r.repeats[0])]
    rest = [r for r in section.results if r not in ranked]
    runs = {run.directory for result in section.results for run in result.runs}
    learners = list(dict.fromkeys(result.learner for result in section.results))
    configurations = count(len(section.results), "configuration")
    lines = [f"{count(len(runs), 'run')}: {configurations} of {_names(learners)}"]
    if ranked:
        name, total = ranked[0].display.name, ranked[0].display.total
        lines += _best(ranked, f"average {name}", AVERAGES["average"], f" ({total} {{total}})")
        lines += _best(ranked, f"final {name}", final)
        points = [(r.over_seeds(compute)[0], r.over_seeds(AVERAGES["average"])[0]) for r in ranked]
        front = _names([ranked[i].label for i in non_dominated(points)])
        if len(ranked) > 1:
            lines.append(f"Not dominated in average {name} and training compute: {front}")
    else:
        lines.append("No configuration has finished, so none is ranked")
    if rest and ranked:
        names = _names([f"{r.label} (t={r.progress}/{r.megabatches})" for r in rest])
        lines.append(f"Not finished, so not ranked: {names}")
    return [f"{line}." for line in lines]


def final(rows: Rows) -> float:
    """The metric at the last t."""
    return rows[max(rows)]["value"]


def _best(ranked: Sequence[Result], name: str, measure: Measure, total: str = "") -> list[str]:
    """A sentence about the result with the lowest mean and the next one; [] without finite means."""
    means = [(result.over_seeds(measure), result) for result in ranked]
    order = sorted((pair for pair in means if pair[0][0] < float("inf")), key=lambda pair: pair[0][0])
    texts = []  # such as "sm w=1, 6.69 ±0.12 over 3 seeds"
    for _, result in order[:2]:
        seeds = f" over {len(result.repeats)} seeds" * (len(result.repeats) > 1)
        texts.append(f"{result.label}, {spread(measure, result)}{seeds}")
    if not order:
        return []
    text = f"Lowest {name}: {texts[0]}" + total.format(total=spread(TOTALS["{total}"], order[0][1], False))
    if len(order) > 1:
        ((mean, deviation), best), ((second, other), result) = order[:2]
        close = second - mean <= deviation + other and min(len(best.repeats), len(result.repeats)) > 1
        text += f"; next {texts[1]}" + ", within the spread over seeds" * close
    return [text]


def count(number: int, noun: str) -> str:
    """Such as "1 run" or "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _names(values: Sequence[str]) -> str:
    """The values in a line; of many, the first ones and the number of the others."""
    more = f" and {len(values) - _MOST} more" * (len(values) > _MOST)
    return listed(values[:_MOST]) + more
