"""Reports and advice on a stream that grows: the newest held-out part first, holes, evidence."""

import csv
import json
import math
from unittest import mock

import numpy as np
import pytest

from alma.records import Run
from alma.report import age_table, drift, front, newest, newest_figure, page
from alma.report.advice.advice import advise
from alma.report.periods import holes, span_of_test_set
from alma.report.results import find_runs, find_sections, group
from slurm.lm.record import summary
from vision.run import summarise

from .growing import grown_run, periods, whole_run
from .synthetic import call_advise, drifting, edited, error_of, image_run, lm_run, report

B = 14  # two periods, then twelve appends


def cells(make, seed=0):
    """Losses that rise with age, with noise: errors, or perplexities."""
    noise = np.random.default_rng(seed).normal(0, 0.004, (B + 1, B + 1))

    def cell(t, j):
        if not t:
            return 0.9 if make is image_run else 5e4
        loss = 0.1 + 0.03 * max(0, j - t) + 0.01 * max(0, t - j) + abs(float(noise[t, j]))
        return loss if make is image_run else 30 * math.exp(loss)

    return cell


@pytest.fixture(params=[image_run, lm_run], ids=["images", "text"])
def both(request, tmp_path):
    """The folders of the runs on a stream made in one go, and grown by twelve appends."""
    make = request.param
    for seed in (0, 1):
        whole_run(tmp_path / f"whole/{seed}", make, cells(make, seed), B, seed)
        grown_run(tmp_path / f"grown/{seed}", make, cells(make, seed), B, seed=seed)
    return tmp_path / "whole", tmp_path / "grown"


def results_in(place):
    (results,) = group(find_runs([place]))
    return results


def test_twelve_appends_give_the_same_tables_and_advice_as_one_go(both):
    whole, grown = map(results_in, both)
    aged = [age_table.titled(age_table.aged(results)) for results in (whole, grown)]
    assert aged[0] == aged[1]
    rows = [newest.titled(results).cells for results in (whole, grown)]
    assert [row[:-1] for row in rows[0]] == [row[:-1] for row in rows[1]]  # but for the test set
    assert rows[0][0][-1] == "test: 2024-01 to 2025-02"
    assert rows[1][0][-1] == "test: 2024-01 to 2024-02"
    assert drift.mean_matrix(whole[0]) == drift.mean_matrix(grown[0])
    records = []
    for place in both:
        done = call_advise(place, "--price", "0.1", "--out", place.parent / f"{place.name}_advice")
        records.append(done.record)
    assert records[0]["retraining"] == records[1]["retraining"]
    assert records[0]["retraining"]["plan"]["evidence"] is True
    assert records[0]["newest"]["part"] == records[1]["newest"]["part"] == "2025-02"
    one, other = (record["newest"]["configurations"][0]["models"] for record in records)
    assert one == other
    assert holes(whole) == holes(grown) == []


def test_a_record_that_starved_says_how_many_cells_it_has_and_what_adds_them(tmp_path):
    """M1: only the first model was ever tested on a later period."""
    run = grown_run(tmp_path / "run", image_run, cells(image_run), 7, late=False)
    done = call_advise(tmp_path / "run", "--price", "400/1000", "--out", tmp_path / "advice")
    assert done.returncode == 0
    assert "No answer: 1 of 21 cells of age above 0 of sm w=1 were tested" in done.stdout
    assert f"`alma test {run.directory}` tests its earlier models" in done.stdout
    assert "Retrain " not in done.stdout
    assert done.record["retraining"] is None
    shortage = done.record["no_retraining"]
    assert (shortage["cells_of_age_above_0"], shortage["possible"]) == (1, 21)
    assert (shortage["needed"], shortage["remedy"]) == (3, f"alma test {run.directory}")
    said = report(tmp_path / "run").stdout
    assert "sm w=1: 1 of the 3 cells of age above 0 that staleness takes: no evidence." in said
    brief = call_advise(tmp_path / "run", "--price", "400/1000", "--brief").stdout
    assert "# How often to retrain?" in brief
    assert "No answer yet: 1 of 21 tests of a model on later data were made" in brief
    assert f"`alma test {run.directory}` makes the missing tests" in brief


def test_cells_of_one_model_alone_are_too_few(tmp_path):
    """Without its period none is left, however many there are."""
    grown_run(tmp_path, image_run, cells(image_run), 7, late=lambda stage, part: stage == 0)
    said = call_advise(tmp_path, "--every", "1,4").stdout
    assert "No answer: 6 of 21 cells" in said


def test_a_young_stream_asks_for_more_periods(tmp_path):
    whole_run(tmp_path, image_run, cells(image_run), 2)
    said = call_advise(tmp_path).stdout
    assert "No answer: 1 of 1 cells of age above 0" in said
    assert "each further mega-batch adds some" in said
    assert "alma test" not in said


def new_class(t, j):
    """A class appears in period 4, of which models know nothing before; .2 of it stays wrong."""
    if not t:
        return 0.9
    if j < 4:
        return 0.0
    return 0.2 if t >= 4 else 0.6


