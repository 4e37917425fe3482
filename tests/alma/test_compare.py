"""The general table: cells, labels and columns."""

import csv
import io
import json
import math
import re
import statistics

import pytest

from alma.report import compare, tables
from alma.report.labels import describe
from alma.report.results import column, find_runs, group

from .synthetic import make_run, report


def cells(output, first):
    """Cells of the table row that starts with `first`; columns are separated by two spaces."""
    (line,) = [line for line in output.splitlines() if line.startswith(first + "  ")]
    return re.split(r" {2,}", line.strip())


def names(output):
    """The learner column of the first table of a report."""
    lines = output.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("* "))
    return [line.split("  ")[0] for line in lines[2:end]]


def records(output):
    """The rows of the first table, which must have no empty cells, as dictionaries by learner."""
    lines = output.splitlines()
    header = re.split(r" {2,}", lines[1].strip())
    end = next(i for i, line in enumerate(lines) if line.startswith("* "))
    body = [re.split(r" {2,}", line.strip()) for line in lines[2:end]]
    return {line[0]: dict(zip(header, line, strict=True)) for line in body}


def test_table_holds_the_metrics_of_equations_1_and_2(tmp_path):
    make_run(tmp_path / "a", [50000.0, 28.0, 27.0, 26.0, 25.0], experts=[4, 4, 6, 8, 12], learner="gmoe")
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    row = records(done.stdout)["gmoe"]
    assert row == {
        "learner": "gmoe",
        "w": "1",
        "replay": "no",
        "n": "1",
        "experts": "4->12",
        "parameters": "65M",
        "untrained": "50,000",
        **{"t=1": "28.00", "t=2": "27.00", "t=3": "26.00", "t=4": "25.00"},
        "average": "26.50",
        "cumulative PPL": "106.00",
        "Mem": "325M",
        "Comp (TFLOPs)": "8,000",
    }


def test_a_waiting_learner_has_stars_that_count(tmp_path):
    make_run(tmp_path, [100.0, 100.0, 100.0, 20.0, 20.0], waiting_time=3)
    row = records(report(tmp_path).stdout)["sm"]
    assert [row[f"t={t}"] for t in (1, 2, 3, 4)] == ["*", "*", "20.00", "20.00"]
    assert (row["untrained"], row["average"], row["cumulative PPL"]) == ("100.00", "60.00", "240.00")


def test_a_second_total_leaves_out_the_untrained_model(tmp_path):
    make_run(tmp_path / "a", [0.95, 0.95, 0.95, 0.3, 0.3], waiting_time=3, metric="error")
    make_run(tmp_path / "b", [0.85, 0.5, 0.4, 0.3, 0.2], metric="error", learner="ens")
    output = report(tmp_path).stdout
    rows = records(output)
    assert [(row["CER"], row["CER trained"]) for row in rows.values()] == [("1.40", "1.40"), ("2.50", "0.60")]
    assert "CER trained is the sum from the first trained stage on" in output
    assert "eq. 1 of the paper's final version" in output
    alone = report(tmp_path / "b").stdout
    assert "CER trained" not in alone  # it would equal CER


