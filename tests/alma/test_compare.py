"""The general table: cells, labels and columns."""

import csv

import pytest

from alma.report import compare
from alma.report.labels import describe
from alma.report.results import find_runs, group

from .synthetic import by_learner, image_run, make_run, report, table_rows, with_info


def names(place):
    """The learner column of the table."""
    return [row["learner"] for row in table_rows(place)]


def test_table_holds_the_metrics_of_equations_1_and_2(tmp_path):
    make_run(
        tmp_path / "a", [50000.0, 28.0, 27.0, 26.0, 25.0], experts=[4, 4, 6, 8, 12], learner="gmoe"
    )
    (row,) = table_rows(tmp_path)
    assert row == {
        **{
            "learner": "gmoe",
            "w": "1",
            "replay": "no",
            "n": "1",
            "experts": "4->12",
            "parameters": "65M",
        },
        **{"untrained": "50,000", "t=1": "28.00", "t=2": "27.00", "t=3": "26.00", "t=4": "25.00"},
        **{"average": "26.50", "cumulative PPL": "106.00", "Mem": "325M", "Comp (TFLOPs)": "8,000"},
    }


def test_a_waiting_learner_has_stars_that_count(tmp_path):
    make_run(tmp_path, [100.0, 100.0, 100.0, 20.0, 20.0], waiting_time=3)
    (row,) = table_rows(tmp_path)
    assert [row[f"t={t}"] for t in (1, 2, 3, 4)] == ["*", "*", "20.00", "20.00"]
    assert (row["untrained"], row["average"], row["cumulative PPL"]) == (
        "100.00",
        "60.00",
        "240.00",
    )


def test_a_second_total_leaves_out_the_untrained_model(tmp_path):
    make_run(tmp_path / "a", [0.95, 0.95, 0.95, 0.3, 0.3], waiting_time=3, metric="error")
    make_run(tmp_path / "b", [0.85, 0.5, 0.4, 0.3, 0.2], metric="error", learner="ens")
    sums = [(row["CER"], row["CER trained"]) for row in table_rows(tmp_path)]
    assert sums == [("1.40", "1.40"), ("2.50", "0.60")]
    output = report(tmp_path).stdout
    assert "CER trained is the sum from the first trained stage on" in output
    assert "eq. 1 of the paper's final version" in output
    assert "CER trained" not in report(tmp_path / "b").stdout  # it would equal CER


def test_validation_has_a_column_if_rows_have_it(tmp_path):
    for seed, score in enumerate((0.5, 0.3)):
        scores = [None, None, 0.5, 0.5, score]
        make_run(tmp_path / f"a{seed}", [0.9] * 5, 2, metric="error", valid=scores, seed=seed, lr=1)
    make_run(tmp_path / "old", [0.9] * 5, 2, metric="error", lr=2)
    make_run(tmp_path / "lm", [90.0, 40.0, 20.0], valid=[None, 44.0, 22.0])
    cells = by_learner(tmp_path)
    # The mean of 50, 50, 50 and of 50, 50, 30 percent.
    assert (cells["sm lr=1"]["validation"], cells["sm lr=2"]["validation"]) == ("46.67 ±4.71", "")
    assert cells["sm"]["validation"] == "33.00"
    done = report(tmp_path, "--out", tmp_path / "out")
    text, images = done.stdout.split("Test perplexity")[::-1]
    assert "Validation is the mean error on the learner's own validation data" in images
    assert ["--valid-source" in command for command in (text, images)] == [True, False]
    with open(tmp_path / "out/report.csv") as file:
        assert [line["extra.valid.error"] for line in csv.DictReader(file)][:4] == [
            "",
            "",
            "0.5",
            "0.5",
        ]
    assert "alidation" not in report(tmp_path / "old").stdout


def test_the_learner_column_shows_only_differences_by_flag(tmp_path):
    flags = ["--arch", "x", "--adam-betas", "(0.9, 0.98)", "--dropout", "0.1"]
    lists = {"stream_sha256": "a" * 64, "megabatch_sha256": ["b" * 64, "c" * 64]}
    slow = {"fairseq_flags": [*flags, "--lr", "1e-3"]}
    make_run(tmp_path / "a", [90.0, 20.0], **slow, **lists)
    make_run(tmp_path / "b", [90.0, 20.0], fairseq_flags=[*flags, "--lr=2e-3", "--fp16"], **lists)
    make_run(tmp_path / "c", [90.0, 20.0], learner="gmoe", grow_experts=[2, 2, 2], **slow, **lists)
    make_run(tmp_path / "d", [90.0, 20.0], learner="gmoe", grow_experts=[2, 4], **slow, **lists)
    assert names(tmp_path) == [
        *("gmoe lr=1e-3 grow_experts=2", "gmoe lr=1e-3 grow_experts=2,4"),
        *("sm lr=1e-3", "sm lr=2e-3 fp16"),
    ]
    make_run(tmp_path / "none", [90.0, 20.0], fairseq_flags=[], **lists)
    assert "sm" in names(tmp_path)


def test_settings_are_short():
    shown = {"a": [2] * 99, "b": [2] * 50 + [4] * 49, "c": [2, 2, 4], "--lr": "2e-3", "--fp16": ""}
    shown["d"] = "0f" * 32
    assert describe(shown, shown) == "a=2 b=2*50,4*49 c=2,2,4 lr=2e-3 fp16 d=0f0f0f0f"


