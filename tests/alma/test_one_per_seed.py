"""A run counts once in everything that reads records:
copies, one seed in several folders, seeds that run."""

import os
import shutil

import pytest

from alma.errors import UserError
from alma.report import figures
from alma.report.advice.__main__ import main as advise_main
from alma.report.advice.advice import advise
from alma.report.advice.candidates import one_section
from alma.report.page import tables
from alma.report.results import Section, find_runs, group, left_out
from alma.report.vision import select
from vision.run import summarise

from .synthetic import (
    averaged,
    by_learner,
    edited,
    entries_of,
    error_of,
    image_run,
    law,
    lm_run,
    report,
    results_of,
    run_here,
    with_info,
)


def two_learners(place, seeds=(0, 1)):
    for seed in seeds:
        for learner, level, members in (("sm", 0.65, {}), ("ens", 0.5, {"members": 5})):
            values = law(level, 0.4, 0.02, 0.02, len(learner) + 9 * seed, count=8)
            image_run(place / f"{learner}{seed}", values, seed=seed, learner=learner, **members)


def with_copies(place):
    """Of the first seed two copies, one of them of an earlier time."""
    for learner in ("sm", "ens"):
        shutil.copytree(place / f"{learner}0", place / f"{learner}0_again")
        early = shutil.copytree(place / f"{learner}0", place / f"early/{learner}") / "results.jsonl"
        early.write_text("".join(early.read_text().splitlines(keepends=True)[:3]))


def lines_of(place):
    """The lines about runs that do not count, with paths in the folder."""
    lines = [line for results in group(find_runs([place])) for line in left_out(results)]
    return sorted(line.replace(f"{place}/", "") for line in lines)


def test_copies_change_no_number_of_any_reader(tmp_path):
    """One seed: there is no evidence, however often its folder was copied."""
    runs, page, out = (tmp_path / name for name in ("runs", "page.html", "out"))
    two_learners(runs, seeds=[0])

    def read():
        """The numbers that each reader shows, and its whole text."""
        done = report(runs, "--baseline", "sm", "--figures", "vision", "--html", page, "--out", out)
        advice = run_here(advise_main, [runs]).stdout
        assert "no evidence either way" in advice
        texts = [done.stdout, advice, page.read_text(), (out / "report.md").read_text()]
        (results,) = group(find_runs([runs]))
        shown = [table.cells for table in tables(Section("", results), results[0])]
        return texts, [
            shown,
            (out / "report.csv").read_text(),
            *(t.split("left out")[0] for t in texts[:2]),
        ]

    texts, before = read()
    with_copies(runs)
    lines = [
        *(f"early/{name}, a copy of {runs}/{name}0, which counts" for name in ("ens", "sm")),
        *(f"{name}0_again, a copy of {runs}/{name}0, which counts" for name in ("ens", "sm")),
    ]
    texts, after = read()
    for one, other in zip(before, after, strict=True):
        assert other in (one, one[: len(other)])
    for text in texts:
        assert [text.replace("\\", "").count(f"left out: {runs}/{line}") for line in lines] == [
            1
        ] * 4


def test_of_one_seed_with_two_results_the_longer_run_counts_and_then_the_first(tmp_path):
    image_run(tmp_path / "a", [0.5, 0.4, 0.3], rows=3)
    image_run(tmp_path / "b", [0.6, 0.5, 0.2])
    image_run(tmp_path / "c", [0.5, 0.4, 0.3])
    image_run(tmp_path / "d", [0.5, 0.4, 0.3], seed=1)
    (row,) = by_learner(tmp_path).values()
    assert (row["n"], row["t=3"]) == ("2", "25.00 ±7.07")
    remark = "the same settings and seed but other numbers than b, which counts"
    assert lines_of(tmp_path) == [f"left out: a, {remark}", f"left out: c, {remark}"]


def test_a_seed_that_has_started_does_not_cut_finished_ones(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / f"{seed}", [0.5, 0.4, 0.3 + seed / 10, 0.2], seed=seed)
    image_run(tmp_path / "2", [0.5, 0.4, 0.3, 0.2], seed=2, rows=2)
    row = by_learner(tmp_path)["sm"]
    assert (row["n"], row["t=3"], row["t=4"]) == ("2", "35.00 ±7.07", "20.00 ±0.00")
    assert [result.method for result in results_of(tmp_path)] == ["sm"]
    assert lines_of(tmp_path) == ["left out: 2, at t=1 of 4, beside finished seeds"]
    done = report(tmp_path, "--figures", "vision", "--out", tmp_path / "out")
    assert done.stdout.count(f"{tmp_path / '2'}, at t=1 of 4") == 1
    assert "left out of the figures" not in done.stdout  # it is named once


def test_the_table_of_a_sweep_names_what_does_not_count(tmp_path, monkeypatch, capsys):
    image_run(tmp_path / "0", [0.5, 0.4])
    image_run(tmp_path / "1", [0.5, 0.4], seed=1, rows=2)
    monkeypatch.setattr(figures, "write_figures", lambda *_: [])
    summarise([tmp_path], tmp_path)
    assert (
        f"left out: {tmp_path / '1'}, at t=1 of 2, beside finished seeds\n"
        in capsys.readouterr().out
    )