@pytest.fixture
def with_new_class(tmp_path):
    """Two learners, whose test set has the first two of five periods; ens knows the new class."""
    test = [0.0] * 5
    for seed in (0, 1):
        grown_run(tmp_path / f"sm{seed}", image_run, new_class, 5, seed=seed, test=test)

        def better(t, j, shift=seed / 100):
            return new_class(t, j) * (0.5 + shift)

        slightly_worse = [0.01] * 5
        place = tmp_path / f"ens{seed}"
        grown_run(place, image_run, better, 5, seed=seed, test=slightly_worse, learner="ens")
    return tmp_path


def test_a_new_class_shows_beside_a_test_set_that_lacks_it(with_new_class):
    """M8: CER 0.00 while a fifth of the newest period is wrong."""
    said = report(with_new_class).stdout
    title, header, *rows = said.splitlines()[:4]
    assert title == "Test error (%) on 2024-05, the newest held-out part, digits, B = 5"
    assert header.endswith("oldest tested  test: 2024-01 to 2024-02")
    (of_sm,) = (row for row in rows if row.startswith("sm "))
    assert "20.00 ±0.00 (2024-05)  20.00 ±0.00 (2024-04)  60.00 ±0.00 (2024-01)" in of_sm
    assert of_sm.endswith(" 0.00 ±0.00")
    assert "digits, B = 5; test: 2024-01 to 2024-02\nThe test set has 2024-01 to 2024-02" in said
    assert "average and CER do not count later ones, such as 2024-05, nor classes" in said
    assert (
        "eq. 1 of the paper's final version; earlier versions start at t = 0), on the test" in said
    )


def test_advice_compares_on_the_newest_part(with_new_class):
    """By the test set sm would win, with 0.00%."""
    done = call_advise(with_new_class, "--out", with_new_class / "advice")
    assert "Use ens w=1: lowest expected mean error (%) at t=6 on 2024-05, " in done.stdout
    assert done.stdout.index("the newest held-out part") < done.stdout.index("Choice by")
    assert done.record["choice"] == "ens w=1"
    of_ens, of_sm = done.record["newest"]["configurations"]
    if of_ens["label"] == "sm w=1":
        of_ens, of_sm = of_sm, of_ens
    assert of_sm["models"][-1] == {"until": "2024-05", "value": 0.2}
    assert (of_sm["test"], of_sm["test_periods"]) == (0, 2)
    brief = call_advise(with_new_class, "--brief").stdout
    assert "On the test set, which has none of 2024-05, the newest model has 1% error" in brief
    (results,) = group(find_runs([with_new_class]))
    assert "on 2024-05,\nthe newest held-out part" in front.front(results).axes[0].get_ylabel()
    assert "2024-05, the newest held-out part" in front.caption(results)


def test_earlier_advice_is_about_the_part_that_was_newest_then(with_new_class):
    said = call_advise(with_new_class, "--from", 4).stdout
    assert "Test error (%) on 2024-04, the newest held-out part" in said
    assert "(2024-05)" not in said


def test_a_stream_in_one_go_keeps_its_test_set_and_tells_what_is_better_on_new_data(tmp_path):
    for learner, newest_error, test in (("sm", 0.3, 0.1), ("ens", 0.2, 0.2)):
        for seed in (0, 1):
            place = tmp_path / f"{learner}{seed}"
            noise = np.random.default_rng(seed).normal(0, 0.001, 7)

            def cell(t, j, base=newest_error, e=noise):
                return base + float(e[t]) if t else 0.9

            values = [test + 0.001 * seed + 0.01 / t for t in range(1, 7)]
            whole_run(place, image_run, cell, 6, seed, values, learner=learner)
    said = call_advise(tmp_path).stdout
    assert "Use sm w=1: lowest expected mean error (%) at t=7 on the test set of 2024-01 to" in said
    assert "On 2024-06, the newest held-out part, the newest model of ens w=1 is better" in said


def test_a_model_that_was_tested_on_what_arrived_before_any_training(tmp_path):
    """`alma test`: the stream has a seventh period, on which no stage has trained."""
    run = whole_run(tmp_path / "run", image_run, cells(image_run), 7)
    lines = run.results.read_text().splitlines(keepends=True)[:-1]
    run.results.write_text("".join(lines))

    def shorter(row):
        for name in ("matrix", "matrix_periods"):
            row["extra"][name] = row["extra"][name][:6]

    values = {row["stage"]: row["extra"]["matrix"][6] for row in Run.read(run.directory).rows}
    edited(Run.read(run.directory), shorter)
    tested = Run.read(run.directory)
    tested.writable = True
    for stage, value in values.items():
        line = {"stage": stage, "megabatch": 7, "period": "2024-07", "value": value}
        tested.append_evaluations([line])
    said = report(tmp_path).stdout
    assert "on 2024-07, the newest held-out part" in said
    assert "(2024-06)" in said
    assert "(2024-07)" not in said
    (result,) = results_in(tmp_path)
    section = find_sections(find_runs([tmp_path]))[0]
    assert advise(section).retraining.losses.periods[-1] == 7
    assert span_of_test_set(result).count == 7


