"""Streams that drift: transfer in tables and CSV, heat maps, replay by share."""

import csv
import math

import pytest

from alma.report import compare, drift
from alma.report.age import losses_of
from alma.report.lm import tables as lm_tables
from alma.report.results import find_runs, group, matrix
from alma.report.vision import costs

from .synthetic import (
    averaged,
    by_learner,
    drifting,
    edited,
    entries_of,
    image_run,
    legend_of,
    lm_run,
    make_run,
    replaced,
    report,
    results_of,
    table_rows,
)


def cells(t, j):
    """Errors that grow with the distance from the diagonal; .9 of the untrained model."""
    return 0.9 if not t else (t == j) * 0.1 or 0.2 + (j > t) * 0.4


def result_of(place):
    """The only result in a folder."""
    ((result,),) = group(find_runs([place]))
    return result


def shares(t, j):
    """Layers 1 and 3; expert 1 of layer 1 gets a tenth more with each part."""
    return {"1": [j / 10, 1 - j / 10], "3": [0.25, 0.75]}


@pytest.fixture
def drifts(tmp_path):
    """Sm with two seeds, ens with a share of replay, and gmoe, which waits for two mega-batches."""
    for seed in (0, 1):
        run = image_run(tmp_path / f"sm{seed}", [0.5, 0.4, 0.3], seed=seed)
        drifting(run, lambda t, j, seed=seed: cells(t, j) + seed / 50)
    drifting(image_run(tmp_path / "ens", [0.4, 0.3, 0.2], learner="ens", replay_share=0.5), cells)
    drifting(image_run(tmp_path / "gmoe", [0.4, 0.3, 0.2], 2, learner="gmoe"), cells, shares)
    return tmp_path


def test_the_table_has_a_column_per_mean(drifts):
    by_name = by_learner(drifts)
    names = ("in-distribution", "backward transfer", "forward transfer", "average seen")
    assert [by_name["ens, replay 0.5"][name] for name in names] == [
        "10.00",
        "20.00",
        "60.00",
        "13.89",
    ]
    spread = ["11.00 ±1.41", "21.00 ±1.41", "61.00 ±1.41", "14.89 ±1.41"]
    assert [by_name["sm"][name] for name in names] == spread
    # Untrained at t = 1: the diagonal has .9, .1, .1; the future .9, .9, .6.
    assert [by_name["gmoe"][name] for name in names] == ["36.67", "20.00", "80.00", "40.56"]
    assert "In-distribution is the mean error over t = 1..B" in report(drifts).stdout


def test_perplexities_are_averaged_by_their_logarithm(tmp_path):
    drifting(
        lm_run(tmp_path, [30, 20]), lambda t, j: [[100, 400], [25, 64]][t - 1][j - 1] if t else 5e4
    )
    (row,) = table_rows(tmp_path)
    names = ("in-distribution", "backward transfer", "forward transfer", "average seen")
    assert [row[name] for name in names] == [
        "80.00",
        "25.00",
        "400.00",
        "63.25",
    ]  # 63.25: root of 100 * 40
    assert "means of log perplexity" in report(tmp_path).stdout


def test_means_without_cells_have_no_column(tmp_path):
    drifting(image_run(tmp_path, [0.5]), cells)
    (row,) = table_rows(tmp_path)
    assert (row["in-distribution"], row["average seen"]) == ("10.00", "10.00")
    assert not {"backward transfer", "forward transfer"} & row.keys()


def test_rows_that_lack_a_matrix_are_no_matrix(tmp_path):
    run = drifting(image_run(tmp_path, [0.5, 0.4]), cells)
    lines = run.results.read_text().splitlines()
    replaced(run, lines[1], lines[1].replace('"matrix"', '"other"'))
    assert matrix(result_of(tmp_path).repeats[0]) == {}
    assert "in-distribution" not in table_rows(tmp_path)[0]


def drawn(results):
    """The heat maps of the results."""
    return next(figure for name, figure, _ in drift.figures(results) if name == "matrix")


def test_heat_maps_have_the_mean_over_seeds(drifts):
    results = sorted(group(find_runs([drifts]))[0], key=lambda result: result.rank)
    shown = [(result, drift.mean_matrix(result)) for result in results]
    assert [result.label for result, _ in shown] == ["sm w=1", "ens, replay 0.5 w=1", "gmoe w=2"]
    assert shown[0][1] == [pytest.approx(row) for row in ([11, 61, 61], [21, 11, 61], [21, 21, 11])]
    assert shown[2][1][0] == pytest.approx([90] * 3)  # untrained errors are shown
    *panels, bar = drawn(results).axes
    written = [text.get_text() for text in panels[0].texts]
    assert written == ["11.0", "61.0", "61.0", "21.0", "11.0", "61.0", "21.0", "21.0", "11.0"]
    places = {text.get_position(): text.get_text() for text in panels[0].texts}
    assert places[(1, 2)] == "21.0"  # part 1 after mega-batch 2: column 1, row 2
    assert [[patch.get_xy() for patch in axes.patches] for axes in panels] == [
        [(0.5, 0.5), (1.5, 1.5), (2.5, 2.5)]
    ] * 3
    assert [axes.images[0].get_clim() for axes in panels] == [pytest.approx((10, 90))] * 3
    assert panels[0].get_ylim() == (3.5, 0.5)
    assert bar.get_ylabel() == "test error (%)"


def test_periods_name_the_held_out_parts(tmp_path):
    names = ["2018-2019..2020-2021", "2022..2023", "2024"]
    run = drifting(image_run(tmp_path, [0.5, 0.4, 0.3]), cells, shares)
    edited(run, lambda row: row["extra"].update(matrix_periods=names))
    result = result_of(tmp_path)
    figure = drawn([result] * 5)
    figure.canvas.draw()
    assert [tick.get_text() for tick in figure.axes[4].get_xticklabels()] == names
    # Below the lowest panel of each column.
    shown = [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes[:5]]
    assert shown == [False, False, True, True, True]