def test_validation_has_a_column_if_rows_have_it(tmp_path):
    for seed, score in enumerate((0.5, 0.3)):
        scores = [None, None, 0.5, 0.5, score]
        make_run(tmp_path / f"a{seed}", [0.9] * 5, 2, metric="error", valid=scores, seed=seed, lr=1)
    make_run(tmp_path / "old", [0.9] * 5, 2, metric="error", lr=2)
    lm = make_run(tmp_path / "lm", [90.0, 40.0, 20.0], valid=[None, 44.0, 22.0])
    output = report(tmp_path).stdout
    header, new, old = (re.split(r" {2,}", line.strip()) for line in output.splitlines()[1:4])
    cell = new[header.index("validation")]
    assert cell == "46.67 ±4.71"  # the mean of 50, 50, 50 and of 50, 50, 30 percent
    assert (new[0], old[0], len(new) - len(old)) == ("sm lr=1", "sm lr=2", 1)
    assert "Validation is the mean error on the learner's own validation data" in output
    assert records(report(lm.directory).stdout)["sm"]["validation"] == "33.00"
    done = report(tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out/report.csv") as file:
        assert [line["extra.valid.error"] for line in csv.DictReader(file)][:4] == ["", "", "0.5", "0.5"]
    assert "alidation" not in report(tmp_path / "old").stdout


def test_the_learner_column_shows_only_differences_by_flag(tmp_path):
    flags = ["--arch", "x", "--adam-betas", "(0.9, 0.98)", "--dropout", "0.1"]
    lists = {"stream_sha256": "a" * 64, "megabatch_sha256": ["b" * 64, "c" * 64]}
    make_run(tmp_path / "a", [90.0, 20.0], fairseq_flags=[*flags, "--lr", "1e-3"], **lists)
    make_run(tmp_path / "b", [90.0, 20.0], fairseq_flags=[*flags, "--lr=2e-3", "--fp16"], **lists)
    grown = {"learner": "gmoe", "grow_experts": [2, 2, 2]}
    make_run(tmp_path / "c", [90.0, 20.0], fairseq_flags=[*flags, "--lr", "1e-3"], **grown, **lists)
    make_run(
        tmp_path / "d",
        [90.0, 20.0],
        fairseq_flags=[*flags, "--lr", "1e-3"],
        **grown | {"grow_experts": [2, 4]},
    )
    assert names(report(tmp_path).stdout) == [
        "gmoe lr=1e-3 grow_experts=2",
        "gmoe lr=1e-3 grow_experts=2,4",
        "sm lr=1e-3",
        "sm lr=2e-3 fp16",
    ]


def test_settings_are_short():
    shown = {
        "a": [2] * 99,
        "b": [2] * 50 + [4] * 49,
        "c": [2, 2, 4],
        "--lr": "2e-3",
        "--fp16": "",
        "d": "0f" * 32,
    }
    assert describe(shown, shown) == "a=2 b=2*50,4*49 c=2,2,4 lr=2e-3 fp16 d=0f0f0f0f"


def test_runs_with_and_without_flags(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0], fairseq_flags=[])
    make_run(tmp_path / "b", [90.0, 20.0], fairseq_flags=["--lr", "1e-3"])
    assert names(report(tmp_path).stdout) == ["sm", "sm lr=1e-3"]


def test_checksums_are_shown_only_if_nothing_else_distinguishes_data(tmp_path):
    for name, stream, digest in (("a", "wiki", "1"), ("b", "wiki", "2")):
        make_run(tmp_path / name, [90.0, 20.0], stream=stream, stream_sha256=digest * 64, seed=int(digest))
    assert names(report(tmp_path).stdout) == ["sm stream_sha256=11111111", "sm stream_sha256=22222222"]
    make_run(tmp_path / "c", [90.0, 20.0], stream="books", stream_sha256="3" * 64)
    assert set(records(report(tmp_path / "a", tmp_path / "c").stdout)) == {
        "sm stream=wiki",
        "sm stream=books",
    }


@pytest.mark.parametrize(
    ("rows", "info", "mark"),
    [(4, {"stages": 1}, "sm (t=3/4)"), (4, {"stages": 2}, "sm (not finished, t=3/4)"), (4, {}, "sm (t=3/4)")],
)
def test_a_run_is_finished_after_the_requested_stages(tmp_path, rows, info, mark):
    run = make_run(tmp_path, [90.0, 90.0, 90.0, 20.0, 20.0], 3, rows, fairseq_flags=[])
    (tmp_path / "run.json").write_text(json.dumps(run.info | info))
    assert names(report(tmp_path).stdout) == [mark]


def test_comp_excludes_validation_also_in_older_image_runs(tmp_path):
    run = make_run(tmp_path, [0.9, 0.5, 0.4], metric="error", dataset="digits")
    rows = run.rows
    for row in rows[1:]:
        row["extra"]["flops"] = {"forward": 1e15, "backward": 2e15, "validation": 5e14}
    rows[1]["train_flops"] = 3.5e15  # validation included
    rows[2]["train_flops"] = 3e15  # without validation
    run.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert records(report(tmp_path).stdout)["sm"]["Comp (TFLOPs)"] == "6,000"


