"""The report page without a browser: numbers and sections of its figures, and text that no page expects."""

import pytest

from alma.report import compare
from alma.report.html import figures, page
from alma.report.results import compute, find_runs, find_sections, group

from .synthetic import drifting, image_run, lm_run, make_run, report

EVIL = "</script><b onload=alert(1)>&amp;%{x}"


def results_in(place):
    """The results of each section of the page."""
    return [section.results for section in find_sections(find_runs([place]))]


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
        assert sums["y"][i][0] == pytest.approx(result.over_seeds(compare.TOTALS["{total}"])[0], rel=1e-5)
    assert axes["yaxis.title"] == {"text": "CER"}
    line = figure["data"][0]
    assert (line["x"], line["y"]) == ([4], [25])  # ens at w = 1


def test_figures_are_valid_for_plotly(grid, tmp_path):
    from plotly import graph_objects

    run = lm_run(tmp_path / "a", [30, 20], learner="gmoe", experts=[2, 3])
    drifting(run, lambda t, j: 10 * t + j if t else 5e4)
    for results in (*results_in(grid), *results_in(tmp_path)):
        figure = figures.front(results)
        graph_objects.Figure({"data": figure["data"], "layout": figure["layout"]})


def test_text_from_records_is_no_markup(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / str(seed), [0.5, 0.4], learner=EVIL, name="<i>", seed=seed)
    written = page.body(find_runs([tmp_path]), [f"no rows yet: {EVIL}"])
    assert "<b onload" not in written
    assert "<i>" not in written
    assert written.count("</script>") == 1  # of the front
    assert figures.plain(EVIL) == "&lt;/script&gt;&lt;b onload=alert(1)&gt;&amp;amp;%&#123;x}"


def test_runs_with_few_rows_and_unknown_learners(tmp_path):
    make_run(tmp_path / "untrained", [90.0, 20.0], rows=1)
    make_run(tmp_path / "none", [90.0, 20.0], rows=0, learner="ens")
    make_run(tmp_path / "new", [90.0, 20.0], learner="my_learner")
    assert "my_learner w=1" in page.body(find_runs([tmp_path]))
    assert "sm (not finished, t=0/1)" in page.body(find_runs([tmp_path / "untrained"]))


def test_the_command_writes_the_page(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "b", [90.0, 20.0], rows=0, learner="ens")
    out = tmp_path / "new/report.html"
    done = report(tmp_path, "--html", out)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(out))
    assert f"no rows yet: {tmp_path / 'b'}" in out.read_text()


def test_the_page_has_the_tables_of_the_report(grid):
    (section,) = find_sections(find_runs([grid]))
    (results,) = group(find_runs([grid]))
    found, *_ = page.tables(section, None)
    assert sorted(found.cells) == sorted(compare.table(results))