def test_large_matrices_have_no_numbers_and_untrained_perplexities_no_cells(tmp_path):
    run = lm_run(tmp_path, [30.0 + t for t in range(13)], w=2)
    result = result_of(drifting(run, lambda t, j: 20.0 + t + j if t else 5e4).directory)
    mean = drift.mean_matrix(result)
    assert [math.isnan(row[0]) for row in mean] == [True] + [False] * 12
    axes, _ = drawn([result]).axes
    assert not axes.texts
    assert axes.images[0].get_clim() == (23, 46)


def test_an_unfinished_run_has_the_rows_so_far_in_a_panel_of_the_same_shape(tmp_path):
    drifting(image_run(tmp_path / "a", [0.5, 0.4, 0.3], rows=3), cells)
    drifting(image_run(tmp_path / "b", [0.5, 0.4, 0.3], learner="ens"), cells)
    *panels, _ = drawn(group(find_runs([tmp_path]))[0]).axes
    assert [axes.get_title() for axes in panels] == ["sm w=1", "ens w=1"]
    assert [(len(axes.texts), axes.get_ylim()) for axes in panels] == [
        (6, (3.5, 0.5)),
        (9, (3.5, 0.5)),
    ]


def test_the_command_draws_them_and_the_csv_has_a_column_per_part_and_mean(drifts):
    done = report(drifts, "--figures", "vision", "--out", drifts / "out")
    assert done.returncode == 0, done.stderr
    written = [line.rpartition("/")[2] for line in done.stdout.splitlines()]
    assert "error_B3_matrix.png" in written
    assert "Frames mark the diagonal" in (drifts / "out/report.md").read_text()
    with open(drifts / "out/report.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["config.learner"] == "gmoe"]
    assert [line["extra.matrix.3"] for line in lines] == ["0.9", "0.9", "0.6000000000000001", "0.1"]
    assert [float(line["forward_transfer"]) for line in lines] == pytest.approx([0.8] * 4)
    assert lines[0]["extra.matrix_experts.2.1"] == "[0.2, 0.8]"


def test_a_stream_that_grew_leaves_cells_of_its_new_parts_empty(tmp_path):
    """The rows of t = 1 and 2 were written when the stream had three mega-batches."""
    run = drifting(
        image_run(tmp_path / "run", [0.5, 0.4, 0.3, 0.2]), lambda t, j: 0.1 * t + 0.01 * j
    )
    edited(
        run,
        lambda row: row["extra"].update(matrix=row["extra"]["matrix"][: 3 if row["t"] < 3 else 4]),
    )
    result = result_of(tmp_path)
    cells = drift.mean_matrix(result)
    assert [sum(map(math.isnan, row)) for row in cells] == [1, 1, 0, 0]
    assert losses_of(result).by_age.keys() == {-3, -2, -1, 0, 1, 2}
    assert compare.transfer(result.repeats[0]).forward_transfer == pytest.approx(
        (0.12 + 0.13 + 0.23 + 0.34) / 4
    )
    assert report(tmp_path).returncode == 0


def test_raw_weights_have_their_own_matrix_or_none(tmp_path):
    for name in ("a", "b"):
        run = averaged(image_run(tmp_path / name, [0.5, 0.3], average=0.9, lr=name), 0.5)
        drifting(run, cells)
    replaced(run, '"raw": {', '"raw": {"matrix": [0.25, 0.25], ')
    in_distribution = {name: row["in-distribution"] for name, row in by_learner(tmp_path).items()}
    averages = {"sm, average lr=a": "10.00", "sm, average lr=b": "10.00"}
    assert in_distribution == {"sm lr=a": "", "sm lr=b": "25.00"} | averages


def test_shares_of_replay_distinguish_methods(tmp_path):
    make_run(tmp_path / "no", [90.0, 20.0])
    make_run(tmp_path / "yes", [90.0, 20.0], replay=True)
    for share, source in (
        (0.5, {}),
        (0.5, {"replay_from": "recent"}),
        (0.25, {"replay_from": "all"}),
    ):
        make_run(tmp_path / f"{share}{len(source)}", [90.0, 20.0], replay_share=share, **source)
    shares = ("0.25", "0.5", "0.5 recent")
    assert {(row["learner"], row["replay"]) for row in table_rows(tmp_path)} == {
        *(("sm", "no"), ("sm", "yes")),
        *((f"sm, replay {share}", share) for share in shares),
    }
    labels = {result.label for result in group(find_runs([tmp_path]))[0]}
    assert labels == {"sm w=1", "sm w=1 replay", *(f"sm, replay {share} w=1" for share in shares)}


def test_shares_of_replay_are_no_learner_of_the_paper(tmp_path):
    image_run(tmp_path / "i/a", [0.5, 0.4])
    image_run(tmp_path / "i/b", [0.4, 0.3], replay_share=0.5, replay_from="recent")
    legend = legend_of(costs.front(results_of(tmp_path / "i"))[""])
    assert legend[legend.index("variant") + 1 :][:2] == ["the paper's learner", "replay 0.5 recent"]
    for share in ({}, {"replay_share": 0.5}):
        lm_run(tmp_path / f"t/{len(share)}", [28.57, 27.45, 26.91, 26.53], **share)
    rows = lm_tables.tables({"": entries_of(tmp_path / "t")})[0]["table2"].cells[1:]
    assert [(row[0], row[-1]) for row in rows] == [
        ("SM_w1", "26.53 [26.53]"),
        ("SM_w1, replay 0.5", "26.53"),
    ]
