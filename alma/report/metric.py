"""Metrics of models: how values become losses of the law of staleness, and how sentences name them.

The law (`alma.report.advice.law`) adds up what age, training and the period cost. So it is fitted
to *losses*: lower is better, and differences add up. Those of perplexity are its logarithms; those
of an accuracy are percentage points below 0.
"""

import math
from dataclasses import dataclass

from alma.errors import UserError
from alma.tables import number

_LARGEST_SHOWN = 9.0  # nats; a larger extra loss would be above 800,000% of perplexity
BYTES_A_TOKEN = 4
"""Assumed for a percentage of perplexity in `--worth`, if the metric is bits a byte."""
UNLIMITED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Metric:
    """A metric, from values in files or records to losses and sentences."""

    name: str
    unit: str
    """Of the losses, in tables, of --price and in JSON."""
    noun: str = ""
    """Unit of an amount in a sentence; empty: `unit`."""
    higher_is_better: bool = False
    bounds: tuple[float, float] = UNLIMITED
    """Lowest and highest value that the metric can have."""
    factor: float = 1.0
    """Losses per unit of the values: 100 for shares that become percentage points."""
    logarithmic: bool = False
    """Whether a loss is the logarithm of a value."""
    nats: float = 0.0
    """Nats a token in a unit of loss; 0: not a log-likelihood."""
    in_percent: bool = False
    """Whether sentences state an extra loss as percent of perplexity."""
    in_points: bool = False
    """Whether losses are percentage points, which is what percent in --worth then means."""
    of_values: str = ""
    """Follows a value of run records in a sentence, such as "% error"."""
    remark: str = ""
    """A sentence about what was assumed of the values."""

    def loss(self, value: float) -> float:
        """The loss of a value."""
        if self.logarithmic:
            return math.log(value)
        scaled = self.factor * value
        return -scaled if self.higher_is_better else scaled

    @property
    def limits(self) -> tuple[float, float]:
        """Lowest and highest loss; unlimited for log-likelihoods, which have no worst value."""
        if self.nats:
            return UNLIMITED
        lowest, highest = sorted(self.loss(bound) for bound in self.bounds)
        return lowest, highest

    def least_gain(self, worth: tuple[float, bool], level: float = math.nan) -> float:
        """What a gain must be worth, as --worth states it, in the unit of the losses.

        worth  a number, and whether it is percent: of perplexity, percentage points, or of `level`
        level  mean loss of new models

        UserError: percent of a level of 0, or a share in place of percentage points.
        """
        value, is_percent = worth
        if not is_percent:
            if self.in_points and self.factor == 100 and 0 < value < 1:
                raise UserError(
                    f"--worth {value:g}: a share, or percentage points of {self.name}? "
                    f"Give --worth {100 * value:g}% or --worth {value:g}%"
                )
            return value
        if self.nats:
            return math.log1p(value / 100) / self.nats
        if self.in_points:
            return value
        if not abs(level) > 0:
            raise UserError(f"--worth in percent of a {self.name} of 0: give --worth as a number")
        return value / 100 * abs(level)

    def text(self, loss: float) -> str:
        """An extra loss in a sentence, such as "1.6%" (of perplexity) or "2.1 points of error"."""
        amount = self._amount(loss)
        suffix = self._suffix
        if amount == "1":
            suffix = suffix.replace(" points", " point", 1)
        return amount + suffix

    def interval(self, mean: float, low: float, high: float) -> str:
        """As `text`, with the interval, such as "4.1% [3%, 5.2%]" or "2 points [1, 3]"."""
        ends = "?"
        if low <= high:
            ends = f"{self._amount(low)}, {self._amount(high)}"
        if self.in_percent:
            return f"{self._amount(mean)} [{ends}]"
        return f"{self.text(mean)} [{ends}]"

    def older(self, mean: float, low: float, high: float) -> str:
        """How an older model compares with a new one, such as "2.1% [1%, 3.2%] worse".

        An older model that is better is said to be so; chance may explain it if the interval holds
        zero.
        """
        if not mean < 0:
            return f"{self.interval(mean, low, high)} worse"
        text = f"{self.interval(-mean, -high, -low)} better"
        return f"{text} (chance may explain it)" if high > 0 else text

    @property
    def unit_of_differences(self) -> str:
        """Unit of a difference of two values of run records."""
        return "% of perplexity" if self.in_percent else self.unit

    def scale_of_differences(self, level: float, factor: float) -> float:
        """What turns a difference of values of run records into `unit_of_differences`.

        level   the value that 100% of perplexity is
        factor  of `Display`: 100 for shares
        """
        return 100 / level if self.in_percent else factor

    def difference(self, mean: float, low: float, high: float) -> str:
        """A difference in `unit_of_differences` with its interval, in a sentence."""
        ends = f"[{number(low)}, {number(high)}]" if low <= high and math.isfinite(high) else "[?]"
        if self.in_percent:
            return f"{number(mean)}% {ends} of perplexity"
        return f"{number(mean)} {ends} points of error"

    @property
    def _suffix(self) -> str:
        return "" if self.in_percent else f" {self.noun or self.unit}"

    def _amount(self, loss: float) -> str:
        if not self.in_percent:
            return number(loss)
        nats = self.nats * loss
        value = percent_of_perplexity(nats)
        if abs(value) < 99.5:
            return f"{value:.2g}%"
        return f"over {value:,.0f}%" if nats > _LARGEST_SHOWN else f"{value:,.0f}%"

    def change(self, losses: str) -> str:
        """Begins a sentence about extra `losses`, such as "Accuracy falls by 0.8 points"."""
        verb = "falls" if self.higher_is_better else "rises"
        unit = self.unit.removesuffix(f" of {self.name}")
        amount = losses if unit == self.name else f"{losses} {unit}"
        return f"{self.name[:1].upper()}{self.name[1:]} {verb} by {amount}"


def percent_of_perplexity(nats: float) -> float:
    """What an extra loss in nats a token is in percent of perplexity, at most 810,208."""
    return 100 * math.expm1(min(nats, _LARGEST_SHOWN))


NATS_A_TOKEN = Metric("loss", "nats a token", nats=1.0, in_percent=True, of_values=" perplexity")
"""Of run records with perplexity."""
PERCENT_ERROR = Metric(
    "loss",
    "percentage points",
    noun="points",
    bounds=(0.0, 100.0),
    in_points=True,
    of_values="% error",
)
"""Of run records with an error; their losses are in percent."""
BY_UNIT = {metric.unit: metric for metric in (NATS_A_TOKEN, PERCENT_ERROR)}
"""The metrics of run records."""
OF_RECORDS = {"perplexity": NATS_A_TOKEN, "error": PERCENT_ERROR}
"""The same by the metric that the rows name."""
