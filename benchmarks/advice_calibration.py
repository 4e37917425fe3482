"""How often `alma advise` sees a difference: pairs of configurations with made-up errors.

    python -m benchmarks advice_calibration --pairs 200 --seed 0     about three minutes of one core

The log error of a run is a power law with an offset, plus a run effect, plus the noise of each stage. Pairs
are two configurations of one law (the share with evidence should be near the nominal 10%), or with errors 5%
or 10% apart. A third configuration, of another size and with 3 seeds, is in the same records, except in the
row "nothing to pool", where all have one seed. Where the stream drifts, the errors of all configurations walk
together. The last table is of forecasts: how many stages to come were
in the intervals.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alma.errors import Parser
from alma.records import Run
from alma.report.advice.candidates import find_candidates, forecasts
from alma.report.advice.decisions import difference_interval
from alma.report.advice.forecast import LEVELS, interval
from alma.report.results import Result, Section
from alma.stages import stages
from alma.tables import as_text

B = 100
QUESTION = "one model or several?"
RUN_SDS = (0.0, 0.03, 0.1)
KINDS = [(w, now, 0.015) for w in (1, 10) for now in (20, 50, 90, 100)] + [(1, 90, 0.01), (1, 90, 0.02)]
"""w, now, noise of a stage."""


class Cell(NamedTuple):
    """Pairs of one kind."""

    now: int
    seeds: int
    run_sd: float  # of the run effect
    waiting_time: int = 1
    noise: float = 0.015  # of a stage
    third: int = 3  # seeds of the third configuration
    gap: float = 0.0  # log ratio of the two errors
    drift: float = 0.0  # deviation of the steps of a walk that all log errors share


def make_section(cell: Cell, random: np.random.Generator) -> Section:
    """Records of sm, of ens (exp(gap) times the errors) and of a third configuration."""
    exponent, offset = random.uniform(0.2, 0.7), random.choice([0.0, 0.02, 0.05])
    kinds = [("sm", 8, cell.seeds, 0.0), ("ens", 8, cell.seeds, cell.gap), ("sm", 16, cell.third, -0.3)]
    path = cell.drift * random.standard_normal(B).cumsum() if cell.drift else np.zeros(B)
    results = []
    for learner, size, seeds, gap in kinds:
        config = {"learner": learner, "waiting_time": cell.waiting_time, "megabatches": B, "replay": False}
        config |= {"seed": 0, "hidden": size, "members": 5 if learner == "ens" else 1}
        law = np.log(0.5 * np.arange(1.0, B + 1) ** -exponent + offset) + gap + path
        repeats = [_rows(law, cell, random) for _ in range(seeds)]
        runs = tuple(Run(None, {"config": config | {"seed": seed}}) for seed in range(seeds))  # type: ignore
        results.append(Result(config, tuple(repeats), settings=f"hidden={size}", runs=runs))
    return Section("made-up errors", results)


def _rows(law: np.ndarray, cell: Cell, random: np.random.Generator) -> dict[int, dict]:
    """One run."""
    effect = cell.run_sd * random.standard_normal()
    rows = {0: _row(0, None, 0.9)}
    for stage in stages(B, cell.waiting_time, False):
        value = float(np.exp(law[stage.last - 1] + effect + cell.noise * random.standard_normal()))
        present = rows[max(rows)]
        rows |= {t: present | {"t": t, "train_flops": 0.0} for t in range(max(rows) + 1, stage.last)}
        rows[stage.last] = _row(stage.last, stage.index, value)
    return rows


def _row(t: int, stage: int | None, value: float) -> dict:
    measured = {"metric": "error", "value": value, "parameters": 80, "train_flops": 1e12, "extra": {}}
    return {"t": t, "stage": stage, **measured}


def outcome(cell: Cell, pairs: int, by: str = "coming", seed: int = 0) -> tuple[float, float]:
    """Share of the pairs of a cell with evidence that ens is worse, and that it is better."""
    random = np.random.default_rng(seed)
    worse, better = 0, 0
    for _ in range(pairs):
        all_forecasts = forecasts(find_candidates(make_section(cell, random), cell.now), by)
        low, high = difference_interval(QUESTION, all_forecasts[0], all_forecasts[1], all_forecasts)
        worse, better = worse + (low > 0), better + (high < 0)
    return worse / pairs, better / pairs


def equal_learners(pairs: int, seed: int) -> Iterator[list[str]]:
    """Rows of the table of equal learners."""
    kinds = [(sd, seeds) for sd in RUN_SDS for seeds in (1, 3)]
    yield ["w", "now", "stage noise", *(f"run SD {sd:.0%}, {seeds} seed(s)" for sd, seeds in kinds)]
    rows: dict[tuple, list] = {
        (w, now, noise): [Cell(now, n, sd, w, noise) for sd, n in kinds] for w, now, noise in KINDS
    }
    rows[1, "90, nothing to pool", 0.015] = [Cell(90, 1, sd, third=1) if n == 1 else None for sd, n in kinds]
    for now in (20, 90):
        rows[1, f"{now}, stream drifts by 5%", 0.015] = [Cell(now, n, sd, drift=0.05) for sd, n in kinds]
    for (waiting_time, now, noise), cells in rows.items():
        shares = [f"{sum(outcome(cell, pairs, seed=seed)):.1%}" if cell else "" for cell in cells]
        yield [str(waiting_time), str(now), f"{noise:.1%}", *shares]


def different_learners(pairs: int, seed: int) -> Iterator[list[str]]:
    """Rows of the table of learners whose errors differ."""
    yield ["now", "errors differ by", "run SD", "seeds", "found", "wrong sign"]
    for now in (20, 50, 90):
        for gap in (0.05, 0.1):
            worse, better = outcome(Cell(now, 3, 0.03, gap=math.log1p(gap)), pairs, seed=seed)
            yield [str(now), f"{gap:.0%}", "3%", "3", f"{worse:.1%}", f"{better:.1%}"]


def forecasts_held(sections: int, seed: int) -> Iterator[list[str]]:
    """Rows of the table of forecasts."""
    yield ["w", "now", *(f"{level:.0%} interval held" for level in LEVELS)]
    for waiting_time, now in [(w, now) for w in (1, 10) for now in (20, 50, 90)]:
        random, cell = np.random.default_rng(seed), Cell(now, 3, 0.03, waiting_time)
        inside: dict[float, list[bool]] = {level: [] for level in LEVELS}
        for _ in range(sections):
            section = make_section(cell, random)
            for each in forecasts(find_candidates(section, now), "coming"):
                rows = each.candidate.result.repeats
                came = [np.mean([run[t]["value"] for run in rows]) for t in each.candidate.to_come]
                for level in LEVELS:
                    low, high = interval(each.draws, level)
                    inside[level] += ((low <= came) & (came <= high)).tolist()
        yield [str(waiting_time), str(now), *(f"{np.mean(inside[level]):.1%}" for level in LEVELS)]


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = Parser(prog="python -m benchmarks advice_calibration", description=__doc__)
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="pairs of a cell (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the made-up runs (default: 0)")
    options = parser.parse_args(arguments)
    pairs, seed = options.pairs, options.seed
    for title, rows in (
        (f"Equal learners: share of {pairs} pairs with evidence (nominal: 10%)", equal_learners(pairs, seed)),
        (f"Different learners: share of {pairs} pairs with evidence", different_learners(pairs, seed)),
        ("Forecasts: share of the stages to come", forecasts_held(max(1, pairs // 4), seed)),
    ):
        print(title, as_text(list(rows)), sep="\n", end="\n\n")