def test_what_a_preset_sets_with_the_average_is_shown_only_within_a_variant(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0], select="loss")
    make_run(tmp_path / "b", [90.0, 20.0], select="last", replay_share=0.5)
    assert names(tmp_path) == ["sm", "sm, replay 0.5"]
    make_run(tmp_path / "c", [90.0, 20.0], learner="ens", select="last")
    assert names(tmp_path) == ["ens select=last", "sm select=loss", "sm, replay 0.5 select=last"]


def test_each_data_has_a_table_and_a_checksum_only_if_nothing_else_tells_it_apart(tmp_path):
    for digest in ("1", "2"):
        run = tmp_path / "wiki" / digest
        make_run(run, [90.0, 20.0], stream="wiki", stream_sha256=digest * 64, seed=int(digest))
    titles = [compare.titled(table).title for table in group(find_runs([tmp_path]))]
    assert [title.split(", ")[1] for title in titles] == ["wiki (11111111)", "wiki (22222222)"]
    make_run(tmp_path / "books", [90.0, 20.0], stream="books", stream_sha256="3" * 64)
    titles = [
        compare.titled(table).title
        for table in group(find_runs([tmp_path / "wiki/1", tmp_path / "books"]))
    ]
    assert [title.split(", ")[1] for title in titles] == ["books", "wiki"]


def test_scenarios_of_one_data_set_are_not_compared(tmp_path):
    image_run(tmp_path / "iid", [0.5, 0.4])
    image_run(tmp_path / "rotated", [0.5, 0.1], scenario="rotated")
    tables = group(find_runs([tmp_path]))
    assert [table[0].stream for table in tables] == ["digits, B = 2", "digits rotated, B = 2"]
    assert [table[0].stem for table in tables] == ["error_digits_B2", "error_digits_rotated_B2"]


def test_flags_in_another_order_are_the_same_settings(tmp_path):
    for seed, flags in enumerate((["--lr", "1", "--fp16"], ["--fp16", "--lr", "1"])):
        make_run(tmp_path / str(seed), [90.0, 20.0], fairseq_flags=flags, seed=seed)
    (row,) = table_rows(tmp_path)
    assert row["n"] == "2"


def test_no_two_configurations_have_one_label(tmp_path):
    for growth in ([2], [2, 2]):
        make_run(tmp_path / str(growth), [90.0, 20.0], learner="gmoe", grow_experts=growth)
    assert set(names(tmp_path)) == {"gmoe grow_experts=[2]", "gmoe grow_experts=[2, 2]"}


@pytest.mark.parametrize(
    ("info", "mark"),
    [({"stages": 1}, "sm (t=3/4)"), ({"stages": 2}, "sm (not finished, t=3/4)")],
)
def test_a_run_is_finished_after_the_requested_stages(tmp_path, info, mark):
    with_info(make_run(tmp_path, [90.0, 90.0, 90.0, 20.0, 20.0], 3, 4, fairseq_flags=[]), **info)
    assert names(tmp_path) == [mark]


def test_a_row_per_setting_with_mean_and_sample_deviation_over_seeds(tmp_path):
    for seed, final in enumerate([0.2, 0.3, 0.4]):
        make_run(
            tmp_path / f"s{seed}", [0.9, 0.5, final], metric="error", seed=seed, hidden=64, lr=0.1
        )
    make_run(tmp_path / "wide", [0.9, 0.4, 0.1], metric="error", hidden=128, lr=0.1)
    rows = by_learner(tmp_path, tmp_path / "wide")  # a run given twice counts once
    assert rows.keys() == {"sm hidden=64", "sm hidden=128"}
    row = rows["sm hidden=64"]
    assert (row["n"], row["t=1"], row["t=2"]) == ("3", "50.00 ±0.00", "30.00 ±10.00")
    assert (row["average"], row["CER"]) == ("40.00 ±5.00", "0.80 ±0.10")
    assert (rows["sm hidden=128"]["n"], rows["sm hidden=128"]["CER"]) == ("1", "0.50")


def test_an_unfinished_run_is_marked_and_cuts_unfinished_repeats(tmp_path):
    make_run(tmp_path / "0", [90.0, 30.0, 20.0, 10.0, 5.0], seed=0, rows=4)
    make_run(tmp_path / "1", [90.0, 40.0, 30.0, 10.0, 5.0], seed=1, rows=3)
    row = by_learner(tmp_path)["sm (not finished, t=2/4)"]
    assert [row[f"t={t}"] for t in (1, 2, 3)] == ["35.00 ±7.07", "25.00 ±7.07", ""]
    assert row["cumulative PPL"] == "60.00 ±14.14"  # over t = 1, 2 only


def test_long_streams_show_first_quarters_and_last_and_each_metric_has_a_table(tmp_path):
    make_run(tmp_path / "long", [0.9] + [0.5] * 40, metric="error")
    make_run(tmp_path / "lm", [90.0, 20.0])
    errors, perplexities = group(find_runs([tmp_path]))
    assert compare.titled(errors).title.startswith("Test error (%) after")
    assert compare.titled(perplexities).title.startswith("Test perplexity after")
    shown = [name for name in compare.table(errors)[0] if name.startswith("t=")]
    assert shown == ["t=1", "t=10", "t=20", "t=30", "t=40"]


def test_parameters_have_three_digits_and_a_suffix():
    counts = (0, 999, 1000, 436e6, 999.4e6, 999.9e6, 6.57e9)
    assert list(map(compare.abbreviated, counts)) == [
        "0",
        "999",
        "1k",
        "436M",
        "999M",
        "1G",
        "6.57G",
    ]
