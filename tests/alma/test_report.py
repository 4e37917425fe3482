"""The report end to end, as a user runs it, on synthetic runs."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from alma.records import Run
from alma.report import __main__ as report_module
from alma.report import figures, labels, results
from alma.stages import stage_at, stages

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS, STAGE_FLOPS = 65_000_000, 2e15


def make_run(
    directory, values, waiting_time=1, rows=None, metric="perplexity", experts=None, valid=None, **config
):
    """A finished run (or its first `rows` rows): `values` are the metric at t = 0..B, and `valid` those on
    validation data since the first stage."""
    megabatches = len(values) - 1
    plan = stages(megabatches, waiting_time, config.get("replay", False))
    config = {"learner": "sm", "replay": False, "seed": 0} | config
    run = Run.open(directory, config | {"megabatches": megabatches, "waiting_time": waiting_time})
    for t, value in list(enumerate(values))[:rows]:
        stage = stage_at(plan, t)
        trains = stage is not None and stage.last == t
        run.append(
            {
                "t": t,
                "stage": stage.index if stage else None,
                "trained_on": list(stage.train_on) if stage else [],
                "metric": metric,
                "value": value,
                "parameters": PARAMETERS,
                "train_flops": STAGE_FLOPS * len(stage.train_on) if trains else 0,
                "eval_flops_per_example": 4.5e10,
                "seconds": 1.5,
                "peak_memory_bytes": 1 << 30,
                "extra": ({"experts": experts[t]} if experts else {})
                | ({"valid": {"loss": 1.0, metric: valid[t]} if stage else None} if valid else {}),
            }
        )
    return run


def report(*arguments):
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "alma.report", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )


def cells(output, first):
    """Cells of the table line that starts with `first` (columns are two spaces apart)."""
    (line,) = [line for line in output.splitlines() if line.startswith(first + "  ")]
    return re.split(r" {2,}", line.strip())


def names(output):
    """The learner column of the first table of a report."""
    lines = output.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("* "))
    return [line.split("  ")[0] for line in lines[2:end]]


def records(output):
    """The first table of a report as dictionaries by learner; it must have no empty cells."""
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


def test_waiting_is_a_star_but_counts(tmp_path):
    make_run(tmp_path, [100.0, 100.0, 100.0, 20.0, 20.0], waiting_time=3)
    row = records(report(tmp_path).stdout)["sm"]
    assert [row[f"t={t}"] for t in (1, 2, 3, 4)] == ["*", "*", "20.00", "20.00"]
    assert (row["untrained"], row["average"], row["cumulative PPL"]) == ("100.00", "60.00", "240.00")


def test_what_a_learner_that_waits_has_learnt_is_summed_apart(tmp_path):
    make_run(tmp_path / "a", [0.95, 0.95, 0.95, 0.3, 0.3], waiting_time=3, metric="error")
    make_run(tmp_path / "b", [0.85, 0.5, 0.4, 0.3, 0.2], metric="error", learner="ens")
    output = report(tmp_path).stdout
    rows = records(output)
    assert [(row["CER"], row["CER trained"]) for row in rows.values()] == [("1.40", "1.40"), ("2.50", "0.60")]
    assert "CER trained is the sum from the first trained stage on" in output
    assert "eq. 1 of the paper's final version" in output
    alone = report(tmp_path / "b").stdout
    assert "CER trained" not in alone  # it would be CER


def test_validation_is_a_column_where_rows_have_it(tmp_path):
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


def test_select_valid_chooses_by_validation_what_is_tuned_and_nothing_else(tmp_path):
    runs = tmp_path / "runs"
    for width, test, valid in ((8, 0.1, 0.4), (16, 0.3, 0.2), (32, 0.2, 0.3)):
        for seed in (0, 1):
            scores = [None, valid, valid + seed / 10]
            make_run(
                runs / f"{width}{seed}",
                [0.9, 0.5, test],
                metric="error",
                valid=scores,
                hidden=width,
                seed=seed,
            )
    make_run(runs / "w2", [0.9, 0.9, 0.4], 2, metric="error", valid=[None, None, 0.9], hidden=8)
    make_run(runs / "replay", [0.9, 0.4, 0.4], metric="error", valid=[None, 0.9, 0.9], hidden=8, replay=True)
    make_run(
        runs / "data", [0.9, 0.4, 0.4], metric="error", valid=[None, 0.9, 0.9], hidden=8, dataset="other"
    )
    make_run(runs / "ens", [0.9, 0.4, 0.4], metric="error", valid=[None, 0.9, 0.9], hidden=8, learner="ens")
    done = report(runs, "--select", "valid", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    choice = "chosen by validation error (%): sm w=1: hidden=16 (22.50); "
    choice += "left out: hidden=32 (32.50), hidden=8 (42.50)"
    assert [line for line in done.stdout.splitlines() if line.startswith("chosen")] == [choice]
    text = (tmp_path / "out/report.md").read_text()
    assert choice in text
    assert text.count("| sm ") == 4
    with open(tmp_path / "out/report.csv") as file:
        left = {Path(line["run"]).name for line in csv.DictReader(file)}
    assert left == {"160", "161", "w2", "replay", "data", "ens"}


def test_candidates_are_compared_at_the_t_that_all_of_them_have(tmp_path):
    make_run(tmp_path / "a", [90.0, 50.0, 20.0], valid=[None, 50.0, 20.0], lr=1)
    make_run(tmp_path / "b", [90.0, 40.0, 30.0], valid=[None, 40.0, 30.0], lr=2, rows=2)
    make_run(tmp_path / "c", [90.0, 40.0, 30.0], valid=[None, 40.0, 30.0], lr=3, rows=1)
    done = report(tmp_path, "--select", "valid")
    told = "sm w=1: lr=2 (40.00); left out: lr=1 (50.00), lr=3 (no stage complete)"
    assert done.stdout.splitlines()[-1] == f"chosen by validation perplexity: {told}"


def test_select_valid_refuses_rows_without_a_score(tmp_path):
    make_run(tmp_path / "a", [0.9, 0.5], metric="error", valid=[None, 0.4], hidden=8)
    make_run(tmp_path / "b", [0.9, 0.5], metric="error", hidden=16)
    done = report(tmp_path, "--select", "valid", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "sm hidden=16 w=1 has no validation score" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_learner_column_says_only_what_differs_and_flag_by_flag(tmp_path):
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
    assert labels.describe(shown, shown) == "a=2 b=2*50,4*49 c=2,2,4 lr=2e-3 fp16 d=0f0f0f0f"


def test_a_run_without_flags_beside_one_with_some(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0], fairseq_flags=[])
    make_run(tmp_path / "b", [90.0, 20.0], fairseq_flags=["--lr", "1e-3"])
    assert names(report(tmp_path).stdout) == ["sm", "sm lr=1e-3"]


def test_checksums_are_told_where_nothing_else_tells_data_apart(tmp_path):
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
def test_a_run_that_ends_where_it_was_asked_to_is_not_called_unfinished(tmp_path, rows, info, mark):
    run = make_run(tmp_path, [90.0, 90.0, 90.0, 20.0, 20.0], 3, rows, fairseq_flags=[])
    (tmp_path / "run.json").write_text(json.dumps(run.info | info))
    assert names(report(tmp_path).stdout) == [mark]


def test_comp_of_older_image_runs_leaves_their_validation_out(tmp_path):
    run = make_run(tmp_path, [0.9, 0.5, 0.4], metric="error", dataset="digits")
    rows = run.rows
    for row in rows[1:]:
        row["extra"]["flops"] = {"forward": 1e15, "backward": 2e15, "validation": 5e14}
    rows[1]["train_flops"] = 3.5e15  # as it was
    rows[2]["train_flops"] = 3e15  # as it is
    run.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert records(report(tmp_path).stdout)["sm"]["Comp (TFLOPs)"] == "6,000"


def test_seeds_are_one_row_and_settings_are_told_apart(tmp_path):
    for seed, final in enumerate([0.2, 0.3, 0.4]):
        make_run(tmp_path / f"s{seed}", [0.9, 0.5, final], metric="error", seed=seed, hidden=64, lr=0.1)
    make_run(tmp_path / "wide", [0.9, 0.4, 0.1], metric="error", hidden=128, lr=0.1)
    rows = records(report(tmp_path).stdout)
    assert rows.keys() == {"sm hidden=64", "sm hidden=128"}
    row = rows["sm hidden=64"]
    assert (row["n"], row["t=1"], row["t=2"]) == ("3", "50.00 ±0.00", "30.00 ±10.00")
    assert (row["average"], row["CER"]) == ("40.00 ±5.00", "0.80 ±0.10")
    assert (rows["sm hidden=128"]["n"], rows["sm hidden=128"]["CER"]) == ("1", "0.50")


def test_an_unfinished_run_is_marked_and_shortens_its_repeats(tmp_path):
    make_run(tmp_path / "0", [90.0, 30.0, 20.0, 10.0, 5.0], seed=0)
    make_run(tmp_path / "1", [90.0, 40.0, 30.0, 10.0, 5.0], seed=1, rows=3)
    line = cells(report(tmp_path).stdout, "sm (not finished, t=2/4)")
    assert "35.00 ±7.07" in line
    assert "25.00 ±7.07" in line
    assert "60.00 ±14.14" in line  # cumulative over t = 1, 2 only
    assert "10.00" not in line


def test_long_streams_show_first_quarters_last_and_metrics_get_own_tables(tmp_path):
    make_run(tmp_path / "long", [0.9] + [0.5] * 40, metric="error")
    make_run(tmp_path / "lm", [90.0, 20.0])
    output = report(tmp_path).stdout
    headings = [line for line in output.splitlines() if line.startswith("Test ")]
    assert [heading.split(" after")[0] for heading in headings] == ["Test error (%)", "Test perplexity"]
    header = output.splitlines()[1]
    assert re.findall(r"t=\d+", header) == ["t=1", "t=10", "t=20", "t=30", "t=40"]


def test_out_writes_markdown_csv_and_figures(tmp_path):
    for seed in (0, 1):
        make_run(
            tmp_path / f"runs/{seed}", [0.9, 0.5 + seed / 10, 0.2], metric="error", seed=seed, model={"d": 8}
        )
    make_run(tmp_path / "runs/w2", [0.9, 0.9, 0.3], waiting_time=2, metric="error", model={"d": 8})
    done = report(tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    written = [Path(line) for line in done.stdout.splitlines()[-5:]]
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    with open(tmp_path / "out/report.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    last = lines[-1]
    assert last["run"] == str(tmp_path / "runs/w2")
    assert (last["t"], last["value"], last["trained_on"], last["config.model.d"]) == ("2", "0.3", "1 2", "8")
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| sm | 1 | no | 2 | 65M | 90.00 ±0.00 | 55.00 ±7.07 | 20.00 ±0.00 |" in markdown
    assert "| sm | 2 | no | 1 | 65M | 90.00 | \\* | 30.00 |" in markdown
    pictures = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert pictures == ["error_B2_over_time.png", "error_B2_compute.png", "error_B2_memory.png"]
    for picture in pictures:
        assert min(pixels(tmp_path / "out" / picture, colour) for colour in figures.COLOURS[:2]) > 20
        assert pixels(tmp_path / "out" / picture, figures.COLOURS[2]) == 0


def pixels(path, colour):
    """How many pixels of a picture have exactly this colour."""
    from matplotlib import colors, image

    difference = abs(image.imread(path)[..., :3] - colors.to_rgb(colour))
    return int((difference < 1 / 255).all(axis=-1).sum())


def test_figures_leave_out_the_untrained_perplexity_and_end_at_the_metrics(tmp_path):
    make_run(tmp_path, [50000.0, 50000.0, 24.0, 24.0, 20.0], waiting_time=2)
    ((result,),) = results.group([Run.read(tmp_path)])
    over_time = figures._over_time(result)
    assert (over_time.x, over_time.y) == ([2, 3, 4], [24.0, 24.0, 20.0])
    trade_off = figures._trade_off(result, results.compute)
    assert trade_off.x == pytest.approx([4000, 4000, 8000])
    assert trade_off.y == pytest.approx([24.0, 24.0, 68 / 3])


def test_error_figures_keep_the_untrained_error(tmp_path):
    make_run(tmp_path, [0.9, 0.9, 0.3], waiting_time=2, metric="error")
    ((result,),) = results.group([Run.read(tmp_path)])
    assert figures._over_time(result).y == pytest.approx([90, 90, 30])
    trade_off = figures._trade_off(result, results.memory)
    assert (trade_off.x, trade_off.y) == ([3 * PARAMETERS], pytest.approx([60]))


def test_a_run_given_twice_counts_once(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    assert records(report(tmp_path, tmp_path / "a").stdout)["sm"]["n"] == "1"


def test_a_run_without_rows_beside_others_is_named(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "b", [90.0, 20.0], rows=0, learner="ens")
    done = report(tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"no rows yet: {tmp_path / 'b'}"


def test_copies_of_a_run_are_named(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_run(tmp_path / name, [90.0, 20.0], seed=seed)
    last = report(tmp_path).stdout.splitlines()[-1]
    assert last.endswith(f"counted as repeats: {tmp_path / 'a'}, {tmp_path / 'b'}")


def test_repeats_without_a_common_t_are_an_error(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0], rows=1)
    late = make_run(tmp_path / "b", [90.0, 20.0], seed=1)
    late.results.write_text(late.results.read_text().splitlines()[1] + "\n")
    done = report(tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "share no t" in done.stderr


def test_out_that_is_a_file_is_an_error(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    (tmp_path / "file").touch()
    done = report(tmp_path, "--out", tmp_path / "file")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "another --out" in done.stderr


def test_many_curves_differ_in_colour_line_or_marker(tmp_path):
    for learners in (["sm"] * 20, ["sm", "ens", "gmoe"] * 6, ["sm", "ens"]):
        found = [results.Result({"learner": learner}, ()) for learner in learners]
        assert len(set(figures._styles(found))) == len(found)


@pytest.mark.parametrize("case", ["missing", "empty", "no rows", "corrupt"])
def test_errors_are_one_line_and_exit_code_2(tmp_path, case):
    place = tmp_path / "runs"
    if case != "missing":
        place.mkdir()
    if case in ("no rows", "corrupt"):
        make_run(place / "a", [90.0, 20.0], rows=0)
    if case == "corrupt":
        (place / "a/results.jsonl").write_text("{}\n")
    done = report(place)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    expected = {
        "missing": "not a folder",
        "empty": "no runs",
        "no rows": "no rows yet",
        "corrupt": "jsonl:1:",
    }
    assert expected[case] in done.stderr


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
def test_parameters_have_three_digits_and_a_unit(count, shown):
    assert report_module._si(count) == shown


def test_spread_is_the_sample_standard_deviation(tmp_path):
    for seed, value in enumerate([1.0, 2.0, 4.0]):
        make_run(tmp_path / str(seed), [9.0, value], seed=seed)
    ((result,),) = results.group(results.find_runs([tmp_path]))
    mean, deviation = result.over_seeds(lambda rows: rows[1]["value"])
    assert mean == pytest.approx(7 / 3)
    assert deviation == pytest.approx(math.sqrt(7 / 3))
