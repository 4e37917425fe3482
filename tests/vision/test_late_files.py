"""Files that come late, periods that have changed, and images of another size, after an append."""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from alma.records import Run
from tests.vision.conftest import command, error_of, picture
from tests.vision.test_weeks import arrive
from vision import late, periods
from vision.held_out import mean
from vision.periods import listed
from vision.scenarios import read_periods


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Two weeks that a run was trained on."""
    arrive(tmp_path / "shop", 2, 3)
    monkeypatch.chdir(tmp_path)
    train(monkeypatch)
    return tmp_path / "shop"


def train(monkeypatch, *words):
    forget()
    flags = "--data-root shop --by week --arch mlp --hidden 2 --epochs 1 --no-augment --out run"
    command(monkeypatch, *flags.split(), *words)
    return Run.read("run")


def forget():
    listed.cache_clear()
    read_periods.cache_clear()


def refusal(monkeypatch, capsys):
    forget()
    flags = "--data-root shop --by week --arch mlp --hidden 2 --epochs 1 --no-augment --out run"
    return error_of(monkeypatch, capsys, *flags.split(), "--append")


def late_picture(path, value=0):
    picture(Path(path), np.full((5, 4, 3), value, np.uint8))


def test_late_files_are_counted_and_left_out(shop, monkeypatch, capsys):
    before = Run.read("run").config
    late_picture(shop / "2026-W02/a/late.png")
    late_picture(shop / "2026-W02/new class/late.png", 1)
    arrive(shop, 1)  # a week before the first one
    # copies of images that were there are no late images, in whatever class
    (shop / "2026-W03/c/copy.png").write_bytes((shop / "2026-W02/a/3.png").read_bytes())
    (shop / "2026-W02/b/0copy.png").write_bytes((shop / "2026-W02/a/3.png").read_bytes())
    arrive(shop, 4)
    capsys.readouterr()
    run = train(monkeypatch, "--append")
    said = capsys.readouterr().out
    expected = "late, left out: 20 of 2026-W01, 2 of 2026-W02 (first: shop/2026-W01/a/"
    assert expected in said
    assert run.config["periods"] == ["2026-W02", "2026-W03", "2026-W04"]
    assert run.config["megabatch_sha256"][:2] == before["megabatch_sha256"]
    assert run.rows[-1]["t"] == 3
    late_picture(shop / "2026-W04/c/late.png", 2)  # that week has been used, too
    arrive(shop, 5)
    run = train(monkeypatch, "--append")
    assert "20 of 2026-W01, 2 of 2026-W02, 1 of 2026-W04 (" in capsys.readouterr().out
    assert run.rows[-1]["t"] == 4


def test_files_that_come_before_the_first_training_are_not_late(tmp_path, monkeypatch, capsys):
    arrive(tmp_path / "shop", 2, 3)
    (tmp_path / "shop/2026-W02/a/0.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    assert "cannot read the image" in refusal(monkeypatch, capsys)
    (tmp_path / "shop/2026-W02/a/0.png").unlink()
    late_picture(tmp_path / "shop/2026-W02/a/new.png")
    train(monkeypatch)
    assert "late" not in capsys.readouterr().out


def test_a_change_of_the_past_is_blamed_on_its_period_and_files(shop, monkeypatch, capsys):
    (shop / "2026-W02/a").rename(shop / "2026-W02/alpha")
    line = refusal(monkeypatch, capsys)
    assert "2026-W02 had other images before: images of another class: 10 (first: shop/" in line
    assert "of class a is now of alpha): restore them" in line
    (shop / "2026-W02/alpha").rename(shop / "2026-W02/a")
    (shop / "2026-W03/b/3.png").unlink()
    line = refusal(monkeypatch, capsys)
    assert "2026-W03 had other images before: images that are gone: 1 (first: shop/" in line
    assert "2026-W03/b/3.png" in line


def test_names_of_files_may_have_any_bytes(tmp_path, monkeypatch):
    arrive(tmp_path / "shop", 2, 3)
    old = tmp_path / "shop/2026-W02/a/3.png"
    old.rename(os.fsdecode(bytes(old.parent) + b"/\xff\ttab.png"))
    monkeypatch.chdir(tmp_path)
    train(monkeypatch)
    arrive(tmp_path / "shop", 4)
    late_picture(os.fsdecode(bytes(old.parent) + b"/0\xffnew.png"))
    assert train(monkeypatch, "--append").rows[-1]["t"] == 3


def test_without_a_record_a_backfilled_week_is_named(shop, monkeypatch, capsys):
    (shop.parent / "run/arrived.jsonl").unlink()
    arrive(shop, 1)
    line = refusal(monkeypatch, capsys)
    assert "2026-W01 came after 2026-W03 was used: take its images out" in line


def test_later_images_are_resized_to_the_size_of_the_first_period(shop, monkeypatch, capsys):
    arrive(shop, 4, size=(10, 8))
    arrive(shop, 5, size=(5, 4))
    picture(shop / "2026-W05/a/wide.png", np.zeros((3, 9, 3), np.uint8))
    capsys.readouterr()
    run = train(monkeypatch, "--append")
    lines = capsys.readouterr().out.splitlines()
    resized = [line for line in lines if "resized" in line]
    target = "images resized to 4 x 5 pixels, the size of 2026-W02"
    assert resized == [f"2026-W04: {target}: 20 of 8 x 10", f"2026-W05: {target}: 1 of 9 x 3"]
    assert run.rows[-1]["t"] == 4
    assert run.info["images"]["shape"] == [3, 5, 4]


def test_a_stream_for_a_trainer_leaves_late_files_out(shop, monkeypatch, capsys):
    words = "--data-root shop --by week --write stream".split()
    forget()
    command(monkeypatch, *words)
    late_picture(shop / "2026-W02/a/late.png")
    arrive(shop, 4)
    forget()
    command(monkeypatch, *words, "--append")
    assert "late, left out: 1 of 2026-W02" in capsys.readouterr().out
    assert "late.png" not in (shop.parent / "stream/megabatch_00.jsonl").read_text()


@pytest.mark.parametrize(
    ("newest", "stages"), [(None, [None, 0, 1]), (0, []), (1, [1]), (9, [None, 0, 1])]
)
def test_the_newest_models_alone_are_tested_and_none_with_0(tmp_path, newest, stages):
    rows = [{"stage": stage, "extra": {}} for stage in (None, 0, 1)]
    trained = Mock(rows=rows, rows_as_written=rows, directory=tmp_path)
    assert [untested.stage for untested in late.to_test(trained, 2, newest)] == stages


def test_without_an_image_of_a_known_class_no_answer_is_right():
    assert mean(torch.full((3,), torch.nan)) == 1
    assert mean(torch.tensor([0.0, torch.nan, 1.0])) == 0.5


def test_a_tenth_of_the_images_of_a_period_is_held_out_whole_groups_at_a_time():
    images = []
    for number in range(60):
        images.append({"path": f"{number}", "sha256": f"{number:02d}", "item": number // 3})
    splits = periods._split("2026-W03", images, Mock(group_by="item"), {})
    counts = {name: len(members) for name, members in splits.items()}
    assert counts == {"train": 48, "valid": 6, "test": 6}
