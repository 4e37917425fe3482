"""Can runs at w = 1 tell how long to wait? Regret of rules, from runs with several waiting times.

Regret: the mean metric over t+1..B of the w that a rule picks, over that of the best w, minus 1.
Means over seeds; raw and averaged weights are separate configurations.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from alma.configs import canonical
from alma.report.results import Result, find_runs, find_sections

Curves = dict[int, dict[int, float]]
"""The metric, mean over seeds, by w and t."""
Rule = Callable[[Curves, int, int], int]
"""The w that a rule picks, by the curves, t and B; 0: none yet."""


def recent(curve: dict[int, float], now: int, length: int) -> float:
    """The mean over the `length` mega-batches up to `now`."""
    return fmean(curve[t] for t in range(max(1, now - length + 1), now + 1))


def by_scatter(curves: Curves, now: int, end: int) -> int:
    """The w of the lowest metric by the curve of w = 1.

    A power law tells what the age of the served model costs; larger stages have less scatter.
    """
    t = np.arange(max(1, now // 4), now + 1)
    logs = np.log([max(curves[1][i], 1e-9) for i in t.tolist()])
    slope = 0.0
    if len(t) > 1:
        slope = min(0.0, float(np.polyfit(np.log(t), logs, 1)[0]))
    scatter = float(np.std(np.diff(logs)) / np.sqrt(2)) if len(t) > 2 else 0.0
    to_come = np.arange(now + 1, end + 1)

    def expected(w: int) -> float:
        served = np.maximum(now, to_come - to_come % w)
        return float(np.mean(served**slope) * np.exp(-scatter * (1 - w**-0.5)))

    return min(curves, key=expected)


def short_run(count: int) -> Rule:
    """A rule that compares w = 1 with the w nearest to B / 50 after `count` stages of the latter.

    It picks the lower one; 0 if these stages are not complete at t.
    """

    def pick(curves: Curves, now: int, end: int) -> int:
        w = near(curves, end)
        if count * w > now:
            return 0
        usual = recent(curves[1], count * w, w)  # a single value of w = 1 scatters
        return w if curves[w][count * w] < usual else 1

    return pick


def near(curves: Curves, end: int) -> int:
    """The waiting time nearest to B / 50, but not 1."""
    return min((w for w in curves if w > 1), key=lambda w: abs(w - end / 50))


def lowest_now(curves: Curves, now: int, end: int) -> int:
    """The w of the lowest mean over as many mega-batches as the longest w."""
    return min(curves, key=lambda w: recent(curves[w], now, max(curves)))


RULES: dict[str, Rule] = {
    "w=1": lambda curves, now, end: 1,
    "w=B/50": lambda curves, now, end: near(curves, end),
    "scatter of w=1": by_scatter,
    "at stage 1": short_run(1),
    "at stage 2": short_run(2),
    "at stage 5": short_run(5),
    "lowest now, all w": lowest_now,
}


class WaitingRuns(NamedTuple):
    """Runs that differ in the waiting time and the seed alone."""

    name: str
    end: int
    """B"""
    curves: Curves


def groups_of(places: list[str]) -> list[WaitingRuns]:
    """The groups of the runs in some folders."""
    groups: dict[str, WaitingRuns] = {}
    for section in find_sections(find_runs(places)):
        for result in section.results:
            settings = dict(result.config)
            for name in ("waiting_time", "seed"):
                settings.pop(name, None)
            name = f"{result.method} B={result.megabatches}"
            new_group = WaitingRuns(name, result.megabatches, {})
            group = groups.setdefault(canonical(settings), new_group)
            group.curves[result.waiting_time] = mean_curve(result)
    return list(groups.values())


def mean_curve(result: Result) -> dict[int, float]:
    """The metric by t, mean over seeds."""
    curve = {}
    for t in range(1, result.progress + 1):
        curve[t] = fmean(rows[t]["value"] for rows in result.repeats)
    return curve


def regrets_of(group: WaitingRuns, now: int) -> list[float | None]:
    """The regret of each rule at t = `now`; None: it picks none yet."""
    end = group.end
    curves = dict(sorted(group.curves.items()))
    measures = {w: recent(curve, end, end - now) for w, curve in curves.items()}
    best = min(measures.values())
    regrets: list[float | None] = []
    for rule in RULES.values():
        w = rule(curves, now, end)
        regrets.append(measures[w] / best - 1 if w else None)
    return regrets


def main(places: list[str]) -> None:
    """Print the regret of each rule at t = B/10, B/5 and B/2."""
    regrets_by_name = defaultdict(list)
    for group in groups_of(places):
        complete = {}
        for w, curve in group.curves.items():
            if max(curve, default=0) == group.end:
                complete[w] = curve
        if 1 in complete and len(complete) > 1:
            for now in (group.end // 10, group.end // 5, group.end // 2):
                regrets = regrets_of(group._replace(curves=complete), now)
                regrets_by_name[group.name].append(regrets)
    print("| mean (worst) regret, % | " + " | ".join(RULES) + " |")
    print("|---" * (1 + len(RULES)) + "|")
    for name, rows in regrets_by_name.items():
        cells = map(cell_of, zip(*rows, strict=True))
        print(f"| {name} | " + " | ".join(cells) + " |")


def cell_of(regrets: Sequence[float | None]) -> str:
    """Mean and worst regret in percent, without those that are None; "" of none."""
    numbers = [regret for regret in regrets if regret is not None]
    if not numbers:
        return ""
    return f"{100 * fmean(numbers):.1f} ({100 * max(numbers):.1f})"
