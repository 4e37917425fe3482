"""How often `alma advise` sees a difference between equal learners, and between different ones."""

import pytest

from benchmarks import advice_calibration as calibration


@pytest.mark.parametrize(
    "cell",
    [
        calibration.Cell(90, seeds=3, run_sd=0.03),
        calibration.Cell(20, seeds=1, run_sd=0.1, waiting_time=10),
        calibration.Cell(100, seeds=1, run_sd=0.0, waiting_time=10),
    ],
)
def test_equal_learners_differ_by_chance_only(cell):
    """Of 60 pairs of one law about a tenth may show evidence: 13 or fewer with a probability of 99%."""
    assert sum(calibration.outcome(cell, 60)) <= 13 / 60


def test_one_seed_of_each_is_no_evidence():
    cell = calibration.Cell(90, seeds=1, run_sd=0.0, third=1, gap=0.5)
    assert calibration.outcome(cell, 3) == (0, 0)


def test_learners_that_differ_are_found():
    worse, better = calibration.outcome(calibration.Cell(90, seeds=3, run_sd=0.03, gap=0.15), 20)
    assert worse > 0.5
    assert better == 0
