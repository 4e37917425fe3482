"""The files, figures and errors of the report command."""

import csv
import re
from pathlib import Path

import pytest

from alma.records import Run
from alma.report import figures, style
from alma.report.results import Result, group

from .synthetic import error_of, image_run, make_run, report


def test_out_writes_markdown_csv_and_figures(tmp_path):
    for seed in (0, 1):
        values = [0.9, 0.5 + seed / 10, 0.2]
        settings = {"metric": "error", "model": {"d": 8}}
        make_run(tmp_path / f"runs/{seed}", values, seed=seed, **settings)
    make_run(tmp_path / "runs/w2", [0.9, 0.9, 0.3], waiting_time=2, **settings)
    done = report(tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    written = {Path(line) for line in done.stdout.splitlines()[-4:]}
    drawn = [path for path in written if path.suffix == ".png"]
    written |= {path.with_suffix(suffix) for path in drawn for suffix in (".svg", ".pdf")}
    assert written == set((tmp_path / "out").iterdir())
    with open(tmp_path / "out/report.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    last = lines[-1]
    assert last["run"] == str(tmp_path / "runs/w2")
    assert (last["t"], last["value"], last["trained_on"], last["config.model.d"]) == (
        "2",
        "0.3",
        "1 2",
        "8",
    )
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| sm | 1 | no | 2 | 65M | 90.00 ±0.00 | 55.00 ±7.07 | 20.00 ±0.00 |" in markdown
    assert "| sm | 2 | no | 1 | 65M | 90.00 | \\* | 30.00 |" in markdown
    pictures = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert pictures == ["error_B2_over_time.png", "error_B2_front.png"]


def test_a_run_without_rows_has_a_remark(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "none", [90.0, 20.0], rows=0, learner="ens")
    assert report(tmp_path).stdout.splitlines()[-1] == f"no rows yet: {tmp_path / 'none'}"


def text(place):
    return make_run(place / "a", [90.0, 20.0])


def images(place):
    return image_run(place / "a", [0.5, 0.4])


def empty(place):
    return make_run(place / "a", [90.0, 20.0], rows=0)


def corrupt(place):
    empty(place).results.write_text("{}\n")


def no_common_t(place):
    make_run(place / "first", [90.0, 20.0, 10.0], rows=1, seed=1)
    run = make_run(place / "second", [90.0, 20.0, 10.0], rows=2)
    run.results.write_text(run.results.read_text().splitlines()[1] + "\n")


def two_waits(place):
    images(place)
    image_run(place / "b", [0.4, 0.3], 2)


def other_data(place):
    images(place)
    image_run(place / "b", [0.2, 0.1], learner="ens", dataset="mnist", data="11")


def unscored(place):
    make_run(place / "a", [0.9, 0.5], metric="error", valid=[None, 0.4], hidden=8)
    make_run(place / "b", [0.9, 0.5], metric="error", hidden=16)


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (lambda place: None, "", "not a folder"),
        (Path.mkdir, "", "no runs"),
        (empty, "", "no rows yet"),
        (corrupt, "", "jsonl:1:"),
        (no_common_t, "", "share no t"),
        (images, "--table lm", "no perplexity"),
        (images, "--figures lm", "no perplexity"),
        (text, "--figures vision", "no image run"),
        (text, "--hold lr", "--hold needs --select"),
        (text, "--choose replay", "--choose needs --select"),
        (text, "--select valid --choose lr", "--choose lr: choose from replay_share, replay_from"),
        (
            text,
            "--select valid --hold learne",
            "learne: no run has this setting; did you mean learner?",
        ),
        (unscored, "--select valid", "sm hidden=16 w=1 has no validation score"),
        (
            two_waits,
            "--baseline sn",
            "'sn' is no configuration of these runs: give one of 'sm w=1', 'sm w=2'",
        ),
        (
            two_waits,
            "--baseline sm",
            "'sm' fits several configurations: give one of 'sm w=1', 'sm w=2'",
        ),
        (other_data, "--baseline sm", "'sm': no other configuration of these runs is on its data"),
    ],
)
def test_errors_are_one_line_and_exit_code_2_and_nothing_is_written(tmp_path, make, words, message):
    make(tmp_path / "runs")
    assert message in error_of(report(tmp_path / "runs", *words.split(), "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_errors_after_the_tables(tmp_path):
    images(tmp_path / "runs")
    (tmp_path / "file").touch()
    for words, message in (
        (("--out", tmp_path / "file"), "another --out"),
        (("--html", tmp_path), "is a folder"),
    ):
        done = report(tmp_path / "runs", *words)
        assert (done.returncode, len(done.stderr.splitlines()), message in done.stderr) == (
            2,
            1,
            True,
        )


def test_figures_leave_out_the_untrained_perplexity(tmp_path):
    make_run(tmp_path, [50000.0, 50000.0, 24.0, 24.0, 20.0], waiting_time=2)
    ((result,),) = group([Run.read(tmp_path)])
    over_time = figures.over_time(result)
    assert (over_time.x, over_time.y) == ([2, 3, 4], [24.0, 24.0, 20.0])


def test_figures_show_the_untrained_error(tmp_path):
    make_run(tmp_path, [0.9, 0.9, 0.3], waiting_time=2, metric="error")
    ((result,),) = group([Run.read(tmp_path)])
    assert figures.over_time(result).y == pytest.approx([90, 90, 30])


def test_many_curves_differ_in_colour_or_line():
    for learners, waits in (
        (["sm"] * 8, [1, 10]),
        (["sm", "ens", "gmoe"] * 3, [1]),
        (["sm", "ens"], [1]),
    ):
        messages = [
            Result({"learner": learner, "waiting_time": waits[i % len(waits)]}, ())
            for i, learner in enumerate(learners)
        ]
        assert len({tuple(look.items()) for look in figures.looks(messages)}) == len(messages)


def test_a_figure_names_its_data_and_has_the_same_bytes_again(tmp_path):
    make_run(tmp_path / "a", [90.0, 50.0, 20.0], stream="wiki")
    (results,) = group([Run.read(tmp_path / "a")])
    for name in ("one", "two"):
        with style.drawing():
            style.save(figures.over_time_figure(results), tmp_path / f"{name}.png")
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        data = (tmp_path / "one").with_suffix(suffix).read_bytes()
        assert data == (tmp_path / "two").with_suffix(suffix).read_bytes()
        assert data.startswith(start)
    assert b"wiki, B = 2" in data


def test_text_from_records_is_no_markup_in_report_md(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0], name="<b>bold</b>")
    make_run(tmp_path / "b", [90.0, 20.0], learner="ens")
    report(tmp_path, "--out", tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text()
    assert "&lt;b&gt;bold&lt;/b&gt; (sm)" in text
    assert "<b>" not in text
