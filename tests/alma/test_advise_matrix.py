"""`alma advise --matrix`: losses from elsewhere, in CSV files."""

import math

import numpy as np
import pytest

from alma.report.advice import matrix
from alma.report.advice.period import Period
from benchmarks.backtest import label_of

from .synthetic import call_advise, error_of

HEADER = "model,trained_until,domain,tested_on,loss,lower_95,upper_95"


def lines(model="1b", domain="news", slope=0.001, seed=0, trained=range(0, 96, 24)):
    """Lines of a file as that of TiC-LM: models of every second year, tested on every year."""
    months = [f"{2013 + m // 12}-{1 + m % 12:02}" for m in range(96)]
    cells = [(u, p) for u in trained for p in range(0, 96, 12)]
    random = np.random.default_rng(seed)
    losses = [2.5 + slope * abs(p - u) + random.normal(0, 0.001) for u, p in cells]
    rows = zip(cells, losses, strict=True)
    return [f"{model},{months[u]},{domain},{months[p]},{loss:.4f},2,3" for (u, p), loss in rows]


def written(path, *rows, header=HEADER):
    """A CSV file."""
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def table(tmp_path):
    """Losses of two models in two domains, one of which does not drift."""
    kinds = [
        ("1b", "news", 0.0035),
        ("1b", "wiki", 0.0),
        ("3b", "news", 0.008),
        ("3b", "wiki", 0.0),
    ]
    rows = (line for i, kind in enumerate(kinds) for line in lines(*kind, i))
    return written(tmp_path / "losses.csv", *rows)


def test_a_file_of_losses_is_read_as_it_is(table):
    groups = matrix.read_groups([table])
    assert [g.losses.label for g in groups] == ["1b/news", "1b/wiki", "3b/news", "3b/wiki"]
    first = groups[0]
    assert (len(first.losses.until), len(first.losses.periods), first.period) == (
        4,
        8,
        Period("month"),
    )
    assert first.losses.seeds[0][1][0] == pytest.approx(2.5 + 0.084, abs=0.005)


def test_each_group_is_answered_in_turn(table, tmp_path):
    done = call_advise("--matrix", table, "--out", tmp_path / "out")
    groups = done.record["groups"]
    assert [g["advice"] for g in groups] == [
        "every 6 months",
        "once a year",
        "every quarter",
        "once a year",
    ]
    assert done.stdout.count("How often to retrain?") == 4
    assert done.stdout.count("Once a year is enough, 1 training a year: more often gains") == 2
    assert "one 3 months old is 1.1% [" in done.stdout
    assert done.stdout.count("Costs are of trainings to come") == 1
    assert groups[0]["slope"]["mean"] == pytest.approx(0.0035, abs=0.0005)
    one = call_advise(
        "--matrix", table, "--groups", "3b/*", "--every", "1,24", "--worth", "50%"
    ).stdout
    assert ("3b/news" in one, "1b/news" in one, "every 24 months" in one) == (True, False, True)
    assert "Every 24 months is enough, 0.5 trainings a year" in one
    assert [k["every"] for k in groups[0]["cadences"]] == [1, 3, 6, 12]


@pytest.mark.parametrize(
    ("labels", "period"),
    [
        (["1.5", "2.5", "4"], Period(size=1.25)),
        (["213", "214", "216"], Period(size=1.5)),
        (["2013-01-31", "2013-02-28", "2013-03-31"], Period("month", 365.25 / 12)),
        (["2013-01-01", "2013-01-08", "2013-01-15"], Period("week", 7.0)),
        (["2013", "2014", "2016"], Period("year")),
        (["2013-Q4", "2014-Q1"], Period("quarter")),
        (["2013-W52", "2014-W01"], Period("week")),
        (["2013-01", "2013-12", "2014-01"], Period("month")),
        (["2013-01-31", "2013-02-01", "2016-02-29"], Period("day")),
    ],
)
def test_labels_of_time_come_back(tmp_path, labels, period):
    rows = [f"{u},{p},1.0" for u in labels for p in labels]
    table = written(tmp_path / "one.csv", *rows, header="trained_until,tested_on,loss")
    (group,) = matrix.read_groups([table])
    assert (group.losses.label, group.period) == ("one", period)
    assert [label_of(time, period) for time in group.losses.periods] == labels


def test_seeds_and_files_are_joined_and_a_missing_cell_does_not_count(tmp_path):
    cells = [(u, p) for u in (1, 2, 3) for p in (1, 2, 3)]
    header = "trained_until,tested_on,loss,seed,gpu_hours"
    one = written(
        tmp_path / "one.csv", *(f"{u},{p},1,0,{u},b" for u, p in cells), header=header + ",model"
    )
    two = written(tmp_path / "b.csv", *(f"{u},{p},3,1,{u}" for u, p in cells[1:]), header=header)
    (group,) = matrix.read_groups([two, one])  # a file without a column `model` names it
    assert len(group.losses.seeds) == 2
    assert math.isnan(group.losses.seeds[0][0][0])
    assert (0, 0) not in group.losses.by_age[0]
    assert group.gpu_hours == 3


