"""Images that arrive over time: periods and their splits, appends, new classes,
the stream for a trainer."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vision.conftest import equal, numbers, picture
from vision import folder, run
from vision.image_files import ImageSource
from vision.periods import listed
from vision.scenarios import read_periods
from vision.stage_trainer import StageTrainer

WEEKS = {1: "ab", 2: "ab", 3: "abc", 4: "bc", 5: "abcd", 6: "abcd"}
FAST = {"arch": "mlp", "hidden": 4, "epochs": 3, "batch_size": 8, "augment": False}
FAST["optimizer"] = "adadelta"


def arrive(root, *weeks, size=(5, 4)):
    """Ten pictures of each class that a week has, without two that are equal."""
    for week in weeks:
        for name in WEEKS[week]:
            for i in range(10):
                random = np.random.RandomState([week, ord(name), i])
                pixels = random.randint(0, 256, (*size, 3), np.uint8)
                picture(Path(root, f"2026-W{week:02}", name, f"{i}.png"), pixels)


def found(root=None, by="week", **others):
    listed.cache_clear()
    return listed(ImageSource(str(root), by, **others))[0]


def files_of(periods):
    """(split, file) of each image."""
    splits = [split for period in periods for split in period.splits.items()]
    return [(name, file) for name, files in splits for file in files]


def stream(root, cache=None):
    read_periods.cache_clear()
    listed.cache_clear()
    return read_periods(ImageSource(str(root), "week"), None, cache and str(cache))


def play(root, out, learner="sm", **options):
    return run(stream(root), learner, out, **FAST | options)


@pytest.fixture
def shop(tmp_path):
    arrive(tmp_path / "shop", 1, 2, 3, 4)
    return tmp_path / "shop"


# Periods and splits


def test_periods_have_classes_in_order_of_appearance_and_splits_of_a_tenth(shop):
    periods = found(shop)
    assert [period.name for period in periods] == ["2026-W01", "2026-W02", "2026-W03", "2026-W04"]
    assert [period.new_classes for period in periods] == [["a", "b"], [], ["c"], []]
    sizes = [[len(x) for x in period.splits.values()] for period in periods[:3:2]]
    assert sizes == [[16, 2, 2], [24, 3, 3]]
    weeks = stream(shop)
    train = weeks.dataset.train
    test = weeks.dataset.test
    for t, period in enumerate(periods, start=1):
        images = [train.images.index_select(0, torch.from_numpy(part)) for part in weeks.split(t)]
        images.append(test.images.index_select(0, torch.from_numpy(weeks.held_out[t - 1])))
        for pixels, (name, files) in zip(images, period.splits.items(), strict=True):
            read = [np.asarray(Image.open(file["path"])).transpose(2, 0, 1) for file in files]
            assert np.array_equal(pixels.numpy(), read), name
    assert train.labels[weeks.parts[2]].tolist() == [
        "abc".index(x["label"]) for name in ("train", "valid") for x in periods[2].splits[name]
    ]


def manifest(root, suffix, columns=lambda path: {}):
    """A manifest of the pictures in `root`, with a name of the week as date."""
    paths = sorted(root.rglob("*.png"))
    rows = [
        {"path": str(p.relative_to(root)), "label": p.parts[-2], "date": p.parts[-3], **columns(p)}
        for p in paths
    ]
    file = root / f"images.{suffix}"
    if suffix == "csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_manifest_gives_the_periods_of_folders(shop, suffix):
    by_folder = [period.sha256 for period in found(shop)]
    assert [period.sha256 for period in found(manifest=manifest(shop, suffix))] == by_folder
    assert [period.sha256 for period in found(shop, by="folder")] == by_folder


def test_exif_dates_and_the_natural_order_of_folders(shop, tmp_path):
    for week in (9, 10):
        for i in range(5):
            exif = Image.Exif()
            exif[0x8769] = {0x9003: f"2026:{week:02}:1{i} 12:00:00"}
            image = Image.fromarray(np.full((4, 4, 3), 10 * week + i, np.uint8))
            for path in (
                tmp_path / "exif/a" / f"{week}{i}.jpg",
                tmp_path / f"n/day {week}/a/{i}.jpg",
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path, exif=exif)
    assert [period.name for period in found(tmp_path / "exif", "month")] == ["2026-09", "2026-10"]
    (tmp_path / "n/day 9").rename(tmp_path / "n/day ")
    assert [period.name for period in found(tmp_path / "n", "folder")] == ["day ", "day 10"]


def test_the_first_copy_stays_and_is_counted(shop):
    before = found(shop)
    for place in ("2026-W04/b/copy.png", "2026-W01/a/copy.png", "2026-W01/b/copy.png"):
        (shop / place).write_bytes((shop / "2026-W02/a/3.png").read_bytes())
    after = found(shop)
    assert [period.copies for period in after] == [1, 1, 0, 1]
    assert after[3].sha256 == before[3].sha256
    assert max(Counter(file["sha256"] for _, file in files_of(after)).values()) == 1
    summary = "W01: 21 images (17 train, 2 valid, 2 test); 2 classes (2 new: a, b); copies left out"
    assert f"{summary}: 1" in str(after[0])


def test_a_group_is_in_one_split_of_all_periods_and_the_manifest_may_say_which(shop):
    def more(path):
        """Pairs of a class show one object; three of five are seen again in the next week."""
        week = int(path.parts[-3][-2:])
        pair = int(path.stem) // 2
        group = f"{path.parts[-2]}{(pair + 2 * week) % 12}"
        return {"object": group, "split": "train" if group == forced else ""}

    forced = ""
    before = found(manifest=manifest(shop, "csv", more), group_by="object")
    places = {(file["object"], name) for name, file in files_of(before)}
    assert len(places) == len({group for group, _ in places}) > 20
    forced = next(group for group, name in sorted(places) if name == "test")
    after = found(manifest=manifest(shop, "csv", more), group_by="object")
    assert {name for name, file in files_of(after) if file["object"] == forced} == {"train"}


BAD = [
    (lambda shop: (shop / "2026-W02").rename(shop / "extra"), {}, "20 unreadable (first:"),
    (lambda shop: (shop / "2026-W02").rename(shop / "2026"), {}, "20 imprecise (first:"),
    (
        lambda shop: [x.unlink() for x in (shop / "2026-W02").rglob("[1-9].png")],
        {},
        "of 2 in 2 groups",
    ),
    (
        lambda shop: shop.rename(shop.with_name("moved")),
        {},
        "shop: unreadable (No such file or directory)",
    ),
    (lambda shop: None, {"group_by": "object"}, "has no object"),
    (
        lambda shop: (shop / "m.csv").write_text("path,date\na.png,2026\n"),
        {"manifest": "m.csv"},
        "image 1 has no label",
    ),
    (
        lambda shop: (shop / "m.jsonl").write_text("[]\n"),
        {"manifest": "m.jsonl"},
        "cannot read --manifest",
    ),
    (
        lambda shop: manifest(shop, "csv", lambda p: {"split": "dev"}),
        {"manifest": "images.csv"},
        "image 1 has a split that is none of train",
    ),
    (
        lambda shop: manifest(
            shop, "csv", lambda p: {"o": 1, "split": ("test", "train")[p.stem > "5"]}
        ),
        {"manifest": "images.csv", "group_by": "o"},
        "8.png is in train, its group (o 1) in test",
    ),
]


@pytest.mark.parametrize(("change", "options", "message"), BAD)
def test_what_is_no_stream_is_one_line(shop, monkeypatch, refused, change, options, message):
    change(shop)
    read_periods.cache_clear()
    listed.cache_clear()
    source = ImageSource(**{"root": str(shop), "by": "week", **options})
    if source.manifest:
        source = source._replace(manifest=str(shop / source.manifest))
    assert message in refused(read_periods, source, None)


# Appends


def of_the_past(played):
    """Of each row what depends neither on the test set nor on periods to come."""
    rows = []
    for row in numbers(played):
        extra = row["extra"] | {"test_flops": 0, "raw": dict(row["extra"].get("raw", ()), error=0)}
        for place, name in ((extra, "matrix"), (extra, "matrix_periods"), (extra["raw"], "matrix")):
            place[name] = place.get(name, [])[: row["t"]]
        rows.append(row | {"value": 0, "extra": extra})
    return rows


LEARNERS = {
    "sm": {"average": "poly:2", "replay_share": 0.5},
    "ens": {"members": 2},
    "umix": {"members": 2, "average": 0.5},
    "gens": {},
    "gmoe": {"router": "flat", "average": "poly:2"},
    "ff": {"replay": True},
    "torchvision": {"arch": "torchvision:squeezenet1_1", "epochs": 1},
}


SLOW = dict.fromkeys(LEARNERS, ()) | {"torchvision": pytest.mark.slow}


@pytest.mark.parametrize("learner", [pytest.param(name, marks=SLOW[name]) for name in LEARNERS])
def test_an_append_equals_a_stream_made_at_once_whatever_is_killed(
    shop, tmp_path, monkeypatch, learner
):
    options = LEARNERS[learner] | {"save_stages": True}
    if learner == "torchvision":
        arrive(shop, 1, 2, 3, 4, size=(40, 40))
        options["hidden"] = None
    name = {"torchvision": "sm"}.get(learner, learner)
    chosen = {key: value for key, value in (FAST | options).items() if value is not None}
    first = run(stream(shop), name, tmp_path / "run", **chosen)
    before = first.results.read_bytes()
    parts = stream(shop)
    arrive(shop, 5, 6, size=(40, 40) if learner == "torchvision" else (5, 4))
    grown = stream(shop)
    assert equal(
        map(torch.from_numpy, parts.parts + parts.held_out),
        map(torch.from_numpy, grown.parts[:4] + grown.held_out[:4]),
    )
    with monkeypatch.context() as patch:
        epochs = iter(range(100))

        def killed(trainer, progress):
            trainer.save(progress())
            if next(epochs) == 1:
                raise KeyboardInterrupt

        patch.setattr(StageTrainer, "epoch_done", killed)
        with pytest.raises(KeyboardInterrupt):
            run(grown, name, tmp_path / "run", append=True, **chosen)
    again = run(grown, name, tmp_path / "run", **chosen)
    assert again.results.read_bytes().startswith(before)
    whole = run(grown, name, tmp_path / "whole", **chosen)
    assert of_the_past(again) == of_the_past(whole)
    lengths = [len(row["extra"]["matrix"]) for row in again.rows_as_written]
    assert lengths == [4] * 5 + [6] * 2
    sizes = [len(part) for part in grown.held_out[:4]]  # the test set of the first command
    for row in again.rows:
        assert np.average(row["extra"]["matrix"][:4], weights=sizes) == pytest.approx(row["value"])
    assert again.rows[-1]["extra"]["matrix_periods"] == [f"2026-W0{week}" for week in range(1, 7)]
    models = [
        torch.load(tmp_path / place / "stage_005.pt", weights_only=True)["model"]
        for place in ("run", "whole")
    ]
    assert equal(*models)


def test_waiting_rows_after_an_append_have_the_new_period_and_a_cut_stage_is_refused(
    shop, tmp_path, refused
):
    play(shop, tmp_path / "run", "gens", waiting_time=2)
    arrive(shop, 5)
    assert "2026-W05: give --append" in refused(
        play, shop, tmp_path / "run", "gens", waiting_time=2
    )
    played = play(shop, tmp_path / "run", "gens", waiting_time=2, append=True)
    assert [len(row["extra"]["matrix"]) for row in played.rows_as_written] == [4] * 5 + [5]
    arrive(shop, 6)
    line = refused(play, shop, tmp_path / "run", "gens", waiting_time=2, append=True)
    assert "stage 2 was trained when the stream ended with mega-batch 5; now it would wait" in line


def test_a_short_last_stage_that_was_killed_does_not_go_on_with_other_data(
    shop, tmp_path, monkeypatch, refused
):
    with monkeypatch.context() as patch:
        seen = iter(range(100))

        def killed(trainer, progress):
            if next(seen) == 4:
                trainer.save(progress())
                raise KeyboardInterrupt

        patch.setattr(StageTrainer, "epoch_done", killed)
        with pytest.raises(KeyboardInterrupt):
            play(shop, tmp_path / "run", waiting_time=3)
    arrive(shop, 5)
    line = refused(play, shop, tmp_path / "run", waiting_time=3, append=True)
    assert "stage 1 was trained when the stream ended with mega-batch 4" in line


def test_a_model_that_waits_is_tested_on_the_periods_that_have_arrived(shop, tmp_path):
    for week in (3, 4):
        for path in (shop / f"2026-W0{week}").rglob("*.png"):
            path.unlink()
    short = play(shop, tmp_path / "run", "gens", waiting_time=2).rows_as_written
    arrive(shop, 3, 4, 5, 6)
    played = play(shop, tmp_path / "run", "gens", waiting_time=2, append=True)
    assert played.rows_as_written[:3] == short
    whole = play(shop, tmp_path / "whole", "gens", waiting_time=2)
    assert played.rows_as_written[3]["extra"]["matrix"] == whole.rows[3]["extra"]["matrix"]
    assert played.rows[3]["value"] == played.rows[2]["value"]


@pytest.mark.parametrize("change", ["image", "label", "late", "lost"])
def test_a_past_that_has_changed_is_one_line(shop, tmp_path, refused, change):
    play(shop, tmp_path / "run")
    rows = (tmp_path / "run/results.jsonl").read_bytes()
    source = shop / "2026-W02/a/3.png"
    if change == "image":
        picture(source, np.zeros((5, 4, 3), np.uint8))
    elif change == "label":
        source.rename(shop / "2026-W02/b/30.png")
    elif change == "late":
        picture(shop / "2026-W02/a/30.png", np.zeros((5, 4, 3), np.uint8))
    else:
        (shop / "2026-W02").rename(shop.with_name("lost"))
    message = "images of 2026-W02 are gone" if change == "lost" else "2026-W02 had other images"
    assert message in refused(play, shop, tmp_path / "run", append=True)
    assert (tmp_path / "run/results.jsonl").read_bytes() == rows


def test_an_append_decodes_the_new_period_only(shop, tmp_path, monkeypatch):
    plain = stream(shop, tmp_path / "cache").dataset.train
    arrive(shop, 5)
    read = []
    decoded = folder._decoded
    monkeypatch.setattr(
        folder, "_decoded", lambda paths, *args: read.extend(paths) or decoded(paths, *args)
    )
    again = stream(shop, tmp_path / "cache").dataset.train
    assert {Path(path).parts[-3] for path in read} == {"2026-W05"}
    first = torch.arange(len(plain.labels))
    assert torch.equal(plain.images.index_select(0, first), again.images.index_select(0, first))


# New classes


def test_images_of_a_class_to_come_are_errors_or_do_not_count(shop, tmp_path, refused):
    counted = play(shop, tmp_path / "all", classes="all").rows
    skipped = play(shop, tmp_path / "known", classes="known").rows
    for j, period in enumerate(found(shop)):
        labels = [x["label"] for x in period.splits["test"]]
        for row, without in zip(counted, skipped, strict=True):
            share = labels.count("c") / len(labels) if row["t"] < 3 else 0
            expected = share + (1 - share) * without["extra"]["matrix"][j]
            assert row["extra"]["matrix"][j] == pytest.approx(expected)
    pairs = zip(counted, skipped, strict=True)
    assert [row["value"] > without["value"] for row, without in pairs] == [
        True,
        True,
        True,
        False,
        False,
    ]
    sizes = [row["parameters"] for row in counted]
    assert [size - sizes[0] for size in sizes] == [
        0,
        0,
        0,
        5,
        5,
    ]  # an output of 4 weights and a bias
    line = refused(play, shop, tmp_path / "new", "gens", gens_average="logits")
    assert "--gens-average logits: earlier members have none of c" in line
    assert not (tmp_path / "new").exists()
