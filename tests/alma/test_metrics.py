"""Equations 1 and 2, perplexity and bits per byte."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alma import metrics


def test_sums_over_the_stream():
    """CER leaves out the untrained error; memory and compute count t = 0, memory without
    rounding."""
    assert metrics.cumulative_error_rate({0: 0.9, 1: 0.5, 2: 0.25}) == 0.75
    assert metrics.cumulative_memory({0: 2**60 + 1, 1: 2**60}) == 2**61 + 1
    assert metrics.cumulative_compute({0: 1.0, 1: 0.0, 2: 4e20}) == 4e20 + 1


def test_average_perplexity_of_table_2():
    base = {0: 50000.0, 1: 28.57, 2: 27.45, 3: 26.91, 4: 26.53}  # SM_w1, 4 experts
    assert metrics.average(base) == pytest.approx(27.365)
    assert metrics.cumulative_error_rate(base) == pytest.approx(109.46)
    assert math.isnan(metrics.average({0: 0.9}))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_cer_over_b_is_the_mean_error(errors):
    by_t = dict(enumerate([0.9, *errors]))
    assert metrics.cumulative_error_rate(by_t) / len(errors) == pytest.approx(metrics.average(by_t))
    assert min(errors) - 1e-9 <= metrics.average(by_t) <= max(errors) + 1e-9


MATRIX = {0: [9, 9, 9], 1: [1, 2, 4], 2: [8, 16, 32], 3: [64, 128, 256]}


def test_transfer_is_the_mean_of_each_part_of_the_matrix():
    transfer = metrics.transfer(MATRIX)
    assert transfer.in_distribution == pytest.approx((1 + 16 + 256) / 3)
    assert transfer.backward_transfer == pytest.approx((8 + 64 + 128) / 3)
    assert transfer.forward_transfer == pytest.approx((2 + 4 + 32) / 3)
    assert transfer.average_seen == pytest.approx((1 + (8 + 16) / 2 + (64 + 128 + 256) / 3) / 3)


def test_transfer_of_perplexities_is_the_mean_of_their_logarithms():
    powers = [(0 + 4 + 8) / 3, (3 + 6 + 7) / 3, (1 + 2 + 5) / 3, (0 + 3.5 + 7) / 3]
    assert metrics.transfer(MATRIX, logarithmic=True) == pytest.approx(
        [2**power for power in powers]
    )


def test_transfer_over_the_first_rows():
    """A mean without cells is None."""
    transfer = metrics.transfer({t: MATRIX[t] for t in (1, 2)})
    assert transfer == pytest.approx(((1 + 16) / 2, 8, (2 + 4 + 32) / 3, (1 + 12) / 2))
    assert metrics.transfer({1: [1, 2, 4]}) == (1, None, 3, 1)
    for logarithmic in (False, True):
        assert metrics.transfer({0: [9], 1: [1]}, logarithmic) == (1, None, None, 1)
    assert metrics.transfer({0: [9, 9]}) == metrics.transfer({}) == (None,) * 4


def test_a_uniform_model():
    """The vocabulary is its perplexity; one of bytes takes 8 bits."""
    assert metrics.perplexity(math.log(50000)) == pytest.approx(50000)
    assert metrics.perplexity(1e4) == math.inf
    assert metrics.bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)


def test_a_perplexity_of_zero_has_no_logarithm():
    transfer = metrics.transfer({1: [0.0, 2.0], 2: [3.0, 4.0]}, logarithmic=True)
    assert math.isnan(transfer.in_distribution)
    assert transfer.backward_transfer == pytest.approx(3)