def test_holes_are_empty_counted_and_named(tmp_path):
    """Stage 0 was not tested on period 5, nor stage 1 on period 6."""
    place = tmp_path / "run"
    grown_run(
        place,
        image_run,
        cells(image_run),
        6,
        late=lambda stage, part: (stage, part) not in ((0, 5), (1, 6)),
    )
    done = report(tmp_path / "run", "--out", tmp_path / "out", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    line = f"not tested: 2 of 36 cells of the evaluation matrix of sm w=1: `alma test {place}`"
    assert line in done.stdout
    assert "not tested: 2 of 36 cells" in (tmp_path / "out/report.md").read_text()
    html = (tmp_path / "page.html").read_text()
    assert "not tested: 2 of 36 cells" in html
    assert "Empty cells: the model was not tested there." in html
    with open(tmp_path / "out/report.csv") as file:
        rows = {row["t"]: row for row in csv.DictReader(file)}
    assert (rows["1"]["extra.matrix.5"], rows["2"]["extra.matrix.6"]) == ("", "")
    assert rows["1"]["extra.matrix.6"]
    assert rows["2"]["extra.matrix.5"]
    assert "nan" not in (tmp_path / "out/report.csv").read_text()
    said = call_advise(place).stdout
    assert line in said
    assert "nan" not in said.lower()


def test_a_model_that_was_not_tested_on_the_newest_part_is_named(tmp_path):
    grown_run(
        tmp_path, image_run, cells(image_run), 6, late=lambda stage, part: stage in (None, 0, 1, 2)
    )
    assert "not tested (2024-05)" in report(tmp_path).stdout


def test_an_error_of_0_on_the_newest_part_is_no_half(tmp_path):
    """With one tested model, all of whose errors there are 0, the forecast was 44%."""

    def cell(t, j):
        return 0.9 if not t else 0.02 * (j < 5)

    for seed in (0, 1):
        grown_run(tmp_path / f"{seed}", image_run, cell, 5, late=False, seed=seed)
    section = find_sections(find_runs([tmp_path]))[0]
    assert advise(section).choice.expected < 0.02


def test_an_older_record_has_no_more_periods_in_its_test_set_than_its_first_row(tmp_path):
    run = grown_run(tmp_path, lm_run, cells(lm_run), 5)
    info = {name: fact for name, fact in run.info.items() if name != "test_periods"}
    (tmp_path / "run.json").write_text(json.dumps(info))
    (result,) = results_in(tmp_path)
    assert (span_of_test_set(result).count, span_of_test_set(result).text) == (
        2,
        "2024-01 to 2024-02",
    )


def test_streams_without_periods_stay_as_they_are(tmp_path):
    drifting(image_run(tmp_path, [0.5, 0.4, 0.3]), lambda t, j: 0.5)
    assert newest.titled(results_in(tmp_path)) is None
    assert newest_figure.figure(results_in(tmp_path)) is None
    assert "held-out part, digits" not in report(tmp_path).stdout


def test_the_page_begins_with_the_newest_part(with_new_class):
    written = page.body(find_runs([with_new_class]))
    assert written.index("2024-05, the newest held-out part") < written.index('alt="newest"')
    assert written.index('alt="newest"') < written.index('alt="front"')
    assert "The test set has 2024-01 to 2024-02, the first 2 of 5 periods" in written


def test_the_figure_has_a_point_per_tested_model(with_new_class):
    (results,) = group(find_runs([with_new_class]))
    figure, caption = newest_figure.figure(results)
    lines = {line.get_color(): line for line in figure.axes[0].lines}
    assert [len(line.get_xdata()) for line in lines.values()] == [5, 5]
    assert figure.axes[0].get_ylabel() or figure.get_supylabel()
    assert "Test error on 2024-05, the newest held-out part" in caption
    figure.canvas.draw()
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert ticks == periods(5)


def test_price_and_cadence_still_need_a_stream_that_drifts(tmp_path):
    image_run(tmp_path, [0.5, 0.4, 0.3])
    assert "for a stream that drifts" in error_of(call_advise(tmp_path, "--price", "1"))


def test_the_tables_after_a_training_have_the_newest_part_too(with_new_class, tmp_path, capsys):
    """Those of `alma images` and `alma train`."""
    with mock.patch("alma.report.figures.write_figures", return_value=[]):
        summarise([with_new_class], with_new_class)
    said = capsys.readouterr().out
    assert said.startswith("Test error (%) on 2024-05, the newest held-out part")
    assert "The test set has 2024-01 to 2024-02, the first 2 of 5 periods" in said
    run = grown_run(tmp_path / "text", lm_run, cells(lm_run), 4, late=lambda stage, _: stage != 0)
    header, *rows = summary(Run.read(run.directory)).splitlines()
    assert header.split()[-4:] == ["on", "2024-04", "TFLOPs", "seconds"]
    last = f"{run.rows[-1]['extra']['matrix'][-1]:,.2f}"
    assert rows[-1].split()[-3] == last
    assert len(rows[1].split()) == len(rows[2].split()) - 1  # stage 0 was not tested there
