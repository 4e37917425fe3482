"""The data of the report page: numbers, sections, sizes, and records that no page expects."""

import json
import math
import re
import shutil
import sys

import pytest

from alma.errors import UserError
from alma.records import Run
from alma.report import compare, sections
from alma.report.html import page, panels, summary
from alma.report.results import compute, find_runs, group

from .synthetic import image_run, lm_run, make_run, report, with_expert_layers, with_info

EVIL = "</script><b onload=alert(1)>&amp;%{x}"


def page_of(place, remarks=()):
    """The data of the page as a browser reads it: the JSON of its <script> element."""
    return json.loads(page.embedded(page.page_data(find_runs([place]), remarks)))


def panel_of(section, title):
    """The panel of a section with this title."""
    return next(panel for panel in section["panels"] if panel["title"] == title)


def test_numbers_are_those_of_the_report(grid):
    (section,) = page_of(grid)["sections"]
    (results,) = group(find_runs([grid]))
    by_label = {result.label: result for result in results}
    shown = panel_of(section, "Front")
    measures = {measure["name"]: measure for measure in shown["x"] + shown["y"]}
    for index, each in enumerate(section["configurations"]):
        result = by_label.pop(each["label"])
        mean, deviation = result.over_seeds(compare.AVERAGES["average"])
        assert measures["average error (%)"]["mean"][index] == pytest.approx(100 * mean, rel=1e-5)
        assert measures["average error (%)"]["deviation"][index] == pytest.approx(100 * deviation, rel=1e-5)
        sums = [compare.TOTALS["{total}"](rows) for rows in result.repeats]
        assert measures["CER"]["seeds"][index] == pytest.approx(sums, rel=1e-5)
        spent = result.over_seeds(compute)[0]
        assert measures["training compute, Comp (TFLOPs)"]["mean"][index] == pytest.approx(spent, rel=1e-5)
    assert not by_label
    table = panel_of(section, "Results")
    assert sorted(table["rows"]) == sorted(compare.table(results)[1:])


def test_a_held_value_is_one_step(tmp_path):
    values = [0.9, 0.9, 0.5, 0.5, 0.25, 0.25]
    for seed in (0, 1):
        make_run(tmp_path / str(seed), [v + seed / 10 for v in values], 2, metric="error", seed=seed)
    (section,) = page_of(tmp_path)["sections"]
    (line,) = panel_of(section, "Over the stream")["measures"][0]["lines"]
    # Stages end at t = 2, 4 and 5; before, the untrained model is held.
    assert (line["t"], line["until"], line["untrained"]) == ([0, 2, 4, 5], 5, 1)
    assert line["y"] == pytest.approx([95, 55, 30, 30])
    assert line["deviation"] == pytest.approx([7.07107] * 4)


def test_long_curves_are_decimated_and_the_page_says_so(tmp_path, monkeypatch):
    make_run(tmp_path, [0.9] + [1 / t for t in range(1, 301)], metric="error")
    monkeypatch.setattr(panels, "POINTS", 100)
    (section,) = page_of(tmp_path)["sections"]
    panel = panel_of(section, "Over the stream")
    times = panel["measures"][0]["lines"][0]["t"]
    assert len(times) == 100
    assert times[:2] == [0, 1]
    assert times[-1] == 300
    assert "more than 100 points show 100" in panel["caption"]
    assert set(range(0, 301, 15)) <= set(times)  # those of the page's table


def test_data_sets_metrics_and_lengths_are_sections(tmp_path):
    image_run(tmp_path / "digits", [0.5, 0.4])
    image_run(tmp_path / "mnist", [0.5, 0.4], dataset="mnist")
    image_run(tmp_path / "longer", [0.5, 0.4, 0.3])
    lm_run(tmp_path / "text", [30, 20], stream="books", stream_sha256="a" * 64)
    lm_run(tmp_path / "other", [31, 21], stream="books", stream_sha256="b" * 64)
    titles = [section["title"] for section in page_of(tmp_path)["sections"]]
    assert titles == [
        *("books (aaaaaaaa): test perplexity, B = 2", "books (bbbbbbbb): test perplexity, B = 2"),
        *("digits: test error (%), B = 2", "digits: test error (%), B = 3", "mnist: test error (%), B = 2"),
    ]


def test_the_summary_ranks_finished_configurations(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / f"sm{seed}", [0.5, 0.4 + seed / 10], seed=seed)
        image_run(tmp_path / f"ens{seed}", [0.5, 0.42 + seed / 10], seed=seed, learner="ens")
    image_run(tmp_path / "gmoe", [0.1, 0.1], rows=2, learner="gmoe")
    (section,) = sections.find_sections(find_runs([tmp_path]))
    runs, average, final, front, rest = summary.summarize(section)
    assert runs.startswith("5 runs: 3 configurations of 3 learners (sm, ens, gmoe); 1 to 2 seeds each")
    assert average == (
        "Lowest average error (%): sm w=1, 47.50 ±3.54 over 2 seeds (CER 0.95 ±0.07); "
        "next ens w=1, 48.50 ±3.54 over 2 seeds, within the spread over seeds."
    )
    assert final.startswith("Lowest final error (%): sm w=1, 45.00 ±7.07")
    assert front == "Not dominated in average error (%) and training compute: sm w=1."
    assert rest == "Not finished, so not ranked: gmoe w=1 (t=1/2)."


