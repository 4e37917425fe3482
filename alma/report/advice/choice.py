"""The choice within the limits, and the front."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from alma.report.advice.candidates import Forecast


class Limits(NamedTuple):
    """What a candidate may cost up to the end of the forecast."""

    compute: float | None = None  # TFLOPs
    parameters: float | None = None

    def allow(self, forecast: Forecast) -> bool:
        """Whether a candidate stays within the limits up to the end of the forecast."""
        if self.compute is None and self.parameters is None:
            return True
        return self.hold(forecast.candidate.compute_until, forecast.candidate.parameters_until)

    def hold(self, *costs: float) -> bool:
        """Whether compute and parameters are within the limits. 1% more counts as equal: stages differ in
        size."""
        return all(most is None or cost <= 1.01 * most for cost, most in zip(costs, self, strict=True))


RULES: dict[str, Callable[[Forecast], float]] = {
    "forecast": lambda each: each.expected,
    "lowest so far": lambda each: each.candidate.measured("average"),
    "lowest now": lambda each: each.candidate.values[each.candidate.now],
}
"""Rules of choice, of which the lowest value wins: ours, and two that need no forecast."""


def choose(found: Sequence[Forecast], limits: Limits, rule: str = "forecast") -> Forecast | None:
    """The candidate that a rule chooses within the limits, if there is one."""
    return min(filter(limits.allow, found), key=RULES[rule], default=None)


def front(found: Sequence[Forecast]) -> list[Forecast]:
    """The candidates that no other matches in expected measure, compute and parameters and beats in one of
    them; by ascending compute. Costs are compared with three digits: how stages end is not a saving."""

    def costs(each: Forecast) -> tuple[float, ...]:
        spent = each.candidate.compute_until, each.candidate.parameters_until
        return each.expected, *(float(f"{cost:.3g}") for cost in spent)

    def beats(one: Forecast, other: Forecast) -> bool:
        pairs = list(zip(costs(one), costs(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [each for each in found if not any(beats(other, each) for other in found)]
    return sorted(kept, key=lambda each: (each.candidate.compute_until, each.expected))
