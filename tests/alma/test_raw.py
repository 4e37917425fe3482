"""Runs with an average of weights: reports show them and their raw weights,
and count no seed twice."""

import pytest
from matplotlib.colors import to_hex

from alma.learners import colour_of
from alma.report import labels
from alma.report.front import front
from alma.report.lm import figures as lm_figures
from alma.report.lm import tables as lm_tables
from alma.report.lm.reference import reference
from alma.report.results import compute, find_runs, group
from alma.report.vision import costs, select

from .synthetic import (
    averaged,
    by_learner,
    edited,
    entries_of,
    image_run,
    legend_of,
    lm_run,
    report,
    results_of,
)


def test_the_raw_weights_are_a_run_without_average(tmp_path):
    averaged(image_run(tmp_path, [0.5, 0.4], average=0.9), 0.5)
    both, raw = find_runs([tmp_path])
    assert raw.config == {name: value for name, value in both.config.items() if name != "average"}
    assert [row["value"] for row in raw.rows] == [0.9, 0.5, 0.4]  # untrained: one set of weights
    assert [row["value"] for row in both.rows] == [0.9, 0.25, 0.2]
    assert all("raw" not in row["extra"] for row in raw.rows)
    one = compute({row["t"]: row for row in both.rows})
    two = compute({row["t"]: row for row in raw.rows})
    assert one == two == 2


def test_text_has_raw_perplexity_per_word_and_no_other_measure_of_the_average(tmp_path):
    run = averaged(lm_run(tmp_path, [9.0, 4.0], average=0.9), 0.5)
    fields = {
        "tokens": 300,
        "words": 200,
        "nll": 1.0,
        "expert_layers": {"1": {}},
        "valid": {"loss": 1.0},
    }
    edited(run, lambda row: row["extra"].update(fields))
    _, raw = find_runs([tmp_path])
    assert [row["extra"]["perplexity_per_word"] for row in raw.rows[1:]] == pytest.approx([27, 8])
    of_raw = {"experts": 4, "tokens": 300, "words": 200, "perplexity_per_word": pytest.approx(8)}
    assert raw.rows[2]["extra"] == of_raw


def test_a_trained_row_without_raw_metric_is_left_out(tmp_path):
    run = averaged(image_run(tmp_path, [0.5, 0.4], average=0.9), 0.5)
    edited(run, lambda row: row["t"] == 2 and row["extra"].pop("raw"))
    assert [row["t"] for row in find_runs([tmp_path])[1].rows] == [0, 1]


def test_no_seed_counts_twice(tmp_path):
    image_run(tmp_path / "plain", [0.5, 0.6])
    for seed in (0, 1, 2):
        averaged(image_run(tmp_path / str(seed), [0.5, 0.3], seed=seed, average=0.9), 0.5)
    averaged(image_run(tmp_path / "decay", [0.5, 0.3], seed=2, average=0.7), 0.5)
    image_run(
        tmp_path / "waits", [0.5, 0.3], seed=1, rows=0
    )  # no rows yet, so it counts for nothing
    rows = by_learner(tmp_path)
    counts = {name: row["n"] for name, row in rows.items()}
    assert counts == {"sm": "3", "sm, average 0.9": "3", "sm, average 0.7": "1"}
    assert rows["sm"]["t=2"].startswith("40.00 ")  # 60 without average, 30 and 30 raw
    assert "counted as repeats" not in report(tmp_path).stdout


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([{}, {"average": 0.9}], ["", "average"]),
        ([{"w": 1, "average": 0.9}, {"w": 2, "average": 0.7}], ["average", "average"]),
        ([{"w": 1, "average": 0.9}, {"w": 1, "average": 0.7}], ["average 0.9", "average 0.7"]),
        ([{"schedule": "continuous"}], ["continuous"]),
        ([{"schedule": "continuous", "average": "last:8"}], ["continuous, average last:8"]),
        ([{"average": 0.995}, {"average": "last:8"}], ["average 0.995", "average last:8"]),
    ],
)
def test_names_of_variants(configs, names):
    assert labels.variants(configs, within=("w",)) == names


def test_a_decay_for_each_waiting_time_is_one_method_of_the_figures_and_two_of_the_table(tmp_path):
    for w, average in ((1, 0.9), (2, 0.7)):
        averaged(image_run(tmp_path / str(w), [0.5, 0.3], w, average=average), 0.5)
    assert select.methods(results_of(tmp_path)) == ["sm", "sm, average"]
    (table,) = group(find_runs([tmp_path]))
    assert [r.method for r in table] == ["sm", "sm, average 0.9", "sm", "sm, average 0.7"]
    averaged(image_run(tmp_path / "ablation", [0.5, 0.3], average=0.5), 0.6)
    methods = select.methods(results_of(tmp_path))
    assert methods == ["sm", "sm, average", "sm, average 0.5", "sm, average 0.9"]