def test_settings_that_differ_and_provenance(tmp_path):
    image_run(tmp_path / "small", [0.5, 0.4], size=8)
    image_run(tmp_path / "large", [0.5, 0.4], size=16, seed=3)
    (section,) = page_of(tmp_path)["sections"]
    settings = panel_of(section, "Settings")
    assert settings["header"] == ["configuration", "hidden"]
    assert sorted(row[1] for row in settings["rows"]) == ["16", "8"]
    assert settings["facts"]["dataset"] == "digits"
    assert [panel["title"] for panel in section["panels"]] == [
        *("Front", "Over the stream", "Results", "Advice", "Settings", "Provenance"),
    ]
    assert not [each["name"] for each in section["panels"][0]["y"] if "transfer" in each["name"]]
    origin = panel_of(section, "Provenance")
    assert origin["header"][:2] == ["run", "seed"]
    assert {row[0]: row[1] for row in origin["rows"]} == {"small": "0", "large": "3"}
    assert {"python", "machine.cpu", "data"} <= origin["facts"].keys()
    assert origin["facts"]["folder"] == str(tmp_path)


def test_experts_have_a_grid_per_layer(tmp_path):
    with_expert_layers(lm_run(tmp_path, [30, 20], learner="gmoe", experts=[2, 3]))
    (section,) = page_of(tmp_path)["sections"]
    panel = panel_of(section, "Experts over the stages")
    assert [grid["name"] for grid in panel["grids"]] == ["gmoe w=1, layer 1", "gmoe w=1, layer 3"]
    assert panel["grids"][0]["x"] == [0, 1, 2]
    share, loss = panel["grids"][0]["maps"].values()
    assert share[2] == [None, None, pytest.approx(33.3333)]
    assert loss[0] == [2, 3, 4]


def test_text_from_records_is_not_markup(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    make_run(tmp_path / "runs", [90.0, 20.0], learner=EVIL, name="<img src=x>", stream="$data</title>")
    page.write_page(find_runs([tmp_path]), tmp_path / "report.html", [f"no rows yet: {EVIL}"])
    text = (tmp_path / "report.html").read_text()
    assert "onload" in text
    assert "<b onload" not in text
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script") == 4
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    data = json.loads(embedded)
    assert data["sections"][0]["configurations"][0]["learner"] == EVIL
    assert data["sections"][0]["title"].startswith("$data</title>")
    assert data["remarks"] == [f"no rows yet: {EVIL}"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_numbers(tmp_path, bad):
    for seed in (0, 1):
        make_run(tmp_path / f"bad{seed}", [90.0, bad, 20.0], seed=seed)
    make_run(tmp_path / "good", [90.0, 25.0, 21.0], learner="ens")
    (section,) = page_of(tmp_path)["sections"]
    lines = panel_of(section, "Over the stream")["measures"][0]["lines"]
    assert [line["y"] for line in lines] == [[90, None, 20], [90, 25, 21]]
    assert panel_of(section, "Front")["y"][0]["mean"] == [None, 23]
    assert any("average perplexity: ens w=1, 23.00" in line for line in section["summary"])


def test_runs_with_few_rows_mixed_metrics_and_unknown_learners(tmp_path):
    make_run(tmp_path / "untrained", [90.0, 20.0], rows=1)
    make_run(tmp_path / "none", [90.0, 20.0], rows=0, learner="ens")
    make_run(tmp_path / "new", [90.0, 20.0], learner="my_learner")
    make_run(tmp_path / "errors", [0.9, 0.2], metric="error", learner="ff")
    data = page_of(tmp_path, ["no rows yet"])
    assert data["remarks"] == ["no rows yet"]
    assert len(data["sections"]) == 2
    learners = [each["learner"] for each in data["sections"][1]["configurations"]]
    assert learners[-1] == "my_learner"
    assert data["colours"].keys() == {"sm", "ens", "my_learner", "ff"}
    alone = page_of(tmp_path / "untrained")["sections"][0]
    assert "none is ranked" in alone["summary"][1]


def test_two_hundred_runs_fit_in_six_megabytes(tmp_path):
    pytest.importorskip("plotly")
    first = image_run(tmp_path / "0", [1 / (t + 1.7) for t in range(20)], learner="gmoe")
    for i in range(1, 200):
        shutil.copytree(tmp_path / "0", tmp_path / str(i))
        config = first.config | {"seed": i % 2, "hidden": 8 + i // 2}
        with_info(Run.read(tmp_path / str(i)), config=config)
    page.write_page(find_runs([tmp_path]), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6e6


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "b", [90.0, 20.0], rows=0, learner="ens")
    out = tmp_path / "new/report.html"
    done = report(tmp_path, "--html", out)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(out))
    assert f"no rows yet: {tmp_path / 'b'}" in out.read_text()
    done = report(tmp_path, "--html", tmp_path)
    assert done.returncode == 2
    assert "is a folder" in done.stderr


def test_a_missing_plotly_is_one_line(tmp_path, monkeypatch):
    make_run(tmp_path, [90.0, 20.0])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match="pip install plotly"):
        page.write_page(find_runs([tmp_path]), tmp_path / "sub/report.html")
    assert not (tmp_path / "sub").exists()
