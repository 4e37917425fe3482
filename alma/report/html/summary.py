"""The summary of a section in sentences: what ran, what is best, what is not ranked."""

from collections.abc import Sequence

from alma.report.compare import AVERAGES, TOTALS, spread
from alma.report.labels import listed, replay
from alma.report.results import Measure, Result, compute, non_dominated, trained
from alma.report.sections import Section, model_size

_MOST = 12  # names in a list; the rest is counted


def summarize(section: Section) -> list[str]:
    """Sentences about the runs of a section, the best configurations and the unfinished ones."""
    ranked = [r for r in section.results if r.finished and trained(r.repeats[0])]
    rest = [r for r in section.results if r not in ranked]
    lines = [_size(section.results)]
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


def final(rows: dict) -> float:
    """The metric at the last t."""
    return rows[max(rows)]["value"]


def _size(results: Sequence[Result]) -> str:
    """How many runs, configurations, learners, seeds, waiting times and sizes."""
    runs = len({run.directory for result in results for run in result.runs})
    seeds = sorted({len(result.runs) for result in results})
    waits = sorted({result.waiting_time for result in results})
    sizes = sorted(set(filter(None, map(model_size, results))), key=lambda size: (len(size), size))
    learners = list(dict.fromkeys(result.learner for result in results))
    few = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    parts = [
        f"{count(runs, 'run')}: {count(len(results), 'configuration')} of "
        f"{count(len(learners), 'learner')} ({_names(learners)})",
        f"{few} {'seed' if seeds[-1] == 1 else 'seeds'} each",
        f"waiting {'time' if len(waits) == 1 else 'times'} {_names(waits)}",
    ]
    parts += [f"{'size' if len(sizes) == 1 else 'sizes'} {_names(sizes)}"] if sizes else []
    replays = {replay(result.config) for result in results}
    parts += ["with and without replay"] if "no" in replays and len(replays) > 1 else []
    return "; ".join(parts)


def _best(ranked: Sequence[Result], name: str, measure: Measure, total: str = "") -> list[str]:
    """A sentence about the result with the lowest mean and the next one; [] without finite means."""
    means = [(result.over_seeds(measure), result) for result in ranked]
    order = sorted((pair for pair in means if pair[0][0] < float("inf")), key=lambda pair: pair[0][0])
    if not order:
        return []
    (mean, deviation), best = order[0]
    sums = spread(TOTALS["{total}"], best, False)
    text = f"Lowest {name}: {_value(measure, best)}{total.format(total=sums)}"
    if len(order) > 1:
        (second, other), result = order[1]
        both = min(len(best.repeats), len(result.repeats)) > 1
        text += f"; next {_value(measure, result)}"
        text += ", within the spread over seeds" * (both and second - mean <= deviation + other)
    return [text]


def _value(measure: Measure, result: Result) -> str:
    """Such as "sm w=1, 6.69 ±0.12 over 3 seeds"."""
    seeds = f" over {len(result.repeats)} seeds" if len(result.repeats) > 1 else ""
    return f"{result.label}, {spread(measure, result)}{seeds}"


def count(number: int, noun: str) -> str:
    """Such as "1 run" or "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _names(values: Sequence[object]) -> str:
    """The values in a line; of many, the first ones and the number of the others."""
    shown = listed(list(map(str, values[:_MOST])))
    return shown if len(values) <= _MOST else f"{shown} and {len(values) - _MOST} more"
