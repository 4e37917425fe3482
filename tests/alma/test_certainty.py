"""How sure an answer is: shares in words, and older models that are better."""

import math

import pytest

from alma.report.advice.certainty import likely, share_above
from alma.report.losses import MeanOverSeeds
from alma.report.metric import NATS_A_TOKEN, PERCENT_ERROR


def test_a_share_is_95_percent_where_the_interval_ends():
    estimate = MeanOverSeeds(2.0, 0.5, 3.0)  # wider below
    assert share_above(estimate, 0.5) == pytest.approx(0.95)
    assert share_above(estimate, 3.0) == pytest.approx(0.05)
    assert share_above(estimate, 2.0) == 0.5
    assert math.isnan(share_above(MeanOverSeeds(2.0, -math.inf, math.inf)))
    assert share_above(MeanOverSeeds(1.0, 1.0, 1.0)) == 1


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.0, "very likely (over 99%)"),
        (0.95, "very likely (95%)"),
        (0.9499, "likely (94%)"),
        (0.5, "about as likely as not (50%)"),
        (0.001, "unlikely (under 1%)"),
        (math.nan, "unknown"),
    ],
)
def test_a_share_in_words(share, words):
    assert likely(share) == words


def test_an_older_model_that_is_better_is_said_to_be_so():
    assert PERCENT_ERROR.older(2, 1, 3) == "2 points [1, 3] worse"
    assert PERCENT_ERROR.older(-2, -3, -1) == "2 points [1, 3] better"
    better = NATS_A_TOKEN.older(-0.019, -0.04, 0.01)
    assert better.startswith("1.9% [")
    assert better.endswith("] better (chance may explain it)")
