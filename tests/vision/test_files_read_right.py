"""What a folder or a manifest of images says is read as it is said, or named: alpha, unreadable
files, copies, a single class, 0, names of periods."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vision
from alma.errors import UserError
from vision import alpha, decoding, image_files, periods, run
from vision.image_files import ImageSource
from vision.own import OwnStream as Stream

from .conftest import command, error_of

QUICK = {"epochs": 1, "batch_size": 8}
ICON = np.zeros((6, 6), np.uint8)
ICON[1:5, 2:4] = 255


def save(path, picture, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)


def colours(seed, size=(5, 4)):
    pixels = np.random.RandomState(seed).randint(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def tree(tmp_path):
    """Two classes of six images for training and two for tests, all different."""
    for part, numbers in (("train", range(6)), ("test", range(6, 8))):
        for label in "ab":
            for number in numbers:
                seed = 10 * number + (label == "b")
                save(tmp_path / "tree" / part / label / f"{number}.png", colours(seed))
    return tmp_path / "tree"


def with_alpha(kind):
    """An icon whose shape is in its alpha only, black on transparent black."""
    black = np.zeros_like(ICON)
    if kind == "RGBA":
        return Image.fromarray(np.dstack([black, black, black, ICON])), {}
    if kind == "LA":
        return Image.fromarray(np.dstack([black, ICON])), {}
    if kind == "PA":
        picture = Image.new("PA", ICON.shape)
        picture.putalpha(Image.fromarray(ICON))
        return picture, {}
    if kind == "P":
        picture = Image.fromarray((ICON > 0).astype(np.uint8))
        picture.putpalette([0, 0, 0] * 256)
        return picture, {"transparency": 0}
    return Image.fromarray((255 - ICON) // 255), {"transparency": 1}  # L: 1 is transparent


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "L"])
@pytest.mark.parametrize(("background", "level"), [("white", 255), ("#202020", 32)])
def test_alpha_is_composed_on_the_background(tmp_path, kind, background, level):
    picture, options = with_alpha(kind)
    save(tmp_path / "icon.png", picture, **options)
    expected = np.where(ICON > 0, 0, level)[..., None].repeat(3, 2)
    pixels = decoding.read_image(str(tmp_path / "icon.png"), None, background=background)
    np.testing.assert_array_equal(pixels, expected)
    gray = decoding.read_image(str(tmp_path / "icon.png"), None, "L", background)
    np.testing.assert_array_equal(gray, expected[..., 0])
    assert alpha.count([str(tmp_path / "icon.png")]) == 1


def test_alpha_of_a_palette_and_opaque_images():
    picture, _ = with_alpha("PA")
    np.testing.assert_array_equal(np.asarray(alpha.composed(picture))[..., 0], 255 - ICON)
    opaque = colours(0).convert("RGBA")
    assert alpha.composed(opaque) is opaque


@pytest.mark.parametrize(("opacity", "level"), [(0, 255), (1, 254), (128, 127), (254, 1)])
def test_a_veil_is_composed_however_thin(opacity, level):
    """Black glass on white, without a pixel that is fully transparent."""
    glass = Image.new("RGBA", (2, 2), (0, 0, 0, opacity))
    assert np.unique(np.asarray(alpha.composed(glass))).tolist() == [level]


def test_runs_count_alpha_and_deployed_models_compose_it(tree, tmp_path, monkeypatch, capsys):
    """Icons on the same background have the same fingerprint, however they are stored."""
    picture, _ = with_alpha("RGBA")
    save(tree / "train/a/icon.png", picture.resize((4, 5)))
    words = ["--dataset", "folder", "--data-root", tree, "--arch", "mlp", "--hidden", 4]
    words += ["--megabatches", 2, "--epochs", 1, "--background", "black", "--out", tmp_path / "run"]
    command(monkeypatch, *words)
    assert "images with alpha: 1, composed on black (--background)\n" in capsys.readouterr().out
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["images"]["background"] == "black"
    assert "--background black" in record["command"]
    _, data = vision.deployed.load(tmp_path / "run")
    assert data.background == "black"
    monkeypatch.setattr(
        sys, "argv", ["predict", str(tmp_path / "run"), str(tree), "--out", str(tmp_path / "l.csv")]
    )
    from vision import predict

    seen = []
    original = decoding.read_image
    monkeypatch.setattr(
        decoding, "read_image", lambda *words: seen.append(words[3]) or original(*words)
    )
    predict.main()
    assert set(seen) == {"black"}
    assert "images with alpha: 1, composed on black" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset folder --data-root tree --background sky", "--background sky: no colour: give"),
        ("--dataset folder --data-root tree --background #ffffff00", "give a name such as black"),
        ("--background black", "--background needs --dataset folder"),
        ("--skip-unreadable", "--skip-unreadable needs --dataset folder"),
    ],
)
def test_wrong_backgrounds(tree, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tree.parent)
    assert message in error_of(monkeypatch, capsys, *words.split(), "--out", "new")
    assert not Path("new").exists()


def test_all_unreadable_images_are_named_at_once_or_left_out(tree, tmp_path, monkeypatch, capsys):
    broken = [tree / "train/a/broken.png", tree / "train/b/short.jpg", tree / "test/b/x.png"]
    for path in broken:
        path.write_bytes(b"no image")
    words = ["--dataset", "folder", "--data-root", tree, "--arch", "mlp", "--hidden", 4]
    words += ["--megabatches", 2, "--epochs", 1, "--out", tmp_path / "run"]
    message = error_of(monkeypatch, capsys, *words)
    assert message.startswith("error: cannot read 3 images: ")
    assert all(str(path) in message for path in broken)
    assert message.endswith(": --skip-unreadable\n")
    command(monkeypatch, *words, "--skip-unreadable")
    printed = capsys.readouterr().out
    assert "images: 12 for training and 4 for tests" in printed
    assert f"unreadable, left out: 3 (first: {broken[0]}: " in printed
    lines = (tmp_path / "run/unreadable.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["path", *map(str, broken)]
    assert "--skip-unreadable" in json.loads((tmp_path / "run/run.json").read_text())["command"]
    for path in broken:
        path.unlink()
    command(monkeypatch, *words[:-1], tmp_path / "whole")
    rows = [(tmp_path / name / "results.jsonl").read_text() for name in ("run", "whole")]
    values = [[json.loads(line)["value"] for line in text.splitlines()] for text in rows]
    assert values[0] == values[1]


@pytest.fixture
def weeks(tmp_path):
    """Two weeks of ten images in each of two classes."""
    for week in (1, 2):
        for label in "ab":
            for number in range(10):
                place = tmp_path / f"shop/2026-W0{week}" / label / f"{number}.png"
                save(place, colours(100 * week + 10 * number + (label == "b")))
    return tmp_path / "shop"


def test_unreadable_images_by_date(weeks, tmp_path, monkeypatch, capsys):
    broken = [weeks / "2026-W01/a/broken.png", weeks / "2026-W02/b/broken.png"]
    for number, path in enumerate(broken):
        path.write_bytes(b"no image %d" % number)
    words = ["--by", "week", "--data-root", weeks, "--arch", "mlp", "--hidden", 4]
    words += ["--epochs", 1, "--out", tmp_path / "run"]
    message = error_of(monkeypatch, capsys, *words)
    assert "cannot read 2 images: " in message
    assert all(str(path) in message for path in broken)
    command(monkeypatch, *words, "--skip-unreadable")
    assert "unreadable, left out: 2 " in capsys.readouterr().out
    assert len((tmp_path / "run/unreadable.csv").read_text().splitlines()) == 3


def test_all_missing_files_of_a_manifest_are_named(weeks, refused):
    manifest = weeks / "images.csv"
    manifest.write_text("path,label,date\nx.png,a,2026-01-01\ny.png,b,2026-01-01\n")
    source = ImageSource(str(weeks), "week", str(manifest))
    message = refused(periods.listed, source)
    assert "cannot read 2 images (no such file): " in message
    assert "x.png" in message
    assert "y.png" in message


def test_a_single_class_and_a_folder_too_many_are_refused(tree, tmp_path, monkeypatch, capsys):
    words = ["--arch", "mlp", "--hidden", 4, "--megabatches", 2, "--out", tmp_path / "new"]
    deep = tmp_path / "deep"
    for part in ("train", "test"):
        (deep / part).mkdir(parents=True)
        (tree / part).rename(deep / part / "images")
    message = error_of(monkeypatch, capsys, "--dataset", "folder", "--data-root", deep, *words)
    assert f"{deep}/train: one class, images: no learner can be wrong" in message
    assert "(a, b) are no classes: move them up, out of images" in message
    for part in ("train", "test"):  # the remedy
        for label in "ab":
            (deep / part / "images" / label).rename(deep / part / label)
        (deep / part / "images").rmdir()
    command(monkeypatch, "--dataset", "folder", "--data-root", deep, "--epochs", 1, *words)


def test_one_class_of_a_library_and_equal_images_are_refused(tmp_path, refused):
    pixels = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    for images, labels, message in (
        (pixels, torch.zeros(20, dtype=torch.int64), "one class"),
        (pixels[:1].expand(20, -1, -1, -1), torch.arange(20) % 2, "images for training are equal"),
    ):
        stream = Stream.from_dataset((images, labels), megabatches=2)
        assert message in refused(run, stream, "sm", tmp_path / "r", arch="mlp", hidden=4, **QUICK)
    assert not (tmp_path / "r/run.json").exists()


def test_copies_in_two_classes_and_in_both_parts_are_named(tree, tmp_path, monkeypatch, capsys):
    save(tree / "train/b/copy.png", colours(0))  # that of train/a/0.png
    save(tree / "train/a/tested.png", colours(60))  # that of test/a/6.png
    words = ["--dataset", "folder", "--data-root", tree, "--arch", "mlp", "--dry-run"]
    command(monkeypatch, *words, "--megabatches", 2, "--out", tmp_path / "run")
    printed = capsys.readouterr().out
    pair = f"{tree}/train/a/0.png, {tree}/train/b/copy.png"
    assert f"images in two classes: 1 (first: {pair})" in printed
    pair = f"{tree}/test/a/6.png = {tree}/train/a/tested.png"
    assert f"test images that are in train/, too: 1 (first: {pair})" in printed
    for number in range(6):
        for label, other in ("ab", "ba"):
            source = tree / "train" / label / f"{number}.png"
            (tree / "train" / other / f"other{number}.png").write_bytes(source.read_bytes())
    (tree / "train/a/tested.png").unlink()
    assert "every image for training is in two classes" in error_of(
        monkeypatch, capsys, *words, "--megabatches", 2, "--out", tmp_path / "run"
    )


def test_a_copy_in_another_class_of_a_stream_by_date_is_named(weeks):
    same = (weeks / "2026-W01/a/0.png").read_bytes()
    (weeks / "2026-W01/b/same.png").write_bytes(same)
    (weeks / "2026-W02/b/same.png").write_bytes(same)
    _, about = periods.listed(ImageSource(str(weeks), "week"))
    pair = f"{weeks}/2026-W01/a/0.png is a, {weeks}/2026-W01/b/same.png b"
    assert f"images in two classes: 1, the first counts (first: {pair})" in about


def manifest_of(weeks, columns):
    """A manifest of all images; `columns` gives further ones by the number of an image."""
    lines = []
    for number, path in enumerate(sorted(weeks.glob("*/*/*.png"))):
        line = {"path": str(path.relative_to(weeks)), "label": path.parent.name}
        lines.append(json.dumps(line | columns(number)) + "\n")
    (weeks / "images.jsonl").write_text("".join(lines))
    return str(weeks / "images.jsonl")


def test_0_is_a_group_and_a_period(weeks, refused):
    manifest = manifest_of(weeks, lambda number: {"obj": number % 5, "date": number // 20})
    source = ImageSource("data", "folder", manifest, "obj")
    found, _ = periods.listed(source)
    assert [period.name for period in found] == ["0", "1"]
    assert not image_files.is_missing(0.0)
    assert image_files.is_missing(float("nan"))  # of a Parquet file
    groups = {image["obj"] for images in found[0].splits.values() for image in images}
    assert groups == {0, 1, 2, 3, 4}
    none = manifest_of(weeks, lambda number: {"obj": None, "date": 1})
    periods.listed.cache_clear()
    assert "has no obj" in refused(periods.listed, source._replace(manifest=none, by="folder"))


def test_a_period_whose_objects_are_known_says_what_helps(weeks, refused):
    """The second week has objects of the training set of the first."""

    def columns(number):
        week = number // 20
        return {"obj": number if week == 0 else 7, "date": f"2026-W0{1 + week}"}

    source = ImageSource("data", "week", manifest_of(weeks, columns), "obj")
    message = refused(periods.listed, source)
    assert "of which 1 keep the split of an earlier period" in message
    assert "add images of 2 groups that obj has not had before" in message

    def with_new_objects(number):
        line = columns(number)
        return line | {"obj": {25: 100, 26: 101, 27: 102}.get(number, line["obj"])}

    manifest_of(weeks, with_new_objects)  # the remedy
    periods.listed.cache_clear()
    found, _ = periods.listed(source)
    assert all(found[1].splits.values())


def test_misspelt_names_are_named(weeks, refused):
    (weeks / "2026-W02").rename(weeks / "2026-W2")
    source = ImageSource(str(weeks), "week")
    assert f"{weeks}/2026-W2 is no week: rename it to 2026-W02" in refused(periods.listed, source)
    (weeks / "2026-W2").rename(weeks / "2026-W02")  # the remedy
    assert len(periods.listed(source)[0]) == 2
    (weeks / "m.csv").write_text("Path,Label\n1.png,a\n")
    source = source._replace(manifest=str(weeks / "m.csv"))
    assert "the column 'Path' is not path: rename it" in refused(periods.listed, source)


class Editing(nn.Sequential):
    """A network that edits its images."""

    def forward(self, images):
        return super().forward(images.sub_(images.mean()))


def editing(channels, size, classes):
    return Editing(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))


def test_a_metric_and_a_backbone_that_edit_their_arguments_change_no_result(tmp_path):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator)
    data = (pixels, torch.arange(60) % 3)

    def error(predicted, labels):
        return float((predicted != labels).float().mean())

    def edits(predicted, labels):
        value = error(predicted, labels)
        labels.zero_()
        predicted.zero_()
        return value

    rows = []
    for metric in (error, edits):
        stream = Stream.from_dataset(data, megabatches=3)
        stream_labels = stream.dataset.test.labels.clone()
        record = run(stream, "sm", tmp_path / metric.__name__, metric=metric, backbone=editing)
        assert torch.equal(stream.dataset.test.labels, stream_labels)
        rows.append(
            [(row["value"], row["extra"]["scores"][metric.__name__]) for row in record.rows]
        )
        for value, score in rows[-1]:
            assert value == pytest.approx(score, abs=1e-6)
    assert rows[0] == rows[1]


def test_images_keep_their_values_after_an_evaluation():
    from vision.classifiers import Classifier  # noqa: F401  the class that copies
    from vision.examples import Examples
    from vision.learners import LEARNERS, resolve
    from vision.train import evaluate

    settings = resolve("folder", "sm", None, {"arch": "own:editing"}, 1)
    learner = LEARNERS["sm"]((1, 4, 4), 3, settings, 0, torch.device("cpu"), editing)
    images = torch.rand(5, 1, 4, 4)
    before = images.clone()
    evaluate(learner.model, Examples(images, torch.zeros(5, dtype=torch.int64)))
    assert torch.equal(images, before)


def test_dates_as_datetimes_moments_and_tensors_with_gradients(refused):
    from datetime import UTC, date, datetime

    pixels = torch.rand(12, 1, 4, 4, requires_grad=True)
    labels = torch.arange(12) % 2
    for kind in (date, datetime):
        dates = [kind(2024, 1 + number // 6, 1) for number in range(12)]
        stream = Stream.from_dataset((pixels, labels), dates=dates)
        assert [len(part) for part in stream.parts] == [4, 4]
    moments = [datetime(2024, 1, 1 + number, tzinfo=UTC) for number in range(12)]
    message = refused(Stream.from_dataset, (pixels, labels), dates=moments)
    assert "dates give 12 periods, the smallest of 1 images" in message
    months = [moment.strftime("%Y-%m") for moment in moments]  # the remedy
    assert len(Stream.from_dataset((pixels, labels), dates=months)) == 1


def test_transparent_palettes_are_refused_from_python(refused):
    picture = with_alpha("P")[0]
    picture.info["transparency"] = 0
    pictures = [(picture, number % 2) for number in range(12)]
    message = refused(Stream.from_dataset, pictures, megabatches=2)
    assert "image of mode P with transparency: give image.convert('RGBA')" in message
    remedied = [(image.convert("RGBA"), label) for image, label in pictures]
    assert Stream.from_dataset(remedied, megabatches=2).dataset.shape[0] == 4


def test_modules_of_the_documentation_are_there():
    code = "import vision; vision.deployed.load, vision.data.Images"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(UserError):
        vision.deployed.load("nowhere")
