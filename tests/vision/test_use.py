"""A trained model in use: predictions of files, and exports."""

import csv
import importlib.util
import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch

from alma.__main__ import main
from alma.records import Run
from tests.vision.conftest import picture, python
from tests.vision.test_torchvision import ARCH, pictures
from vision import MegaBatchStream, data, deployed, run
from vision.data import make_dataset

QUICK = {"epochs": 2, "batch_size": 8, "augment": False, "device": "cpu"}


def alma(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["alma", *map(str, words)])
    main()


def refusal(monkeypatch, capsys, *words):
    with pytest.raises(SystemExit) as stop:
        alma(monkeypatch, *words)
    assert stop.value.code == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning")
    ]
    return line


@pytest.fixture(scope="module")
def gray(tmp_path_factory):
    """Test images of digits as colour files, and a folder with a run of `gens` on digits,
    with all stages."""
    place = tmp_path_factory.mktemp("digits")
    dataset = data.load("digits")
    for i, image in enumerate(dataset.test.images[:300]):  # more than a batch
        picture(place / f"files/{i:03}.png", image.expand(3, -1, -1).permute(1, 2, 0).numpy())
    run(
        MegaBatchStream("digits", 5),
        "gens",
        place / "run",
        waiting_time=2,
        hidden=8,
        save_stages=True,
        **QUICK,
    )
    return place, dataset


@pytest.mark.parametrize("t", [2, 3, 5, None])
def test_predictions_of_files_are_those_of_the_run_after_mega_batch_t(
    gray, tmp_path, monkeypatch, t
):
    place, dataset = gray
    out = tmp_path / "new/labels.csv"
    alma(
        monkeypatch,
        "predict",
        place / "run",
        place / "files",
        "--out",
        out,
        *(["--t", t] if t else []),
    )
    rows = list(csv.DictReader(out.open()))
    assert [row["path"] for row in rows] == [str(place / f"files/{i:03}.png") for i in range(300)]
    learner, like = deployed.load(place / "run", t)
    examples = like.examples(dataset.test)
    judged = learner.judged(learner.deployed, examples)
    assert [int(row["label"]) for row in rows] == judged[-1, :300].tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(
        judged[:-1, :300].amax(0).exp().tolist(), abs=1e-5
    )
    recorded = {row["t"]: row["value"] for row in Run.read(place / "run").rows}
    assert (judged[-1] != examples.labels).double().mean() == recorded[t or 5]


def test_a_folders_run_names_classes_and_prepares_files_of_any_size(
    tree, tmp_path, monkeypatch, capsys
):
    size = f"--dataset folder --data-root {tree} --image-size 4 --resize-size 5 --megabatches 2"
    options = (
        f"{size} --arch mlp --hidden 8 --epochs 30 --lr 0.02 --no-augment --out {tmp_path}/run"
    )
    alma(monkeypatch, "images", *options.split())
    for i, colour in enumerate(([9, 100, 1], [9, 0, 1])):  # of a dog and a cat
        picture(tmp_path / f"new/{i}.png", np.full((31, 17, 3), colour, np.uint8))
    (tmp_path / "new/2.png").write_text("no image")
    (tmp_path / "new/list.txt").touch()
    capsys.readouterr()
    alma(
        monkeypatch, "predict", tmp_path / "run", tmp_path / "new", "--out", tmp_path / "labels.csv"
    )
    printed = capsys.readouterr()
    assert "images: 3; unreadable: 1; files left out: 1 .txt" in printed.out
    assert f"cannot read the image {tmp_path}/new/2.png" in printed.err
    rows = list(csv.reader((tmp_path / "labels.csv").open()))
    assert [row[1] for row in rows] == ["label", "dog", "cat", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run files --t 1", "--t 1: the run has models after mega-batches 2 to 5"),
        ("run files --t 6", "2 to 5"),
        ("run nowhere", "nowhere"),
        ("run run", "no images in"),
        ("files files", "is not a run directory"),
        ("run files --out files/000.png", "--out files/000.png is a folder or an image"),
        ("run bad.png", "none of 1 images is readable"),
        ("lost files", "has no stage_000.pt"),
        ("half files", "1 of 3 stages are complete"),
        ("old files", "run it again, which trains nothing"),
    ],
)
def test_a_model_or_images_that_are_not_there_are_one_line(
    gray, tmp_path, monkeypatch, capsys, words, message
):
    place, _ = gray
    for name in ("run", "files"):
        (tmp_path / name).symlink_to(place / name)
    (tmp_path / "bad.png").touch()
    info = json.loads((place / "run/run.json").read_text())
    for name in ("lost", "half", "old"):
        (tmp_path / name).mkdir()
        settings = {key: value for key, value in info.items() if (name, key) != ("old", "images")}
        (tmp_path / name / "run.json").write_text(json.dumps(settings))
    torch.save({"done": 1}, tmp_path / "half/checkpoint.pt")
    monkeypatch.chdir(tmp_path)
    arguments = ["--t", 3] if words.startswith("lost") else []
    arguments += [] if "--out" in words else ["--out", "labels.csv"]
    assert message in refusal(monkeypatch, capsys, "predict", *words.split(), *arguments)
    assert not (tmp_path / "labels.csv").exists()


