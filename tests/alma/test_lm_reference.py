"""The paper's tables as data."""

import re

import pytest

from alma.errors import UserError
from alma.report.lm import reference as reference_module
from alma.report.lm.reference import reference, reference_iid

from .synthetic import ROOT

PAPER = reference()


def test_reference_tables_hold_the_papers_numbers():
    assert len(PAPER) == 2 * 21
    assert sum(len(line.perplexity) for line in PAPER) == 2 * (5 * 4 + 8 + 8)
    by = {tuple(line[:5]): line for line in PAPER}
    assert len(by) == len(PAPER)
    sm = by["sm", 1, 1, "12", "large"]
    assert (sm.parameters, sm.perplexity) == (436e6, {1: 21.63, 2: 20.26, 3: 19.44, 4: 18.98})
    assert by["sm", 4, 4, "12", "base"].perplexity == {4: 22.87}
    assert by["sm", 3, 1, "8", "large"].perplexity == {3: 19.29}
    assert by["ens", 1, 1, "4@4", "base"].perplexity == {1: 25.03, 2: 24.03, 3: 23.45, 4: 23.29}
    assert (by["gens", 1, 1, "4@3", "large"].parameters, by["gens", 1, 1, "4@3", "base"].perplexity) == (
        630e6,
        {3: 25.41},
    )
    assert by["gmoe", 1, 1, "6", "base"][5:] == (78e6, {2: 26.46})
    totals = {
        s: sum(sum(line.perplexity.values()) for line in PAPER if line.size == s) for s in ("base", "large")
    }
    assert totals == pytest.approx({"base": 911.84, "large": 712.67})


def test_the_papers_table_1_agrees_with_its_table_2():
    by = {tuple(line[:5]): line.perplexity for line in PAPER}
    pairs = reference_iid()
    assert pairs["base", "ens", "4@2", 3] == (24.30, 24.57)
    assert pairs["large", "ens", "4@2", 4] == (17.88, 18.92)
    assert len(pairs) == 4
    for (size, learner, experts, k), (iid, seq) in pairs.items():
        assert seq == by[learner, 1, 1, experts, size][k]
        # The paper contradicts itself here: 17.84 in Table 2 is 17.88 in Table 1.
        assert iid == pytest.approx(by[learner, k, k, experts, size][k], abs=0.05)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("28.57,27.45", "28.57,zero", "table2.csv:2: 'zero' is not a positive"),
        ("sm,3,1,8,91M,*", "sm,3,1,8,91M,25.00", "table2.csv:5: `*` belongs"),
        ("sm,1,1,8,91M", "xx,1,1,8,91M", "table2.csv:3: not a line"),
        (",20.15", "", "table2.csv:22: not a line"),
        ("4@4,260M,,,,25.01", "4@4,260M,,,,", "table2.csv:18: no perplexity of base"),
        ("gens,1,1,4@1", "gens,one,1,4@1", "table2.csv:15: 'one' is not a positive"),
    ],
)
def test_a_damaged_reference_is_an_error_with_its_line(tmp_path, monkeypatch, before, after, complaint):
    text = (ROOT / "alma/report/lm/table2.csv").read_text()
    assert text.count(before) == 1
    (tmp_path / "table2.csv").write_text(text.replace(before, after))
    monkeypatch.setattr(reference_module, "files", lambda package: tmp_path)
    with pytest.raises(UserError, match=re.escape(complaint)):
        reference()
