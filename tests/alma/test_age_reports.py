"""Staleness and regret in everything that `alma report` writes, from records with known laws."""

import math

import pytest

from alma.report import age_table, drift
from alma.report.results import find_runs, group

from .synthetic import drifting, image_run, legend_of, lm_run, report

STEPS = {f"error_B4_staleness.{suffix}" for suffix in ("png", "svg", "pdf")}


def law(future, past=0.0, fall=0.0, offset=0.0):
    """Errors that grow with the distance from the newest training data, and fall with training."""
    return lambda t, j: (
        0.9 if not t else 0.2 + offset + future * max(j - t, 0) + past * max(t - j, 0) - fall * t
    )


def rows_of(place):
    """The rows of the table of each group, by learner."""
    aged = filter(None, map(age_table.aged, group(find_runs([place]))))
    tables = [age_table.titled(rows).cells for rows in aged]
    return {row[0]: dict(zip(header, row, strict=True)) for header, *rows in tables for row in rows}


@pytest.fixture
def runs(tmp_path):
    """Sm with two seeds, ens that forgets and falls with training, gmoe that waits."""
    for seed in (0, 1):
        run = image_run(tmp_path / f"sm{seed}", [0.5, 0.4, 0.3, 0.2], seed=seed)
        drifting(run, law(0.04 + seed / 50, offset=seed / 10))
    drifting(
        image_run(tmp_path / "ens", [0.5, 0.4, 0.3, 0.2], learner="ens"), law(0.05, 0.05, 0.02)
    )
    drifting(image_run(tmp_path / "gmoe", [0.5, 0.4, 0.3, 0.2], 2, learner="gmoe"), law(0.03))
    return tmp_path


def test_the_table_has_slopes_and_regrets_with_intervals_over_seeds(runs):
    rows = rows_of(runs)
    # Two seeds, 4 and 6 points a mega-batch:
    # 6.314 times their standard error of 1 is the half width.
    assert rows["sm"]["staleness"] == "5.00 [-1.31, 11.31]"
    assert rows["sm"]["effect of age"] == "2.50 [-0.66, 5.66]"  # the past is kept: half
    assert [rows["ens"][name] for name in ("staleness", "effect of age")] == ["7.00", "5.00"]
    assert rows["gmoe"]["staleness"] == "3.00"
    # The best on parts 1 to 4 has 18, 16, 14 and 12%: ens, fresh.
    # Its loss falls by 2 points a mega-batch.
    regrets = [
        [rows[name][f"regret, {age}"] for age in ("newest", "next", "past")]
        for name in ("ens", "gmoe")
    ]
    assert regrets == [["0.00", "7.00", "5.00"], ["6.00", "9.00", "3.50"]]
    assert rows["sm"]["regret, newest"] == "10.00 [-21.57, 41.57]"


def test_nothing_appears_without_drift_or_before_training(tmp_path):
    image_run(tmp_path / "a", [0.5, 0.4, 0.3, 0.2])
    waits = image_run(tmp_path / "b", [0.5, 0.4, 0.3, 0.2], 3, learner="ens", rows=3)
    drifting(waits, law(0.04))  # has waited until t = 2
    drifting(image_run(tmp_path / "one", [0.5]), law(0.04))
    done = report(tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "taleness" not in done.stdout + (tmp_path / "out/report.md").read_text()
    assert not [
        path for path in (tmp_path / "out").iterdir() if path.name in STEPS or "stale" in path.name
    ]


def test_text_is_in_nats_a_token(tmp_path):
    run = lm_run(tmp_path, [30, 20])
    drifting(
        run, lambda t, j: math.exp(3 + 0.25 * (j > t) + 0.125 * (j < t) - 0.0625 * t) if t else 5e4
    )
    done = report(tmp_path)
    assert "Loss against age (nats a token), B = 2" in done.stdout
    assert "90% intervals" not in done.stdout  # of one seed
    (row,) = rows_of(tmp_path).values()
    assert (row["staleness"], row["effect of age"], row["regret, next"]) == (
        "0.312",
        "0.188",
        "0.312",
    )


def test_a_run_is_compared_on_its_own_data_only(tmp_path):
    for name, offset in (("easy", 0.0), ("hard", 0.3)):
        run = image_run(tmp_path / name, [0.5, 0.4, 0.3, 0.2], dataset=name, data=name)
        drifting(run, law(0.04, offset=offset))
    for name, offset in (("rotated", 0.1), ("permuted", 0.2)):
        run = image_run(tmp_path / name, [0.5, 0.4, 0.3, 0.2], learner="ens", scenario=name)
        drifting(run, law(0.04, offset=offset))
    assert {row["regret, newest"] for row in rows_of(tmp_path).values()} == {"0.00"}


def test_an_unfinished_run_has_the_ages_of_its_models(tmp_path):
    drifting(image_run(tmp_path / "a", [0.5, 0.4, 0.3, 0.2], rows=3), law(0.04))
    (aged,) = [age_table.aged(results) for results in group(find_runs([tmp_path]))]
    assert list(aged[0].curves["extra loss"]) == [-1, 0, 1]
    assert list(aged[0].curves["regret"]) == [-1, 0, 1, 2, 3]
    assert aged[0].columns["staleness"] == pytest.approx([4])
    assert rows_of(tmp_path)["sm (not finished, t=2/4)"]["staleness"] == "4.00"


@pytest.mark.parametrize("copies", [1, 3])
def test_the_figure_has_a_line_per_configuration(runs, copies):
    for i in range(1, copies):
        for learner in ("sm", "ens", "gmoe"):
            run = image_run(
                runs / f"{learner}-{i}", [0.5, 0.4, 0.3, 0.2], size=8 << i, learner=learner
            )
            drifting(run, law(0.04))
    (results,) = group(find_runs([runs]))
    figure = next(figure for name, figure, _ in drift.figures(results) if name == "staleness")
    panels = figure.axes
    assert len(panels) == (2 if copies == 1 else 6)
    drawn = [line for line in panels[0].lines if line.get_marker() == "o"]
    assert len(drawn) == 3
    assert {tuple(line.get_xdata()) for line in drawn} >= {(-3, -2, -1, 0, 1, 2, 3)}
    assert 15 in [pytest.approx(line.get_ydata()[-1]) for line in drawn]  # sm at age 3
    assert [len(axes.collections) for axes in panels[:2]] == [
        1,
        1,
    ]  # the band of sm, which has two seeds
    assert len([text for text in legend_of(figure) if "w=" in text]) == 3 * copies
