"""Numbers of findings.csv and their comparisons, for `benchmarks.verdicts`.

findings.csv has a row for each configuration, measure and seed, as the tables of docs/results
print it, or one for the mean over several seeds with its standard deviation. A comparison is

    saturated sm 8 < saturated sm 4 @ t = 4           the first is lower, says the paper
    a ~ b @ CER                                       both are close
    a <~ b @ average                                  the first is lower, or close
    a / b < c / d @ CER                               of excesses of a over b, and c over d, in %
    a @ t = 50 < b @ last                             each with a measure of its own

Close: within 5% of the second for a measure over the stream, within 10% for one at a single time,
which differs more by seed.
"""

import csv
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from alma.errors import UserError

FAVOURABLE = ("as claimed", "as claimed in every seed", "few seeds, as claimed")
SEEDS = 3
"""Seeds without which nothing is shown or contradicted."""
_OVER_THE_STREAM = ("CER", "CER from t = 5", "average")
_COMPARISON = re.compile(r"(?P<first>.+?) (?P<relation><~|<|~) (?P<second>.+)")
_SEEDS = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Measured:
    """A measure of a configuration: values by seed, or only their mean and deviation."""

    values: Mapping[int, float]
    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class ClaimedDifference:
    """Two numbers and their difference, first less second, with the half of its 95% interval.

    Fields:
        relation: what the paper says of the first and the second: "<", "~" or "<~".
        margin: the largest difference of close numbers, in %.
        by_seed, percent_by_seed: differences of the seeds that both have, and in % of the second;
            empty if one has only a mean.
        interval: nan with fewer than two seeds, or without a standard deviation.
    """

    text: str
    relation: str
    margin: float
    first: float
    second: float
    difference: float
    interval: float
    count: int
    by_seed: tuple[float, ...]
    percent_by_seed: tuple[float, ...]

    @property
    def outcome(self) -> str:
        """What the comparison says of the claim."""
        if self.relation == "<":
            return self._outcome_of_order()
        margin = self.margin / 100 * abs(self.second)
        lower_is_enough = self.relation == "<~"
        distance = self.difference if lower_is_enough else abs(self.difference)
        if self.count < SEEDS or math.isnan(self.interval):
            return "few seeds, as claimed" if distance <= margin else "few seeds, against"
        if distance + self.interval <= margin:
            return "as claimed"
        return "against" if distance > self.interval else "open"

    def _outcome_of_order(self) -> str:
        if self.count < SEEDS or math.isnan(self.interval):
            return "few seeds, as claimed" if self.difference < 0 else "few seeds, against"
        if abs(self.difference) > self.interval:
            return "as claimed" if self.difference < 0 else "against"
        if self.by_seed and max(self.by_seed) < 0:
            return "as claimed in every seed"
        return "open"


def read_numbers(path: Path) -> dict[tuple[str, str], Measured]:
    """Numbers of findings.csv by configuration and measure.

    Raises UserError if a configuration has a measure twice for a seed, or both by seed and as a
    mean.
    """
    values: dict[tuple[str, str], dict[int, float]] = {}
    numbers: dict[tuple[str, str], Measured] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["configuration"], row["measure"])
            seeds_of_mean = _SEEDS.fullmatch(row["seed"])
            if key in numbers or (seeds_of_mean and key in values):
                raise UserError(f"{path}: {key[0]!r} has {key[1]!r} twice: leave one row")
            if seeds_of_mean is None:
                seeds = values.setdefault(key, {})
                if int(row["seed"]) in seeds:
                    raise UserError(f"{path}: {key[0]!r} has {key[1]!r} twice for a seed")
                seeds[int(row["seed"])] = float(row["value"])
                continue
            count = int(seeds_of_mean[2]) - int(seeds_of_mean[1]) + 1
            deviation = float(row["deviation"] or math.nan)
            numbers[key] = Measured({}, float(row["value"]), deviation, count)
    for key, seeds in values.items():
        numbers[key] = _of_seeds(seeds)
    _add_averages(numbers)
    return numbers


