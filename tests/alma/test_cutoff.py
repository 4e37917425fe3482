"""--cutoff: the periods that a released model has seen count in no average."""

import math
from functools import partial

import pytest

from alma.dates import begins
from alma.decisions.record import Record
from alma.decisions.training import Terms, is_due
from alma.options import check_ranges
from alma.protocol import TextOptions
from alma.report import age, age_table, compare
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


@pytest.mark.parametrize("seen", [2, 4, 6])
def test_models_before_the_cutoff_have_no_age(tmp_path, seen):
    """A model of an early stage saw text until the cutoff: on all streams the truth is 0.1."""
    periods = [str(2018 + number) for number in range(8)]
    for seed in (0, 1):
        run = drifting(
            lm_run(tmp_path / f"s{seed}", [30.0] * 8, cutoff="2020", seed=seed),
            lambda t, j: math.exp(2 + 0.1 * max(j - max(t, seen), 0)),
        )
        edited(
            run,
            lambda row: row["extra"].update({"matrix_periods": periods, "matrix_seen": seen}),
        )
    ((result,),) = group(find_runs([tmp_path]))
    (aged,) = age_table.aged([result])
    assert aged.columns["staleness"] == pytest.approx([0.1, 0.1])
    assert aged.losses.until == tuple(range(seen, 9))
    for distance, values in aged.curves["extra loss"].items():
        assert values == pytest.approx([0.1 * max(distance, 0)] * 2)
    models = f"the {seen - 1} models until mega-batch {seen - 1}"
    if seen == 2:
        models = "the model of mega-batch 1"
    assert f"without {models}, trained before the cutoff" in age_table.titled([aged]).note
    done = call_advise(tmp_path, "--out", tmp_path / "advice")
    assert "Loss rises by 0.1 [" in done.stdout
    retraining = done.record["retraining"]
    slope = retraining["slope"]
    assert slope["mean"] == 0.1
    assert slope["low"] == 0.1 or seen == 6  # the law of three models has an interval
    assert [cadence["as_last_time"] for cadence in retraining["cadences"][:2]] == [0.1, 0.15]


def _add(extra, row):
    row["extra"].update(extra)


def test_decisions_of_a_run_that_is_all_before_the_cutoff(tmp_path):
    """Old models can be compared, and too few models are no traceback."""
    run = drifting(lm_run(tmp_path / "run", [30.0] * 3, cutoff="2022"), lambda t, j: 10.0 + j - t)
    extra = {"matrix_periods": PERIODS[:3], "matrix_seen": 3}
    edited(run, lambda row: row["extra"].update(extra))
    ((result,),) = group(find_runs([tmp_path]))
    assert age.losses_of(result).until == (3,)
    assert age_table.aged([result]) == []
    assert len(Record.read(tmp_path).losses.until) == 3
    for seen in (1, 3):
        edited(run, partial(_add, extra | {"matrix_seen": seen}))
        done = call_advise(tmp_path)
        assert done.returncode == 0, done.stderr
        assert is_due(Record.read(tmp_path), Terms()).answer == "no"


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
