"""Can runs at w = 1 say how long to wait? Regret of rules, from run folders with several waiting times.

Regret: the mean metric over t+1..B of the w that a rule picks, over that of the best w, minus 1. Means over
seeds; raw and averaged weights are separate configurations.
"""

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import numpy as np

from alma.configs import canonical
from alma.report.results import find_runs, find_sections

Curves = dict[int, dict[int, float]]  # w -> t -> metric, mean over seeds
Rule = Callable[[Curves, int, int], int]  # of the curves, t and B: the w that it picks


def recent(curve: dict[int, float], now: int, length: int) -> float:
    """The mean over the `length` mega-batches up to `now`."""
    return fmean(curve[t] for t in range(max(1, now - length + 1), now + 1))


def by_scatter(curves: Curves, now: int, end: int) -> int:
    """A power law through w = 1 prices the age of the served model; larger stages remove its scatter."""
    t = np.arange(max(1, now // 4), now + 1)
    logs = np.log([max(curves[1][i], 1e-9) for i in t.tolist()])
    slope = min(0.0, float(np.polyfit(np.log(t), logs, 1)[0])) if len(t) > 1 else 0.0
    scatter = float(np.std(np.diff(logs)) / np.sqrt(2)) if len(t) > 2 else 0.0

    to_come = np.arange(now + 1, end + 1)

    def pay(w: int) -> float:
        served = np.maximum(now, to_come - to_come % w)
        return float(np.mean(served**slope) * np.exp(-scatter * (1 - w**-0.5)))

    return min(curves, key=pay)


def short_run(count: int) -> Rule:
    """w = 1, or the w nearest to B / 50 if it is lower at its stage `count`; 0: that is after t."""

    def pick(curves: Curves, now: int, end: int) -> int:
        w = near(curves, end)
        if count * w > now:
            return 0
        # one value of w = 1 scatters
        return w if curves[w][count * w] < recent(curves[1], count * w, w) else 1

    return pick


def near(curves: Curves, end: int) -> int:
    """The waiting time nearest to B / 50, but not 1."""
    return min((w for w in curves if w > 1), key=lambda w: abs(w - end / 50))


RULES: dict[str, Rule] = {
    "w=1": lambda curves, now, end: 1,
    "w=B/50": lambda curves, now, end: near(curves, end),
    "scatter of w=1": by_scatter,
    **{f"at stage {n}": short_run(n) for n in (1, 2, 5)},
    "lowest now, all w": lambda curves, now, end: min(
        curves, key=lambda w: recent(curves[w], now, max(curves))
    ),
}


def main(places: list[str]) -> None:
    """Print the regret of each rule at t = B/10, B/5 and B/2."""
    groups: dict[str, Curves] = defaultdict(dict)
    names = {}
    for section in find_sections(find_runs(places)):
        for result in section.results:
            key = canonical({k: v for k, v in result.config.items() if k not in ("waiting_time", "seed")})
            names[key] = f"{result.method} B={result.megabatches}", result.megabatches
            rows = result.repeats
            values = {t: fmean(r[t]["value"] for r in rows) for t in range(1, result.progress + 1)}
            groups[key][result.waiting_time] = values
    regrets = defaultdict(list)
    for key, curves in groups.items():
        name, end = names[key]
        curves = {w: curve for w, curve in sorted(curves.items()) if max(curve, default=0) == end}
        if 1 not in curves or len(curves) < 2:
            continue
        for now in (end // 10, end // 5, end // 2):
            pays = {w: recent(curve, end, end - now) for w, curve in curves.items()}
            best = min(pays.values())
            picks = (rule(curves, now, end) for rule in RULES.values())
            regrets[name].append([pays[w] / best - 1 if w else None for w in picks])
    print("| mean (worst) regret, % | " + " | ".join(RULES) + " |")
    print("|---" * (1 + len(RULES)) + "|")
    for name, found in regrets.items():
        columns = [[x for x in column if x is not None] for column in zip(*found, strict=True)]
        cells = [f"{100 * fmean(of):.1f} ({100 * max(of):.1f})" if of else "" for of in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
