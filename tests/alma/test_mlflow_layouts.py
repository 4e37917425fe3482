"""The layouts of a tracker's runs, without a tracker: one matrix, or a refusal with its remedy."""

from dataclasses import replace

import pytest

from alma.errors import UserError
from alma.report.advice.__main__ import parser
from alma.report.advice.matrix import groups_of, read_groups
from alma.report.advice.metric_of_column import MetricOptions
from alma.report.advice.trackers.layouts import Reading, TrackedRun, matrix_of

MONTHS = [f"2023-{month:02}" for month in range(1, 13)]
OPTIONS = MetricOptions("accuracy")
READING = Reading("churn", "accuracy")


def accuracy(i, j):
    """Of the model of month i on month j."""
    return 0.9 - 0.02 * abs(j - i) + (i * j % 5) / 30000


TESTED = range(0, 12, 3)
CELLS = [(i, j) for i in range(0, 12, 3) for j in TESTED]


def run(name, facts=None, started="2023-05-17", steps=None, **values):
    """A finished run with metrics, by names in which __ stands for /."""
    metrics = {key.replace("__", "/").replace("m", "-"): value for key, value in values.items()}
    return TrackedRun(name, name, started, facts or {}, metrics, steps or {})


def of_periods():
    """Layout 1: a run for each model and period."""
    runs = []
    for i, j in CELLS:
        facts = {"trained_until": MONTHS[i], "tested_on": MONTHS[j]}
        runs.append(TrackedRun(f"{i}-{j}", "", "2024-01-01", facts, {"accuracy": accuracy(i, j)}))
    return runs


def of_models(facts_of=lambda i: {"trained_until": MONTHS[i]}, started="2024-01-01"):
    """Layout 2: a run for each model."""
    runs = []
    for i in range(0, 12, 3):
        values = {f"accuracy/{MONTHS[j]}": accuracy(i, j) for j in TESTED}
        start = f"{MONTHS[i]}-28" if started == "model" else started
        runs.append(TrackedRun(str(i), "", start, facts_of(i), values | {"accuracy": 0.5}))
    return runs


def of_steps():
    """Layout 2 with steps such as 202303."""
    runs = []
    for i in range(0, 12, 3):
        steps = {int(MONTHS[j].replace("-", "")): accuracy(i, j) for j in TESTED}
        facts = {"trained_until": MONTHS[i].replace("-", "")}
        runs.append(TrackedRun(str(i), "", "2024-01-01", facts, {"accuracy": 0.5}, steps))
    return runs


@pytest.fixture
def of_file(tmp_path):
    """The losses by --matrix."""
    table = tmp_path / "churn.csv"
    rows = [f"{MONTHS[i]},{MONTHS[j]},{accuracy(i, j)!r}" for i, j in CELLS]
    table.write_text("\n".join(["trained_until,tested_on,accuracy", *rows]) + "\n")
    return read_groups([table])


@pytest.mark.parametrize(
    ("runs", "reading"),
    [
        (of_periods(), READING),
        (of_models(), READING),
        (of_models(lambda i: {"cut": MONTHS[i]}), Reading("churn", "accuracy", "cut")),
        (of_models(lambda i: {}, "model"), READING),
        (of_steps(), Reading("churn", "accuracy", period="step")),
    ],
    ids=["periods", "models", "tag", "start", "steps"],
)
def test_each_layout_is_the_matrix_of_the_file(of_file, runs, reading):
    assert groups_of([matrix_of(runs, reading).table], (), OPTIONS) == of_file


def test_the_start_of_a_run_is_said_to_stand_for_a_date():
    remarks = matrix_of(of_models(lambda i: {}, "model"), READING).remarks
    assert "4 runs without trained_until or model_date: the start of the run" in remarks[-1]
    assert matrix_of(of_models(), READING).remarks == ["churn: 4 runs with accuracy read"]


def test_runs_that_do_not_count_are_counted():
    others = [run("a", loss=1.0), run("b", accuracy=0.5), run("c", loss=2.0)]
    matrix = matrix_of([*of_models(), *others], READING)
    assert matrix.remarks[1:] == [
        "left out: 2 runs without accuracy",
        "left out: 1 run without a period",
    ]
    assert len(matrix.table.rows) == len(CELLS)


@pytest.mark.parametrize(
    ("runs", "reading", "message"),
    [
        (of_models(), Reading("churn", "acuracy"), "no finished run has it; did you mean accuracy"),
        (of_models(), Reading("churn", "f"), "no finished run has it; choose from accuracy"),
        ([run("a")], READING, "churn: no finished run has a metric"),
        ([run("a", accuracy=0.5)], READING, "log a tag tested_on=2024-03 in a run for each period"),
        ([*of_periods(), of_periods()[7]], READING, "on 2023-10: delete one in MLflow, or log a"),
        ([run("a", {"tested_on": "7"}, accuracy=0.5)], READING, "Log a tag trained_until"),
    ],
)
def test_what_is_no_layout_is_refused_with_what_to_log(runs, reading, message):
    with pytest.raises(UserError, match=".") as error:
        matrix_of(runs, reading)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_date_is_named_by_its_run():
    runs = [
        *of_periods(),
        run("odd", {"trained_until": "2023", "tested_on": "2023-01"}, accuracy=1),
    ]
    with pytest.raises(UserError, match="run odd, trained_until: 2023 is another kind of time"):
        groups_of([matrix_of(runs, READING).table], (), OPTIONS)


def test_models_and_seeds_are_kept_apart():
    runs = []
    for name in "small", "large":
        for seed in "0", "1":
            for tracked in of_periods():
                facts = {**tracked.facts, "model": name, "seed": seed}
                runs.append(TrackedRun("", "", "", facts, tracked.metrics))
    groups = groups_of([matrix_of(runs, READING).table], (), OPTIONS)
    assert [group.losses.label for group in groups] == ["small", "large"]
    assert [len(group.losses.seeds) for group in groups] == [2, 2]


def test_periods_in_names_of_metrics_beat_a_tag_but_not_the_flag():
    """A run of layout 2 may have a tag of the same name."""
    tagged = of_models(lambda i: {"trained_until": MONTHS[i], "tested_on": "2023-01"})
    assert matrix_of(tagged, READING).table == matrix_of(of_models(), READING).table
    by_flag = matrix_of(tagged, replace(READING, period="tested_on"))
    assert {row["tested_on"] for _, row in by_flag.table.rows} == {"2023-01"}


@pytest.mark.parametrize("flag", ["--mlflow", "--tracking-uri"])
def test_an_empty_variable_of_the_shell_is_refused(flag):
    with pytest.raises(UserError, match=f"argument {flag}: empty"):
        parser().parse_args([flag, ""])
