"""The report page without a browser: numbers and sections of its figures, and text that no page expects."""

import shutil
import sys

import pytest

from alma.errors import UserError
from alma.records import Run
from alma.report import compare, sections
from alma.report.html import figures, page, summary
from alma.report.results import compute, find_runs, group

from .synthetic import averaged, drifting, image_run, lm_run, make_run, report, with_info

EVIL = "</script><b onload=alert(1)>&amp;%{x}"


def results_in(place):
    """The results of each section of the page."""
    return [section.results for section in sections.find_sections(find_runs([place]))]


def named(figure, name):
    """The traces of a figure with this name; those of its first choice."""
    return [trace for trace in figure["data"] if trace["name"] == name and trace.get("visible", True)]


def choice(figure, name):
    """The new attributes of traces and axes of an entry of a figure's menu."""
    (found,) = (
        each["args"] for each in figure["layout"]["updatemenus"][0]["buttons"] if each["label"] == name
    )
    return found


def test_the_front_has_the_numbers_of_the_report(grid):
    (results,) = results_in(grid)
    figure = figures.front(results)
    sums, axes = choice(figure, "CER / memory, Mem (parameters)")
    for i, result in enumerate(results, start=1):
        (trace,) = named(figure, result.label)
        mean, deviation = result.over_seeds(compare.AVERAGES["average"])
        assert (trace["x"][0], trace["y"][0]) == pytest.approx((result.over_seeds(compute)[0], 100 * mean))
        assert trace["error_y"]["array"][0] == pytest.approx(100 * deviation, rel=1e-5)
        assert trace["customdata"][0] == compare.spread(compare.AVERAGES["average"], result)
        assert len(trace["y"]) == len(trace["marker"]["size"]) == (3 if len(result.runs) == 2 else 1)
        assert sums["y"][i][0] == pytest.approx(result.over_seeds(compare.TOTALS["{total}"])[0], rel=1e-5)
    assert axes["yaxis.title"] == {"text": "CER"}
    line = figure["data"][0]
    assert (line["x"], line["y"]) == ([4], [25])  # ens at w = 1


def test_figures_are_valid_for_plotly(grid, tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    run = lm_run(tmp_path / "a", [30, 20], learner="gmoe", experts=[2, 3])
    drifting(run, lambda t, j: 10 * t + j if t else 5e4)
    for results in (*results_in(grid), *results_in(tmp_path)):
        for figure in (figures.front(results), figures.curves(results)):
            graph_objects.Figure({"data": figure["data"], "layout": figure["layout"]})


def test_a_held_value_is_one_step_and_the_untrained_model_is_dotted(tmp_path):
    for seed in (0, 1):
        values = [v + seed / 10 for v in (0.9, 0.9, 0.5, 0.5, 0.25, 0.25)]
        make_run(tmp_path / str(seed), values, 2, metric="error", seed=seed)
    line, upper, lower, untrained = figures.curves(*results_in(tmp_path))["data"]
    assert (line["x"], line["y"]) == ([2, 4, 5], pytest.approx([55, 30, 30]))
    assert line["customdata"][0] == "55.00 ±7.07"
    assert (upper["y"][0], lower["y"][0]) == pytest.approx((62.0711, 47.9289))
    assert (untrained["x"], untrained["y"], untrained["line"]["dash"]) == ([0, 2], [95, 55], "dot")


def test_data_sets_metrics_and_lengths_are_sections(tmp_path):
    image_run(tmp_path / "digits", [0.5, 0.4])
    image_run(tmp_path / "mnist", [0.5, 0.4], dataset="mnist")
    image_run(tmp_path / "longer", [0.5, 0.4, 0.3])
    lm_run(tmp_path / "text", [30, 20], stream="books", stream_sha256="a" * 64)
    lm_run(tmp_path / "other", [31, 21], stream="books", stream_sha256="b" * 64)
    assert [section.title for section in sections.find_sections(find_runs([tmp_path]))] == [
        *("books (aaaaaaaa): test perplexity, B = 2", "books (bbbbbbbb): test perplexity, B = 2"),
        *("digits: test error (%), B = 2", "digits: test error (%), B = 3", "mnist: test error (%), B = 2"),
    ]


def test_the_summary_ranks_finished_configurations(tmp_path):
    for seed in (0, 1):
        averaged(image_run(tmp_path / f"sm{seed}", [0.5, 0.4 + seed / 10], seed=seed, average=0.9), 1)
        image_run(tmp_path / f"ens{seed}", [0.5, 0.42 + seed / 10], seed=seed, learner="ens")
    image_run(tmp_path / "gmoe", [0.1, 0.1], rows=2, learner="gmoe")
    (section,) = sections.find_sections(find_runs([tmp_path]))
    assert summary.summarize(section) == [
        "5 runs: 4 configurations of sm, ens, gmoe.",  # a run with an average is two configurations
        "Lowest average error (%): sm w=1, 47.50 ±3.54 over 2 seeds (CER 0.95 ±0.07); "
        "next sm, average w=1, 47.50 ±3.54 over 2 seeds, within the spread over seeds.",
        "Lowest final error (%): sm w=1, 45.00 ±7.07 over 2 seeds; "
        "next sm, average w=1, 45.00 ±7.07 over 2 seeds, within the spread over seeds.",
        "Not dominated in average error (%) and training compute: sm w=1.",
        "Not finished, so not ranked: gmoe w=1 (t=1/2).",
    ]


def test_text_from_records_is_no_markup(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / str(seed), [0.5, 0.4], learner=EVIL, name="<i>", seed=seed)
    written = page.body(find_runs([tmp_path]), [f"no rows yet: {EVIL}"])
    assert "<b onload" not in written
    assert "<i>" not in written
    assert written.count("</script>") == 2  # of the two figures
    assert figures.plain(EVIL) == "&lt;/script&gt;&lt;b onload=alert(1)&gt;&amp;amp;%&#123;x}"


def test_runs_with_few_rows_and_unknown_learners(tmp_path):
    make_run(tmp_path / "untrained", [90.0, 20.0], rows=1)
    make_run(tmp_path / "none", [90.0, 20.0], rows=0, learner="ens")
    make_run(tmp_path / "new", [90.0, 20.0], learner="my_learner")
    assert "my_learner w=1" in page.body(find_runs([tmp_path]))
    assert "none is ranked" in page.body(find_runs([tmp_path / "untrained"]))


def test_two_hundred_runs_fit_in_seven_megabytes(tmp_path):
    pytest.importorskip("plotly")
    first = image_run(tmp_path / "0", [1 / (t + 1.7) for t in range(20)], learner="gmoe")
    for i in range(1, 200):
        shutil.copytree(tmp_path / "0", tmp_path / str(i))
        config = first.config | {"seed": i % 2, "hidden": 8 + i // 2}
        with_info(Run.read(tmp_path / str(i)), config=config)
    page.write_page(find_runs([tmp_path]), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 7e6


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "b", [90.0, 20.0], rows=0, learner="ens")
    out = tmp_path / "new/report.html"
    done = report(tmp_path, "--html", out)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(out))
    assert f"no rows yet: {tmp_path / 'b'}" in out.read_text()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match="pip install plotly"):
        page.write_page(find_runs([tmp_path]), tmp_path / "sub/report.html")
    assert not (tmp_path / "sub").exists()


def test_the_page_has_the_tables_of_the_report(grid):
    (section,) = sections.find_sections(find_runs([grid]))
    (results,) = group(find_runs([grid]))
    found, *_ = page.tables(section, None)
    assert sorted(found.cells) == sorted(compare.table(results))