def test_a_row_per_setting_with_the_mean_over_seeds(tmp_path):
    for seed, final in enumerate([0.2, 0.3, 0.4]):
        make_run(tmp_path / f"s{seed}", [0.9, 0.5, final], metric="error", seed=seed, hidden=64, lr=0.1)
    make_run(tmp_path / "wide", [0.9, 0.4, 0.1], metric="error", hidden=128, lr=0.1)
    rows = records(report(tmp_path).stdout)
    assert rows.keys() == {"sm hidden=64", "sm hidden=128"}
    row = rows["sm hidden=64"]
    assert (row["n"], row["t=1"], row["t=2"]) == ("3", "50.00 ±0.00", "30.00 ±10.00")
    assert (row["average"], row["CER"]) == ("40.00 ±5.00", "0.80 ±0.10")
    assert (rows["sm hidden=128"]["n"], rows["sm hidden=128"]["CER"]) == ("1", "0.50")


def test_an_unfinished_run_is_marked_and_cuts_its_repeats(tmp_path):
    make_run(tmp_path / "0", [90.0, 30.0, 20.0, 10.0, 5.0], seed=0)
    make_run(tmp_path / "1", [90.0, 40.0, 30.0, 10.0, 5.0], seed=1, rows=3)
    line = cells(report(tmp_path).stdout, "sm (not finished, t=2/4)")
    assert "35.00 ±7.07" in line
    assert "25.00 ±7.07" in line
    assert "60.00 ±14.14" in line  # cumulative over t = 1, 2 only
    assert "10.00" not in line


def test_long_streams_show_first_quarters_and_last_and_each_metric_has_a_table(tmp_path):
    make_run(tmp_path / "long", [0.9] + [0.5] * 40, metric="error")
    make_run(tmp_path / "lm", [90.0, 20.0])
    output = report(tmp_path).stdout
    headings = [line for line in output.splitlines() if line.startswith("Test ")]
    assert [heading.split(" after")[0] for heading in headings] == ["Test error (%)", "Test perplexity"]
    header = output.splitlines()[1]
    assert re.findall(r"t=\d+", header) == ["t=1", "t=10", "t=20", "t=30", "t=40"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (436e6, "436M"),
        (999.4e6, "999M"),
        (999.9e6, "1G"),
        (6.57e9, "6.57G"),
    ],
)
def test_parameters_have_three_digits_and_a_suffix(count, shown):
    assert compare.abbreviated(count) == shown


def test_a_new_measure_is_one_entry(tmp_path, monkeypatch):
    def median(rows):
        return statistics.median(column(rows, "value").values())

    monkeypatch.setitem(compare.AVERAGES, "median", median)
    make_run(tmp_path, [0.9, 0.5, 0.1], metric="error")
    header, row = compare.table(group(find_runs([tmp_path]))[0])
    assert row[header.index("median")] == "50.00"


def test_spread_is_the_sample_standard_deviation(tmp_path):
    for seed, value in enumerate([1.0, 2.0, 4.0]):
        make_run(tmp_path / str(seed), [9.0, value], seed=seed)
    ((result,),) = group(find_runs([tmp_path]))
    mean, deviation = result.over_seeds(lambda rows: rows[1]["value"])
    assert mean == pytest.approx(7 / 3)
    assert deviation == pytest.approx(math.sqrt(7 / 3))


def test_a_run_given_twice_counts_once(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    assert records(report(tmp_path, tmp_path / "a").stdout)["sm"]["n"] == "1"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_the_terminal_and_loses_nothing(tmp_path, monkeypatch, width):
    for lr in (1, 2, 3):
        values = [5e4, 5e4, *(30.0 + lr + t for t in range(6))]
        make_run(tmp_path / str(lr), values, 2, valid=values, lr=lr, arch="switch_gmoe_tiny_wide")
    whole = compare.table(group(find_runs([tmp_path]))[0])
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", Terminal())
    text = tables.for_terminal(whole)
    assert max(map(len, text.splitlines())) <= width < len(tables.as_text(whole).splitlines()[0])
    shared, *_ = text.splitlines()
    assert shared.startswith("all rows: w 2, replay no, n 1, ")
    for cells_ in zip(*whole, strict=True):
        assert cells_[0] in text
        assert all(cell in text for cell in cells_)
    assert text.count("sm lr=1 ") == text.count("learner ")  # each block names its rows
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert tables.for_terminal(whole) == tables.as_text(whole)


def test_the_source_of_validation_is_told_beside_its_numbers(tmp_path):
    make_run(tmp_path / "text", [90.0, 50.0], valid=[None, 856.0])
    make_run(tmp_path / "image", [0.9, 0.5], valid=[None, 0.4], metric="error")
    assert "--valid-source" in report(tmp_path / "text").stdout
    assert "--valid-source" not in report(tmp_path / "image").stdout
