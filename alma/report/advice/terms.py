"""Terms of a decision on the command line: what a gain must be worth, what a training costs."""

import argparse
import math

PRICE = (
    "of a training, in units of loss summed over periods (points of accuracy or error, nats), or "
    "both in money: TRAINING/LOSS such as 400/1000, LOSS for a unit in one period; 1%% of "
    "perplexity is 0.01 of the unit nats"
)
"""Help of --price."""


def worth_of(text: str) -> tuple[float, bool]:
    """Parse a number that may end in %; returns the number, and whether it is percent.

    Raises ArgumentTypeError if it is no number, or below 0.
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 0 on, such as 0.02 or 1%")
    return value, text.endswith("%")


def bounds_of(text: str) -> tuple[float, float]:
    """Two numbers, the first below the second; inf and -inf: no bound.

    Raises ArgumentTypeError if they are not.
    """
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = math.nan
    if not low < high:
        form = "two numbers, the first below the second, such as 0,1 or 0,inf"
        raise argparse.ArgumentTypeError(f"{text!r}: {form}")
    return low, high


def price_of(text: str) -> tuple[float, float]:
    """The price of a training in units of loss, and the money that a unit costs (0: unknown).

    Raises ArgumentTypeError if it is no number, negative or beyond 1e12.
    """
    try:
        training, slash, unit = text.partition("/")
        value = float(training) / float(unit or 1)
        money = float(unit) if slash else 0.0
    except (ValueError, ZeroDivisionError):
        value = money = math.nan
    if not (0 <= value <= 1e12 and 0 <= money <= 1e12):
        form = "numbers from 0 to 1e12, such as 0.3 or 400/1000"
        raise argparse.ArgumentTypeError(f"{text!r}: {form}")
    return value, money
