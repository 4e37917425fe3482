"""Verdicts on the paper's findings: the page is what its numbers give, by the rules it states."""

import re
import shutil
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from alma.errors import UserError
from benchmarks import finding_numbers, verdicts

README = verdicts.RESULTS.parent.parent / "README.md"


@pytest.fixture
def results(tmp_path):
    """A copy of docs/results, to plant differences in."""
    return shutil.copytree(verdicts.RESULTS, tmp_path / "results")


def plant(path, old, new):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_page_and_readme_say_what_the_tables_give():
    page = (verdicts.RESULTS / "findings.md").read_text("utf-8")
    assert page == verdicts.compute_page(verdicts.RESULTS)
    counts = Counter(finding.verdict for finding in verdicts.read_findings(verdicts.RESULTS))
    assert sum(counts.values()) == 48
    sentence = re.search(
        r"Of the paper's 48 .*?failures", README.read_text("utf-8").replace("\n", " ")
    )
    for verdict in ("shown", "in part", "contradicted"):
        assert re.search(rf"\b{counts[verdict]} (are )?{verdict}\b", sentence[0]), sentence[0]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("findings.md", "Table 1 | contradicted |", "Table 1 | shown |"),
        ("findings.md", " shown, 2", " shown, 3"),
        ("findings.md", "-0.91 ±0.3", "-0.81 ±0.3"),
        ("findings.yaml", "- half gens < half gmoe @", "- half gmoe < half gens @"),
        ("findings.yaml", "  other_data: true\n", ""),
        ("findings.yaml", "  untried: true\n", ""),
    ],
)
def test_a_planted_difference_is_seen(results, file, old, new):
    plant(results / file, old, new)
    try:
        computed = verdicts.compute_page(results)
    except UserError:
        return
    assert computed != (results / "findings.md").read_text("utf-8")


def test_a_number_that_no_page_has_is_refused(results):
    plant(results / "findings.csv", "saturated sm 4,1,t = 4,13.41", "saturated sm 4,1,t = 4,13.47")
    with pytest.raises(UserError, match=r"saturated sm 4, t = 4: 13\.47 in grow\.md#language"):
        verdicts.compute_page(results)
    plant(results / "grow.md", "13.41", "13.47")  # table and CSV agree: now the page differs
    computed = verdicts.compute_page(results)
    assert computed != (results / "findings.md").read_text("utf-8")


def numbers_of(tmp_path, rows):
    lines = ["source,configuration,seed,measure,value,deviation"]
    lines += [f"page.md#a,{row}" for row in rows]
    path = tmp_path / "findings.csv"
    path.write_text("\n".join(lines), "utf-8")
    return finding_numbers.read_numbers(path)


def seeds(name, *values):
    return [f"{name},{seed},CER,{value}," for seed, value in enumerate(values)]


def test_intervals_are_students_and_welchs(tmp_path):
    first, second = [3.0, 4.0, 4.4], [5.0, 5.2, 7.0]
    numbers = numbers_of(
        tmp_path,
        [*seeds("a", *first), *seeds("b", *second), "c,0-2,CER,3.8,0.5", "d,0-4,CER,5.0,0.9"],
    )
    paired = finding_numbers.compare(numbers, "a < b @ CER")
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert paired.difference - paired.interval == pytest.approx(expected.low)
    assert paired.percent_by_seed[0] == pytest.approx(-40)
    assert paired.outcome == "as claimed"
    welch = finding_numbers.compare(numbers, "c < d @ CER")
    unpaired = stats.ttest_ind_from_stats(3.8, 0.5, 3, 5.0, 0.9, 5, equal_var=False)
    freedom = 5.98  # Welch's
    half = stats.t.ppf(0.975, freedom) * np.sqrt(0.25 / 3 + 0.81 / 5)
    assert welch.interval == pytest.approx(half, rel=0.01)
    assert (welch.outcome == "as claimed") == (unpaired.pvalue < 0.05)


@pytest.mark.parametrize(
    ("first", "second", "entry", "verdict"),
    [
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.1), {}, "shown"),
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.1), {"some_of_the_claim": True}, "in part"),
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.1), {"other_data": True}, "in part"),
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.1), {"untried": True}, "not tried"),
        ((1.0, 1.1), (2.0, 2.2), {}, "in part"),
        ((1.0, 1.1, 1.2), (1.1, 1.9, 1.3), {}, "in part"),  # lower in each seed, interval over zero
        ((1.0, 1.1, 1.2), (0.9, 1.9, 1.3), {}, "no evidence"),
        ((2.0, 2.2, 2.1), (1.0, 1.1, 1.2), {}, "contradicted"),
        ((2.0, 2.2), (1.0, 1.1), {}, "no evidence"),
        ((2.0, 2.2, 2.1), (1.0, 1.1, 1.2), {"other_data": True}, "not tried"),
    ],
)
def test_rules(tmp_path, first, second, entry, verdict):
    numbers = numbers_of(tmp_path, [*seeds("a", *first), *seeds("b", *second)])
    assert verdicts.judge(entry, [finding_numbers.compare(numbers, "a < b @ CER")]) == verdict


def test_close_numbers_need_their_interval_within_the_margin(tmp_path):
    rows = [*seeds("a", 10.0, 10.2, 10.1), *seeds("b", 10.1, 10.1, 10.2), *seeds("c", 9.0, 11, 12)]
    numbers = numbers_of(tmp_path, [*rows, *seeds("d", 12.0, 12.2, 12.1)])
    outcomes = [finding_numbers.compare(numbers, f"a ~ {name} @ CER").outcome for name in "bcd"]
    assert outcomes == ["as claimed", "open", "against"]
    lower_or_close = ("a <~ d", "a <~ b", "a <~ c", "d <~ a")
    outcomes = [
        finding_numbers.compare(numbers, f"{text} @ CER").outcome for text in lower_or_close
    ]
    assert outcomes == ["as claimed", "as claimed", "open", "against"]


def test_an_error_at_one_time_has_twice_the_margin_of_a_measure_over_the_stream(tmp_path):
    rows = []
    for measure in ("CER", "last"):
        rows += [f"a,0,{measure},10.7,", f"b,0,{measure},10,"]
    numbers = numbers_of(tmp_path, rows)
    outcomes = [
        finding_numbers.compare(numbers, f"a ~ b @ {measure}").outcome
        for measure in ("CER", "last")
    ]
    assert outcomes == ["few seeds, against", "few seeds, as claimed"]


def test_excess_in_percent_and_averages_by_seed(tmp_path):
    stages = [f"a,1,t = {t},{t}," for t in (1, 2, 3, 4)]
    numbers = numbers_of(tmp_path, [*stages, *seeds("b", 11, 12), *seeds("c", 10, 10)])
    assert numbers["a", "average"].mean == 2.5
    ratio = finding_numbers.compare(numbers, "c / c < b / c @ CER")
    assert (ratio.first, ratio.second) == (0, pytest.approx(15))


def test_unknown_names_and_doubled_rows_are_refused(tmp_path):
    numbers = numbers_of(tmp_path, seeds("a", 1, 2))
    with pytest.raises(UserError, match=r"no 'CER' of 'b': add its rows"):
        finding_numbers.compare(numbers, "a < b @ CER")
    with pytest.raises(UserError, match="is no comparison"):
        finding_numbers.compare(numbers, "a better than b")
    with pytest.raises(UserError, match="twice"):
        numbers_of(tmp_path, [*seeds("a", 1, 2), "a,0-2,CER,1,0.1"])
