"""The paper's tables as data."""

import pytest

from alma.report.lm.reference import reference

PAPER = reference()


def test_reference_tables_hold_the_papers_numbers():
    assert len(PAPER) == 2 * 21
    assert sum(len(line.perplexity) for line in PAPER) == 2 * (5 * 4 + 8 + 8)
    by = {tuple(line[:5]): line for line in PAPER}
    assert len(by) == len(PAPER)
    sm = by["sm", 1, 1, "12", "large"]
    assert (sm.parameters, sm.perplexity) == (436e6, {1: 21.63, 2: 20.26, 3: 19.44, 4: 18.98})
    assert by["gmoe", 1, 1, "6", "base"][5:] == (78e6, {2: 26.46})
    for size, total in (("base", 911.84), ("large", 712.67)):
        perplexities = sum(sum(line.perplexity.values()) for line in PAPER if line.size == size)
        assert perplexities == pytest.approx(total)