def _of_seeds(values: Mapping[int, float]) -> Measured:
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Measured(dict(values), statistics.fmean(numbers), deviation, len(numbers))


def _add_averages(numbers: dict[tuple[str, str], Measured]) -> None:
    """Add the average over the stream where each of its four times has its seeds."""
    times = [f"t = {t}" for t in (1, 2, 3, 4)]
    for configuration in {name for name, _ in numbers}:
        stages = [numbers.get((configuration, time)) for time in times]
        if (configuration, "average") in numbers or not all(stages):
            continue
        by_time = [stage.values for stage in stages if stage is not None]
        averages = {}
        for seed in by_time[-1]:
            if all(seed in values for values in by_time):
                averages[seed] = statistics.fmean(values[seed] for values in by_time)
        if averages:
            numbers[configuration, "average"] = _of_seeds(averages)


def _look_up(numbers: Mapping[tuple[str, str], Measured], name: str, measure: str) -> Measured:
    """A number, or the excess in % of `A / B`."""
    upper, _, lower = name.partition(" / ")
    for configuration in filter(None, (upper, lower)):
        if (configuration, measure) not in numbers:
            raise UserError(f"findings.csv has no {measure!r} of {configuration!r}: add its rows")
    over = numbers[upper, measure]
    if not lower:
        return over
    under = numbers[lower, measure]
    seeds = sorted(over.values.keys() & under.values.keys())
    if seeds:
        return _of_seeds({s: 100 * (over.values[s] / under.values[s] - 1) for s in seeds})
    return Measured({}, 100 * (over.mean / under.mean - 1), math.nan, 1)


def compare(numbers: Mapping[tuple[str, str], Measured], text: str) -> ClaimedDifference:
    """Compute a comparison of findings.yaml. Raises UserError for names without numbers."""
    parts = _COMPARISON.fullmatch(text)
    if parts is None:
        raise UserError(f"findings.yaml: {text!r} is no comparison such as 'a < b @ CER'")
    second_name, _, second_measure = parts["second"].partition(" @ ")
    first_name, _, first_measure = parts["first"].partition(" @ ")
    first = _look_up(numbers, first_name, first_measure or second_measure)
    second = _look_up(numbers, second_name, second_measure)
    measures = (first_measure or second_measure, second_measure)
    margin = 5 if all(measure in _OVER_THE_STREAM for measure in measures) else 10
    common = sorted(first.values.keys() & second.values.keys())
    by_seed = tuple(first.values[seed] - second.values[seed] for seed in common)
    percent_by_seed = tuple(100 * (first.values[s] / second.values[s] - 1) for s in common)
    if by_seed:
        paired = _of_seeds(dict(enumerate(by_seed)))
        first = _of_seeds({seed: first.values[seed] for seed in common})
        second = _of_seeds({seed: second.values[seed] for seed in common})
        difference = paired.mean
        interval = _half_interval(paired.deviation**2 / paired.count, paired.count - 1)
        count = paired.count
    else:
        difference = first.mean - second.mean
        interval = _welch(first, second)
        count = min(first.count, second.count)
    return ClaimedDifference(
        text,
        parts["relation"],
        margin,
        first.mean,
        second.mean,
        difference,
        interval,
        count,
        by_seed,
        percent_by_seed,
    )


def _half_interval(variance: float, freedom: float) -> float:
    if math.isnan(variance) or freedom < 1:
        return math.nan
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)


def _welch(first: Measured, second: Measured) -> float:
    """Half of the 95% interval of a difference of means without common seeds."""
    variances = [number.deviation**2 / number.count for number in (first, second)]
    total = sum(variances)
    if min(first.count, second.count) < 2 or math.isnan(total) or total == 0:
        return math.nan
    freedom = total**2 / (
        variances[0] ** 2 / (first.count - 1) + variances[1] ** 2 / (second.count - 1)
    )
    return _half_interval(total, freedom)
