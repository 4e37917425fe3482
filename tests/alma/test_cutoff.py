"""--cutoff: the periods that a released model has seen count in no average."""

import math

import pytest

from alma.dates import begins
from alma.options import check_ranges
from alma.protocol import TextOptions
from alma.report import age_table, compare
from alma.report.results import find_runs, group

from .synthetic import call_advise, drifting, edited, lm_run, report

PERIODS = ["2020", "2021", "2022", "2023", "2024", "2025"]


@pytest.mark.parametrize(
    ("period", "day"),
    [
        ("2023", "2023-01-01"),
        ("2023-Q2", "2023-04-01"),
        ("2023-12", "2023-12-01"),
        ("2023-W01", "2023-01-02"),
        ("2020-2024", "2020-01-01"),
        ("2021-11..2022-02", "2021-11-01"),
        ("2012-2013..2014-2015", "2012-01-01"),
    ],
)
def test_a_period_begins(period, day):
    assert begins(period) == day


@pytest.mark.parametrize(
    "text", ["2023-13", "2023-02-31", "23", "2023-05-", "May 2023", "2023-05-31T00"]
)
def test_what_is_no_date_is_refused(text):
    with pytest.raises(Exception, match=f"--cutoff {text}: give a year, month or day"):
        check_ranges(TextOptions(cutoff=text))


def made(folder, seen):
    """A run whose loss grows by 0.1 a period ahead;
    on periods that may be `seen` it falls with training."""
    run = drifting(
        lm_run(folder, [30.0] * 6, cutoff="2021-06"),
        lambda t, j: math.exp(2 + 0.1 * max(j - t, 0) - (j <= 2) * t),
    )
    extra = {"matrix_periods": PERIODS} | ({"matrix_seen": 2} if seen else {})
    return edited(run, lambda row: row["extra"].update(extra))


def test_seen_periods_count_in_no_average_and_are_named(tmp_path):
    made(tmp_path / "seen", seen=True)
    made(tmp_path / "all", seen=False)
    values = {}
    for name in ("seen", "all"):
        ((result,),) = group(find_runs([tmp_path / name]))
        values[name] = (
            compare.transfer(result.repeats[0]),
            age_table.aged([result])[0].columns,
            result,
        )
    transfer, columns, result = values["seen"]
    assert columns["staleness"] == pytest.approx([0.1])
    assert transfer.in_distribution == pytest.approx(math.exp(2))
    assert transfer.backward_transfer == transfer.average_seen == pytest.approx(math.exp(2))
    assert values["all"][0].in_distribution < transfer.in_distribution - 1
    assert result.left_out == (
        f"left out of averages: {tmp_path / 'seen'}, 2020, 2021: before its model's cutoff",
    )
    line = "2020, 2021: before its model's cutoff"
    done = report(tmp_path / "seen", "--out", tmp_path / "report")
    assert line in done.stdout + done.stderr
    assert line in call_advise(tmp_path / "seen").stdout
