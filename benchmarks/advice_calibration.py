"""Differences that `alma advise` sees and that are not there, or are; how its forecasts hold.

    python -m benchmarks advice_calibration --records 400 --seed 0     half an hour of one core

The log error of a run is a power law with an offset, plus a run effect, plus the noise of each stage (1.5%).
Fields of 2 to 24 configurations have one law: a *report* has evidence if any of its answers has. Run effects
have one deviation (3%) or one of 1 to 16% for each configuration. Fixed pairs have errors 5% apart. Forecasts
are of curves inside the family of laws and of four that are not, or only since a short while.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alma.errors import Parser
from alma.records import Run
from alma.report.advice.candidates import choose, find_candidates
from alma.report.advice.comparison import Field, compare
from alma.report.advice.forecast import Fit, LearningCurve, estimate_scatter, interval
from alma.report.results import Result, Section
from alma.tables import as_text

B, NOW, NOISE = 40, 20, 0.015
FIELDS = (2, 4, 12, 24)
SEEDS = (2, 3, 5)
AXES = {
    "replay_share": (0, 0.5),
    "average": (None, "poly:8"),
    "hidden": (8, 16, 32),
    "learner": ("sm", "ens"),
}
Law = Callable[[np.random.Generator], np.ndarray]
T = np.arange(1.0, 101)
CURVES: dict[str, Law] = {
    "inside the family": lambda r: 0.5 * T ** -r.uniform(0.2, 0.7) + r.choice([0.0, 0.02, 0.05]),
    "exponential to a plateau": lambda r: 0.05 + 0.45 * np.exp(-T / r.uniform(15, 30)),
    "kink at t = 30": lambda r: 0.5 * np.minimum(T, 30) ** -0.5 * np.maximum(T / 30, 1) ** -0.1,
    "falls, then flat from t = 25": lambda r: 0.5 * np.minimum(T, 25) ** -0.5,
    "a - b log t": lambda r: (u := r.uniform(0.5, 0.9)) - u / 5.5 * np.log(T),
}


def make_section(
    gaps: Sequence[float], spreads: Sequence[float], seeds: int, random: np.random.Generator
) -> Section:
    """Records of a configuration for each log ratio of errors and deviation of run effects."""
    t = np.arange(1.0, B + 1)
    law = np.log(0.5 * t ** -random.uniform(0.2, 0.7) + random.choice([0.0, 0.02, 0.05]))
    kinds = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    results = []
    for kind, gap, spread in zip(kinds, gaps, spreads, strict=False):
        kind = {name: value for name, value in kind.items() if value is not None}
        config = kind | {"waiting_time": 1, "megabatches": B, "replay": False}
        config |= {"members": 5 if kind["learner"] == "ens" else 1}
        effects = spread * random.standard_normal((seeds, 1))
        values = np.exp(law + gap + effects + NOISE * random.standard_normal((seeds, B)))
        errors = [[0.9, *each] for each in values.tolist()]
        repeats = tuple({i: _row(i, value) for i, value in enumerate(each)} for each in errors)
        runs = tuple(Run(None, {"config": config | {"seed": seed}}) for seed in range(seeds))  # type: ignore
        results.append(Result(config | {"seed": 0}, repeats, settings=str(kind), runs=runs))
    return Section("made-up errors", results)


def _row(t: int, value: float) -> dict:
    stage = t - 1 if t else None
    costs = {"parameters": 80, "train_flops": 1e12, "seconds": 1.0}
    return {"t": t, "stage": stage, "metric": "error", "value": value, "extra": {}} | costs


def fields(records: int, seed: int) -> Iterator[list[str]]:
    """Share of reports with any evidence among equal configurations."""
    yield ["configurations", "spread of runs", *(f"{n} seeds" for n in SEEDS)]
    for count, unequal in itertools.product(FIELDS, (False, True)):
        shares = []
        for seeds in SEEDS:
            random, found = np.random.default_rng(seed), 0
            for _ in range(records):
                spreads = np.geomspace(0.01, 0.16, count) if unequal else np.full(count, 0.03)
                made = find_candidates(
                    make_section([0.0] * count, random.permutation(spreads).tolist(), seeds, random), NOW
                )
                choice = choose(made)
                assert choice
                found += any(each.evidence for each in compare(Field(made), choice, made))
            shares.append(f"{found / records:.1%}")
        yield [str(count), "1 to 16%" if unequal else "3%", *shares]


def pairs(records: int, seed: int) -> Iterator[list[str]]:
    """Share of fixed pairs, beside a third configuration, in which the better side is found."""
    yield ["spread of runs", *(f"{n} seeds: {what}" for n in SEEDS for what in ("found", "wrong sign"))]
    for spread in (0.0, 0.03, 0.1):
        cells = []
        for seeds in SEEDS:
            random, right, wrong = np.random.default_rng(seed), 0, 0
            for _ in range(records):
                section = make_section([0.0, math.log(1.05), -0.3], [spread] * 3, seeds, random)
                made = find_candidates(section, NOW)
                low, high = Field(made).interval("one model or several?", 0, 1)
                right, wrong = right + (low > 0), wrong + (high < 0)
            cells += [f"{right / records:.1%}", f"{wrong / records:.1%}"]
        yield [f"{spread:.0%}", *cells]


def held(records: int, seed: int) -> Iterator[list[str]]:
    """Share of the stages to come, up to t = 100, in their 90% intervals, and how far forecasts are off."""
    origins = (20, 50)
    yield ["curve", *(f"t = {now}: {what}" for now in origins for what in ("held", "off by", "as last time"))]
    for name, law in CURVES.items():
        cells = []
        for now in origins:
            random, scores = np.random.default_rng(seed), []
            for _ in range(records):
                effects = 0.03 * random.standard_normal((3, 1))
                values = law(random) * np.exp(effects + NOISE * random.standard_normal((3, 100)))
                curve = LearningCurve(T[:now], values[:, :now])
                draws, _ = Fit(curve, estimate_scatter([curve])).draw(T[now:].tolist(), 1000, random)
                (low, high), came = interval(draws), values[:, now:].mean(0)
                middle, present = np.median(draws, 0), values[:, now - 1].mean()
                off, naive = (abs(np.log(each / came)).mean() for each in (middle, present))
                scores.append([((low <= came) & (came <= high)).mean(), off, naive])
            cells += [f"{share:.1%}" for share in np.mean(scores, 0)]
        yield [name, *cells]


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = Parser(prog="python -m benchmarks advice_calibration", description=__doc__)
    add = parser.add_argument
    add("--records", type=int, default=400, metavar="N", help="of a kind (default: 400)")
    add("--seed", type=int, default=0, metavar="S", help="of the made-up runs (default: 0)")
    options = parser.parse_args(arguments)
    records, seed = options.records, options.seed
    for title, rows in (
        ("Forecasts: share of the stages to come in 90% intervals", held(records, seed)),
        (f"Fixed pairs, errors 5% apart: share of {records}", pairs(records, seed)),
        (f"Equal configurations: share of {records} reports with any evidence", fields(records, seed)),
    ):
        print(title, as_text(list(rows)), sep="\n", end="\n\n", flush=True)
