"""Equations 1 and 2, perplexity and bits per byte."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alma import metrics


def test_cer_leaves_out_the_untrained_error():
    assert metrics.cumulative_error_rate({0: 0.9, 1: 0.5, 2: 0.25}) == 0.75
    assert metrics.cumulative_error_rate({1: 0.5, 2: 0.25}) == 0.75


def test_memory_and_compute_count_t_0():
    assert metrics.cumulative_memory({0: 10, 1: 10, 2: 30}) == 50
    assert metrics.cumulative_compute({0: 1.0, 1: 0.0, 2: 4e20}) == 4e20 + 1
    assert metrics.cumulative_compute({0: 3, 1: 4}) == 7


def test_memory_is_exact_beyond_floating_point():
    assert metrics.cumulative_memory({0: 2**60 + 1, 1: 2**60}) == 2**61 + 1


def test_average_perplexity_of_table_2():
    base = {0: 50000.0, 1: 28.57, 2: 27.45, 3: 26.91, 4: 26.53}  # SM_w1, 4 experts
    assert metrics.average(base) == pytest.approx(27.365)
    assert metrics.cumulative_error_rate(base) == pytest.approx(109.46)


def test_average_before_any_data_is_not_a_number():
    assert math.isnan(metrics.average({0: 0.9}))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_cer_over_b_is_the_mean_error(errors):
    by_t = dict(enumerate([0.9, *errors]))
    assert metrics.cumulative_error_rate(by_t) / len(errors) == pytest.approx(metrics.average(by_t))
    assert min(errors) - 1e-9 <= metrics.average(by_t) <= max(errors) + 1e-9


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    assert metrics.perplexity(math.log(50000)) == pytest.approx(50000)
    assert metrics.perplexity(0.0) == 1.0
    assert metrics.perplexity(1e4) == math.inf


def test_a_uniform_model_of_bytes_takes_8_bits():
    assert metrics.bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)