def test_a_complete_run_of_an_older_version_learns_its_preparation_without_training(tmp_path):
    options = {"out": tmp_path, "hidden": 4, **QUICK}
    run(MegaBatchStream("digits", 2), **options)
    file = tmp_path / "run.json"
    rows = (tmp_path / "results.jsonl").read_bytes()
    info = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in info.items() if key != "images"}))
    run(MegaBatchStream("digits", 2), **options)
    assert json.loads(file.read_text()) == info
    assert (tmp_path / "results.jsonl").read_bytes() == rows


def stream_for(arch):
    if ":" in arch:
        return pictures()
    images = torch.randint(0, 256, (24, 1, 8, 8)).to(torch.uint8)
    labels = torch.arange(24) % 3
    return MegaBatchStream(make_dataset("mine", (images, labels), (images, labels)), 2)


FAST = [("mlp", "sm"), ("mlp", "umix"), ("vgg", "ens"), (ARCH, "sm")]
SLOW = [
    case for case in product(("mlp", "vgg", ARCH), ("sm", "ens", "umix")) if case not in FAST[:-1]
]


@pytest.mark.parametrize(
    ("arch", "learner", "onnx"),
    [(*case, ":" not in case[0]) for case in FAST]
    + [pytest.param(*case, True, marks=pytest.mark.slow) for case in SLOW],
)
def test_an_export_has_the_probabilities_of_the_run(tmp_path, monkeypatch, arch, learner, onnx):
    """Those of loader.py, which does not know ALMA, and of onnxruntime, if it is here."""
    stream = stream_for(arch)
    options = {"umix_average": "sum"} if (arch, learner) == ("mlp", "umix") else {}
    options |= {"members": 2} if learner != "sm" else {"average": "poly:2"}
    options |= {"lr": 1e-4} if ":" in arch else {"hidden": 4}
    run(stream, learner, tmp_path / "run", arch=arch, **options, **QUICK)
    onnx = onnx and all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
    (tmp_path / "out/.filled-x").mkdir(parents=True)  # of a killed export
    (tmp_path / "out/model.onnx").touch()  # of another model
    written = {"model.safetensors", "config.json", "loader.py"}
    flags = []
    if onnx:
        flags.append("--onnx")
        written.add("model.onnx")
    alma(monkeypatch, "export", tmp_path / "run", "--out", tmp_path / "out", *flags)
    trained, like = deployed.load(tmp_path / "run")
    images = stream.dataset.test.images
    expected = trained.judged(trained.deployed, like.examples(stream.dataset.test))[:-1].exp().t()
    code = (tmp_path / "out/loader.py").read_text()
    assert "alma" not in code.replace("without ALMA", "")
    assert "vision" not in code.replace("torchvision", "")
    loaded = {}
    exec(code, loaded)
    torch.testing.assert_close(
        loaded["load"](tmp_path / "out")(images), expected, atol=1e-5, rtol=0
    )
    assert {file.name for file in (tmp_path / "out").iterdir()} == written
    if onnx:
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
        (outputs,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), expected, atol=1e-4, rtol=0)


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(gray, tmp_path):
    place, _ = gray
    (tmp_path / "fairseq.py").write_text("raise SystemExit('fairseq is imported')")
    with pytest.raises(subprocess.CalledProcessError) as done:
        python("-m", "alma", "export", place / "run", "--out", tmp_path / "out", folder=tmp_path)
    assert done.value.returncode == 2
    assert done.value.stderr.startswith("error: gens cannot be exported: sm, ens and umix can")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--tokenizer", "--weights"])
def test_options_of_language_models_are_refused(gray, tmp_path, monkeypatch, capsys, option):
    place, _ = gray
    words = ("export", place / "run", "--out", tmp_path / "out", option, "trained")
    assert f"run: {option} is for" in refusal(monkeypatch, capsys, *words)