def _bad(old, new):
    """Replace a text of the file, once."""

    def edit(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_bad("tested_on", "tested"), "no column tested_on"),
        (_bad(",news,2014-01,", ",news,2013-01,"), "the same model, period and seed as"),
        (lambda path: path.write_text(HEADER + "\n"), "no losses below the names"),
        (lambda path: path.write_text(""), "no column trained_until, tested_on, loss"),
        (
            lambda path: path.write_text("\n".join([HEADER, *lines()[:8]])),
            "a single value of trained_until",
        ),
        (
            lambda path: path.write_text("\n".join([HEADER, *lines()[::8]])),
            "a single value of tested_on",
        ),
        (lambda path: written(path, *lines(trained=(0, 84))), "fewer than 3 models"),
        (_bad("1b,2013-01,news,2013-01", "1b,2013-13,news,2013-01"), "no such date: 2013-13"),
        (_bad("1b,2013-01,news,2013-01", "1b,2013,news,2013-01"), "another kind of time"),
        (
            _bad("1b,2013-01,news,2013-01", "1b,May 2013,news,2013-01"),
            "May 2013: a number, or a date",
        ),
        (
            _bad("1b,2013-01,news,2013-01,2", "1b,2013-01,news,2013-01,2,2"),
            "as many values as line 1",
        ),
        (_bad("1b,2013-01,news,2013-01,2.", "1b,2013-01,news,2013-01,two"), "line 2, loss: two"),
        (
            _bad("1b,2013-01,news,2013-01,2.", "1b,2013-01,news,2013-01,1e200"),
            "a number up to 1e100",
        ),
        (
            _bad("1b,2013-01,news,2013-01,2.", "1b,2013-01,news,2013-01,25"),
            "is far from the others of its period and model",
        ),
        (_bad("1b,2013-01,news", '1b,2013-01,"' + "1" * 140_000), "is a quote left open?"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda path: path.unlink(), "No such file"),
        ("--groups 7b", "no such group"),
        ("--out=README.md", "is not a folder and cannot become one"),
        ("--groups 1b/new", "did you mean 1b/news?"),
        ("runs", "or --matrix FILE"),
        ("--every 0,3", "from 2 to 20 whole numbers from 1 to 1000, such as 1,3,12"),
        ("--every 3", "from 2 to 20 whole numbers"),
        ("--every 1,1001", "from 2 to 20 whole numbers"),
        ("--worth much", "a number from 0 on"),
        ("--price 400/0", "numbers from 0 to 1e12, such as 0.3 or 400/1000"),
        ("--price 0/-1", "numbers from 0 to 1e12, such as 0.3 or 400/1000"),
    ],
)
def test_a_bad_file_or_option_is_one_line(table, edit, message):
    if not (options := edit.split() if isinstance(edit, str) else []):
        edit(table)
    assert message in error_of(call_advise("--matrix", table, *options))


def test_hours_are_those_of_the_newest_training_that_has_them(tmp_path):
    header = "trained_until,tested_on,loss,gpu_hours"
    rows = [f"{u},{p},1,{7 * u}" for u in (1, 2, 3) for p in (1, 2)]
    table = written(tmp_path / "a.csv", *rows[:-2], "3,1,1,", "3,2,1,", header=header)
    assert matrix.read_groups([table])[0].gpu_hours == 14
    written(table, *rows, "4,1,1,-2", header=header)
    assert "line 8, gpu_hours: -2: give a number from 0 on" in error_of(
        call_advise("--matrix", table)
    )


def test_a_wrong_year_is_remarked_on(tmp_path):
    """A single value, far from all others, would stretch the law."""
    weeks = range(1, 8)
    rows = [f"2026-W{i:02},2026-W{j:02},{10 + 0.3 * abs(j - i)}" for i in weeks for j in weeks]
    right = tmp_path / "right.csv"
    right.write_text("\n".join(["trained_until,tested_on,wape", *rows]) + "\n")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(right.read_text().replace("2026-W03,2026-W02", "2025-W03,2026-W02"))
    [of_right] = matrix.read_groups([right])
    [of_wrong] = matrix.read_groups([wrong])
    assert (of_right.metric.name, of_right.metric.remark) == ("WAPE", "")
    line = 2 + 2 * len(weeks) + 1
    assert of_wrong.metric.remark.startswith(f"{wrong}, line {line}: the only value of its trained")


@pytest.mark.parametrize("outage", [51, 46])
def test_an_outage_is_an_event_and_a_typo_is_not(tmp_path, outage):
    """Models agree that a week was far from usual; a value on which no model agrees is refused."""
    weeks = range(1, 13)
    rows = []
    for until in weeks:
        for tested in weeks:
            value = 0.3 + 0.01 * abs(tested - until) + 0.001 * (until * tested % 5)
            if tested == 9 and until < 9:
                value = (51, outage)[until % 2]
            rows.append(f"2026-W{until:02},2026-W{tested:02},{value:.3f}")
    table = written(tmp_path / "a.csv", *rows, header="trained_until,tested_on,mape")
    [group] = matrix.read_groups([table])
    assert group.metric.remark.count("8 models agree on this period: it was read as an event") == 1
    done = call_advise("--matrix", table)
    assert (done.returncode, "it was read as an event" in done.stdout) == (0, True)
    typo = written(tmp_path / "b.csv", *rows, header="trained_until,tested_on,mape")
    typo.write_text(typo.read_text().replace("W09,2026-W07,0.3", "W09,2026-W07,51.3"))
    assert "is far from the others of its period and model" in error_of(
        call_advise("--matrix", typo)
    )
    in_outage = table.read_text().replace("W08,2026-W09,51", "W08,2026-W09,510")
    typo.write_text(in_outage)
    assert "is far from the others of its period and model" in error_of(
        call_advise("--matrix", typo)
    )