def test_a_text_run_of_fewer_stages_has_finished_what_was_asked_for(tmp_path):
    for seed, stages, rows in ((0, 1, 3), (1, 1, 3), (2, 2, 2)):
        run = lm_run(tmp_path / f"{seed}", [5e4, 30.0, 30, 20], w=2, rows=rows, seed=seed)
        with_info(run, stages=stages)
    (entry,) = entries_of(tmp_path)
    assert (entry.result.progress, [run.config["seed"] for run in entry.result.runs]) == (2, [0, 1])
    with_info(lm_run(tmp_path / "3", [5e4, 30.0, 30, 20], w=2, seed=3), stages=2)
    (entry,) = entries_of(tmp_path)
    assert (entry.result.progress, [run.config["seed"] for run in entry.result.runs]) == (4, [3])


def test_advice_of_an_earlier_time_has_the_seeds_that_had_come_so_far(tmp_path):
    two_learners(tmp_path)
    image_run(
        tmp_path / "late", law(0.5, 0.4, 0.02, count=8), seed=2, learner="ens", members=5, rows=5
    )
    for now, seeds in ((3, [0, 1, 2]), (4, [0, 1, 2]), (5, [0, 1])):
        advice = advise(one_section(find_runs([tmp_path]), now), now)
        seeds_of = {candidate.label: candidate.seeds for candidate in advice.candidates}
        assert seeds_of["ens w=1"] == seeds
        done = run_here(advise_main, [tmp_path, "--from", now])
        assert ("beside finished seeds" in done.stdout) == (now > 4)


def test_raw_weights_of_a_finished_run_stay_beside_one_that_has_started(tmp_path):
    averaged(image_run(tmp_path / "average", [0.5, 0.3], average=0.9), 0.5)
    image_run(tmp_path / "plain", [0.5, 0.4], rows=2)
    rows = by_learner(tmp_path)
    assert (rows["sm"]["t=2"], rows["sm, average"]["t=2"]) == ("30.00", "15.00")
    assert lines_of(tmp_path) == ["left out: plain, a copy of average, which counts"]
    done, remarks = select.finished(find_runs([tmp_path]))
    assert len(done) == 2
    assert len(remarks) == 1


def test_an_average_and_its_raw_weights_share_a_line(tmp_path):
    """Raw weights that each of two averages has, of one training, need no line."""
    for name, average, rows in (("a", 0.9, 3), ("b", 0.7, 3), ("c", 0.9, 3), ("d", 0.9, 2)):
        run = image_run(
            tmp_path / name, [0.5, 0.3], seed=int(name == "d"), average=average, rows=rows
        )
        averaged(run, 0.5)
    lines = [
        "left out: c, a copy of a, which counts",
        "left out: d, at t=1 of 2, beside finished seeds",
    ]
    assert lines_of(tmp_path) == lines
    assert {name: row["n"] for name, row in by_learner(tmp_path).items()} == dict.fromkeys(
        ("sm", "sm, average 0.9", "sm, average 0.7"), "1"
    )


def test_linked_folders_count_once_and_links_in_a_circle_end(tmp_path):
    image_run(tmp_path / "far/sm", [0.5, 0.4])
    image_run(tmp_path / "runs/ens", [0.5, 0.4], learner="ens")
    (tmp_path / "runs/sm").symlink_to(tmp_path / "far/sm")
    (tmp_path / "runs/x").symlink_to(tmp_path / "far")
    (tmp_path / "far/sm/circle").symlink_to(tmp_path / "runs")
    for places in (["runs"], ["runs", "runs/sm", "far"], ["far"]):
        runs = find_runs(tmp_path / place for place in places)
        assert sorted(run.config["learner"] for run in runs) == ["ens", "sm"]
    assert [run.directory for run in find_runs([tmp_path / "runs"])] == [
        tmp_path / "runs/ens",
        tmp_path / "runs/sm",
    ]
    (tmp_path / "none").mkdir()
    (tmp_path / "none/circle").symlink_to(tmp_path / "none")
    assert "no runs in" in error_of(report(tmp_path / "none"))


def test_a_copy_does_not_change_a_choice_by_validation(tmp_path):
    """Seeds of the first have 40 and 20%: with two copies of the worse one it would not be
    chosen."""
    for name, hidden, seed, valid in (("a", 8, 0, 0.4), ("b", 8, 1, 0.2), ("c", 16, 0, 0.32)):
        run = image_run(tmp_path / name, [0.5, 0.4], hidden=hidden, seed=seed)
        edited(run, lambda row, v=valid: row["extra"].update(valid={"error": v}))
    for again in ("a2", "a3"):
        shutil.copytree(tmp_path / "a", tmp_path / again)
    output = report(tmp_path, "--select", "valid-first").stdout
    assert "hidden=8 (30.00); left out: hidden=16 (32.00)" in output
    assert output.count("a copy of") == 2


def test_an_unreadable_folder_is_no_run_less(tmp_path, monkeypatch):
    image_run(tmp_path / "sm", [0.6, 0.5, 0.2])
    scan = os.scandir

    def scandir(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="locked: unreadable .Permission denied"):
        find_runs([tmp_path])
