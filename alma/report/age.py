"""Losses by age from run records, regret against the best model, and means over seeds.

`alma.report.losses` has the evaluation matrices and what age adds to them.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from alma.report.losses import Losses, MeanOverSeeds, t_interval
from alma.report.results import Result, matrix
from alma.stages import stages


def losses_of(result: Result) -> Losses | None:
    """The evaluation matrices from which ages are computed, in nats per token or error in percent.

    As `all_losses_of`, without the models that `trained_before_cutoff`.
    """
    losses = all_losses_of(result)
    if not losses:
        return None
    before = len(trained_before_cutoff(result))
    seeds = tuple(lines[before:] for lines in losses.seeds)
    return Losses(losses.label, losses.until[before:], losses.periods, seeds)


def trained_before_cutoff(result: Result) -> list[int]:
    """The mega-batches at which stages ended that trained before the --cutoff of the first model.

    Such a model saw text until the cutoff, which is newer than its training data: its age is not
    that of its stage.
    """
    seen = 0
    for rows in result.repeats:
        for row in rows.values():
            seen = max(seen, row["extra"].get("matrix_seen", 0))
    return [end for end in _ends(result) if end < seen]


def _ends(result: Result) -> list[int]:
    """The mega-batches at which the stages ended that are complete."""
    plan = stages(result.megabatches, result.waiting_time)
    return [stage.last for stage in plan if stage.last <= result.progress]


def all_losses_of(result: Result) -> Losses | None:
    """The evaluation matrices of a configuration, in nats per token or error in percent.

    A row per trained model, at the mega-batch at which its stage ends; NaN on held-out parts that
    the stream did not have at that time. None without an evaluation matrix, or before the first
    stage ends.
    """
    if not all(matrix(rows) for rows in result.repeats):
        return None
    until = tuple(_ends(result))

    def loss(value: float) -> float:
        if result.metric == "perplexity":
            return math.log(value) if value > 0 else math.nan
        return result.display.factor * value

    if not until:
        return None
    periods = tuple(range(1, result.megabatches + 1))
    seeds = []
    for rows in result.repeats:
        values_by_t = matrix(rows)
        lines = []
        for t in until:
            measured = [loss(value) for value in values_by_t[t][: len(periods)]]
            missing = len(periods) - len(measured)
            lines.append((*measured, *itertools.repeat(math.nan, missing)))
        seeds.append(tuple(lines))
    return Losses(result.label, until, periods, tuple(seeds))


def best_by_period(group: Iterable[Losses]) -> dict[float, float]:
    """The lowest loss on each period, mean over seeds, of any model of any configuration."""
    best: dict[float, float] = {}
    for losses in group:
        for i, j in itertools.chain(*losses.by_age.values()):
            mean = _mean([seed[i][j] for seed in losses.seeds])
            best[losses.periods[j]] = min(mean, best.get(losses.periods[j], math.inf))
    return best


def regret(losses: Losses, best: dict[float, float], ages: Callable[[float], bool]) -> list[float]:
    """Mean loss above `best` over cells with such `ages`, one value per seed; NaN without cells.

    As the oracle-relative regret of TiC-LM (Li et al., ACL 2025, arXiv 2504.02107), whose oracle is
    trained anew on all data up to the period. Here `best` is the best model at hand.
    """
    cells = list(itertools.chain(*(at for age, at in losses.by_age.items() if ages(age))))
    regrets = []
    for seed in losses.seeds:
        regrets.append(_mean([seed[i][j] - best[losses.periods[j]] for i, j in cells]))
    return regrets


def over_seeds(values: Sequence[float]) -> MeanOverSeeds:
    """Mean and t-interval over seeds."""
    mean = _mean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return MeanOverSeeds(mean, math.nan, math.nan)
    return t_interval(mean, statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1)


def welch(ours: Sequence[float], theirs: Sequence[float]) -> MeanOverSeeds:
    """Difference of means over two groups of seeds, ours - theirs; Welch's t-interval (1947)."""
    mean = _mean(ours) - _mean(theirs)
    if min(len(ours), len(theirs)) < 2 or not math.isfinite(mean):
        return MeanOverSeeds(mean, math.nan, math.nan)
    squares = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    total = sum(squares)
    sides = zip(squares, (ours, theirs), strict=True)
    terms = sum(square**2 / (len(values) - 1) for square, values in sides)
    return t_interval(mean, math.sqrt(total), total**2 / terms if terms else 1)


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN for an empty sequence."""
    return math.fsum(values) / len(values) if values else math.nan