def test_the_front_has_a_marker_per_variant_and_a_line_without_variants(tmp_path):
    for seed in (0, 1):
        averaged(image_run(tmp_path / f"sm{seed}", [0.5, 0.3], seed=seed, average=0.9), 0.5)
        averaged(
            image_run(tmp_path / f"ff{seed}", [0.2, 0.1], seed=seed, learner="ff", average=0.9), 1.2
        )
        averaged(image_run(tmp_path / f"w2{seed}", [0.5, 0.35], 2, seed=seed, average=0.7), 0.5)
    image_run(tmp_path / "replay", [0.19, 0.09], learner="ens", replay=True)  # costs 1 + 2 TFLOPs
    results = results_of(tmp_path)
    figure = costs.front(results)[""]
    (axes,) = figure.axes
    solid, dotted = ([tuple(point) for point in line.get_xydata()] for line in axes.lines[:2])
    assert (
        solid == dotted == [(2, pytest.approx(15)), (3, pytest.approx(14))]
    )  # ff: 18 with the average
    assert axes.lines[1].get_linestyle() == ":"
    looks = [container.lines[0] for container in axes.containers]
    shown = {
        (to_hex(line.get_markeredgecolor()), line.get_marker(), round(line.get_ydata()[0], 6))
        for line in looks
        if line.get_markerfacecolor() == "white"
    }
    blue, vermilion, brown = (colour_of(name).lower() for name in ("sm", "ens", "ff"))
    assert shown == {(blue, "o", 40), (blue, "o", 62.5), (brown, "o", 15), (vermilion, "D", 14)}
    filled = [line for line in looks if line.get_markerfacecolor() != "white"]
    points = {(line.get_marker(), round(line.get_ydata()[0], 6)) for line in filled}
    assert points == {("^", 20), ("^", 53.75), ("^", 18)}
    names = ["the paper's learner", "the paper's learner, replay", "average"]
    assert legend_of(figure)[: 4 + 4] == ["learner", "sm", "ens", "ff", "variant", *names]


def test_an_unfinished_run_has_one_remark(tmp_path):
    averaged(image_run(tmp_path / "a", [0.5, 0.3], rows=2, average=0.9), 0.5)
    _, remarks = select.finished(find_runs([tmp_path]))
    assert remarks == [f"not finished (t=1/2), left out of the figures: {tmp_path / 'a'}"]


@pytest.fixture
def text_runs(tmp_path):
    """Sm with two schedules and an average, also i.i.d.; ens."""
    for seed in (0, 1):
        averaged(
            lm_run(tmp_path / f"sm{seed}", [30.0, 28, 26 + seed], seed=seed, average=0.99), 0.5
        )
        run = lm_run(
            tmp_path / f"c{seed}",
            [29.0, 27, 25],
            seed=seed,
            average="last:8",
            schedule="continuous",
        )
        averaged(run, 0.5)
    averaged(lm_run(tmp_path / "iid", [0, 0, 20.0], w=3, update_multiplier=3, average=0.99), 0.5)
    lm_run(tmp_path / "ens", [28.0, 26, 24], "ens", members=2, millions=130, flops=2e15)
    lm_run(tmp_path / "short", [28.0, 26, 24], "moe", rows=3)
    return tmp_path


def test_table_2_has_rows_of_variants_and_the_papers_numbers_for_none_of_them(text_runs):
    lines = lm_tables.tables({"": entries_of(text_runs)})[0]["table2"].cells[1:]
    assert [(line[0], line[-1]) for line in lines] == [
        ("SM_w1", "26.50 ±0.71 [26.91]"),
        ("SM_w1, average 0.99", "13.25 ±0.35"),
        ("SM_w1, continuous", "25.00 ±0.00"),
        ("SM_w1, continuous, average last:8", "12.50 ±0.00"),
        ("SM_w3 (3x steps)", "20.00"),
        ("SM_w3 (3x steps), average 0.99", "10.00"),
        ("Ens_w1", "24.00 [24.57]"),
        ("MoE_w1", ""),
    ]


def test_table_1_compares_runs_of_one_variant(text_runs):
    table = lm_tables.table1(entries_of(text_runs))
    assert [[line[0], *line[2:4]] for line in table.cells[1:]] == [
        ["base SM", "20.00", "26.50 ±0.71"],
        ["base SM, average 0.99", "10.00", "13.25 ±0.35"],
    ]


def test_figure_5_has_a_line_per_variant(text_runs):
    shown = lm_figures.comparable(entries_of(text_runs))
    figure, matched = lm_figures.figure5(shown, reference(), "")
    assert matched == 2  # SM and Ens; no variant is the paper's
    names = [
        "SM",
        "SM, average 0.99",
        "SM, continuous",
        "SM, continuous, average last:8",
        "Ens",
        "MoE",
    ]
    assert legend_of(figure)[1:7] == names
    assert [text.get_text() for text in figure.axes[0].texts] == ["4"]


def test_the_front_of_text_averages_complete_runs_with_the_smallest_wait(text_runs):
    (axes,) = front([entry.result for entry in entries_of(text_runs)]).axes
    shown = sorted(
        (*line.get_xdata(), *line.get_ydata()) for line, *_ in map(list, axes.containers)
    )
    points = [
        (3000, 13.5),
        (3000, 14 + 1 / 12),
        (3000, 28 + 1 / 6),
        (6000, 26),
    ]  # raw: the paper's alone
    assert shown == [pytest.approx(point) for point in points]


def test_a_run_without_any_raw_numbers_is_one_run(tmp_path):
    lm_run(tmp_path / "none", [9.0, 4.0], average=0.9)
    null = averaged(lm_run(tmp_path / "null", [9.0, 4.0], average=0.9, seed=1), 0.5)
    edited(null, lambda row: row["extra"].update(raw=None))
    assert len(find_runs([tmp_path])) == 2
