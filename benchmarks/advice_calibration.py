"""How often `alma advise` sees differences, with and without one, and how its forecasts hold.

    python -m benchmarks advice_calibration --records 400 --seed 0

It takes half an hour of one core. The log error of a run is a power law with an offset, plus a run
effect, plus the noise of each stage (1.5%). Fields of 2 to 24 configurations have one law: a
*report* has evidence if any of its answers has. Run effects have one deviation (3%), or one of 1 to
16% for each configuration. Fixed pairs have errors 5% apart. Forecasts are of curves inside the
family of laws, and of four kinds outside of it or only since a short while inside.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alma.errors import Parser
from alma.records import Run
from alma.report.advice.candidates import Candidate, choose, find_candidates
from alma.report.advice.comparison import Field, compare
from alma.report.advice.forecast import Fit, LearningCurve, estimate_scatter, interval
from alma.report.results import Result, Section
from alma.tables import as_text

B = 40
NOW = 20
NOISE = 0.015
FIELDS = (2, 4, 12, 24)
SEEDS = (2, 3, 5)
AXES = {
    "replay_share": (0, 0.5),
    "average": (None, "poly:8"),
    "hidden": (8, 16, 32),
    "learner": ("sm", "ens"),
}
ORIGINS = (20, 50)
"""The t of forecasts."""
PAIR = "one model or several?"
"""The question in which the first two configurations of a section differ."""
_USUAL_SPREAD = 0.03
Law = Callable[[np.random.Generator], np.ndarray]
T = np.arange(1.0, 101)


def _logarithmic(random: np.random.Generator) -> np.ndarray:
    level = random.uniform(0.5, 0.9)
    return np.asarray(level - level / 5.5 * np.log(T))


CURVES: dict[str, Law] = {
    "inside the family": lambda r: 0.5 * T ** -r.uniform(0.2, 0.7) + r.choice([0.0, 0.02, 0.05]),
    "exponential to a plateau": lambda r: 0.05 + 0.45 * np.exp(-T / r.uniform(15, 30)),
    "kink at t = 30": lambda r: 0.5 * np.minimum(T, 30) ** -0.5 * np.maximum(T / 30, 1) ** -0.1,
    "falls, then flat from t = 25": lambda r: 0.5 * np.minimum(T, 25) ** -0.5,
    "a - b log t": _logarithmic,
}


def make_section(
    gaps: Sequence[float], spreads: Sequence[float], seeds: int, random: np.random.Generator
) -> Section:
    """Made-up records of as many configurations as there are gaps.

    gaps       log ratio of each configuration's error to the law
    spreads    deviation of the run effects of each configuration
    """
    t = np.arange(1.0, B + 1)
    law = np.log(0.5 * t ** -random.uniform(0.2, 0.7) + random.choice([0.0, 0.02, 0.05]))
    grid = itertools.product(*AXES.values())
    results = []
    for point, gap, spread in zip(grid, gaps, spreads, strict=False):
        axes = zip(AXES, point, strict=True)
        settings = {name: value for name, value in axes if value is not None}
        effects = spread * random.standard_normal((seeds, 1))
        noise = NOISE * random.standard_normal((seeds, B))
        results.append(_result(settings, np.exp(law + gap + effects + noise)))
    return Section("made-up errors", results)


def _result(settings: dict, errors: np.ndarray) -> Result:
    """A configuration with such errors, (seeds, B)."""
    config = settings | {"waiting_time": 1, "megabatches": B, "replay": False}
    config["members"] = 5 if settings["learner"] == "ens" else 1
    repeats = []
    runs = []
    for seed, of_seed in enumerate(errors.tolist()):
        repeats.append({t: _row(t, error) for t, error in enumerate([0.9, *of_seed])})
        runs.append(Run(None, {"config": config | {"seed": seed}}))  # type: ignore
    return Result(config | {"seed": 0}, tuple(repeats), settings=str(settings), runs=tuple(runs))


def _row(t: int, value: float) -> dict:
    stage = t - 1 if t else None
    costs = {"parameters": 80, "train_flops": 1e12, "seconds": 1.0}
    return {"t": t, "stage": stage, "metric": "error", "value": value, "extra": {}} | costs


def fields(records: int, seed: int) -> Iterator[list[str]]:
    """Share of reports with any evidence among equal configurations."""
    yield ["configurations", "spread of runs", *(f"{n} seeds" for n in SEEDS)]
    for count, is_unequal in itertools.product(FIELDS, (False, True)):
        spreads = np.full(count, _USUAL_SPREAD)
        if is_unequal:
            spreads = np.geomspace(0.01, 0.16, count)
        shares = []
        for seeds in SEEDS:
            random = np.random.default_rng(seed)
            reports = 0
            for _ in range(records):
                shuffled = random.permutation(spreads).tolist()
                section = make_section([0.0] * count, shuffled, seeds, random)
                reports += has_evidence(find_candidates(section, NOW))
            shares.append(f"{reports / records:.1%}")
        yield [str(count), "1 to 16%" if is_unequal else "3%", *shares]


def has_evidence(candidates: Sequence[Candidate]) -> bool:
    """Whether the report on candidates has any evidence."""
    comparisons = compare(Field(candidates), choose(candidates), candidates)
    return any(comparison.evidence for comparison in comparisons)


def pairs(records: int, seed: int) -> Iterator[list[str]]:
    """Share of fixed pairs, beside a third configuration, in which the better side is found."""
    header = ["spread of runs"]
    for seeds in SEEDS:
        header += [f"{seeds} seeds: found", f"{seeds} seeds: wrong sign"]
    yield header
    for spread in (0.0, 0.03, 0.1):
        cells = []
        for seeds in SEEDS:
            random = np.random.default_rng(seed)
            right = 0
            wrong = 0
            for _ in range(records):
                gaps = [0.0, math.log(1.05), -0.3]
                section = make_section(gaps, [spread] * 3, seeds, random)
                low, high = Field(find_candidates(section, NOW)).interval(PAIR, 0, 1)
                right += low > 0
                wrong += high < 0
            cells += [f"{right / records:.1%}", f"{wrong / records:.1%}"]
        yield [f"{spread:.0%}", *cells]


def held(records: int, seed: int) -> Iterator[list[str]]:
    """Share of stages to come, up to t = 100, in their 90% intervals; errors of forecasts."""
    header = ["curve"]
    for now in ORIGINS:
        header += [f"t = {now}: {column}" for column in ("held", "off by", "as last time")]
    yield header
    for name, law in CURVES.items():
        cells = []
        for now in ORIGINS:
            random = np.random.default_rng(seed)
            scores = [score(law, now, random) for _ in range(records)]
            cells += [f"{share:.1%}" for share in np.mean(scores, 0)]
        yield [name, *cells]


def score(law: Law, now: int, random: np.random.Generator) -> list[float]:
    """Share of stages in their intervals; mean log error of the forecast and of the last value."""
    effects = _USUAL_SPREAD * random.standard_normal((3, 1))
    values = law(random) * np.exp(effects + NOISE * random.standard_normal((3, 100)))
    curve = LearningCurve(T[:now], values[:, :now])
    fit = Fit(curve, estimate_scatter([curve]))
    draws, _ = fit.draw(T[now:].tolist(), 1000, random)
    low, high = interval(draws)
    actual = values[:, now:].mean(0)
    inside = (low <= actual) & (actual <= high)
    error = abs(np.log(np.median(draws, 0) / actual)).mean()
    naive_error = abs(np.log(values[:, now - 1].mean() / actual)).mean()
    return [inside.mean(), error, naive_error]


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = Parser(prog="python -m benchmarks advice_calibration", description=__doc__)
    add = parser.add_argument
    add("--records", type=int, default=400, metavar="N", help="of a kind (default: 400)")
    add("--seed", type=int, default=0, metavar="S", help="of the made-up runs (default: 0)")
    options = parser.parse_args(arguments)
    records = options.records
    seed = options.seed
    tables = {
        "Forecasts: share of the stages to come in 90% intervals": held,
        f"Fixed pairs, errors 5% apart: share of {records}": pairs,
        f"Equal configurations: share of {records} reports with any evidence": fields,
    }
    for title, rows_of in tables.items():
        print(title, as_text(list(rows_of(records, seed))), sep="\n", end="\n\n", flush=True)
