"""Streams, networks, metrics and callbacks of one's own, from Python."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from tests.vision.conftest import equal, numbers
from vision import MegaBatchStream, Stream, deployed, run
from vision.copies import check_stream
from vision.data import make_dataset

PIXELS = torch.randint(0, 256, (40, 3, 6, 5), generator=torch.Generator().manual_seed(0)).to(
    torch.uint8
)
LABELS = torch.arange(40) % 4
DATES = np.array(["2024-02", "2024-01", "2023-12", "2024-03"])[np.arange(40) // 10]
QUICK = {"epochs": 2, "batch_size": 8, "augment": False, "device": "cpu"}


class Pictures(torch.utils.data.Dataset):
    """As a data set of torchvision: Pillow images, and names of the classes."""

    classes = ("a", "b", "c", "d")

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, i):
        return Image.fromarray(PIXELS[i].permute(1, 2, 0).numpy()), int(LABELS[i])


@pytest.mark.parametrize(
    "pixels",
    [
        TensorDataset(PIXELS, LABELS),
        TensorDataset(PIXELS / 255, LABELS),
        Pictures(),
        (PIXELS.numpy(), LABELS.numpy()),
        (PIXELS.permute(0, 2, 3, 1), LABELS.tolist()),
        (PIXELS.numpy().transpose(0, 2, 3, 1) / 255, LABELS),
    ],
    ids=["bytes", "floats", "pillow", "arrays", "channels last", "floats, channels last"],
)
def test_images_of_all_kinds_make_the_same_stream(pixels):
    stream = Stream.from_dataset(pixels, test=(PIXELS[:9], LABELS[:9]), megabatches=4)
    streamed, expected = (
        sorted(zip(map(bytes, images.numpy()), map(int, labels), strict=True))
        for images, labels in (stream.dataset.train, (PIXELS, LABELS))
    )
    assert streamed == expected
    assert equal(stream.dataset.test, (PIXELS[:9], LABELS[:9]))
    assert list(stream.dataset.names) == list(getattr(pixels, "classes", []))
    assert (len(stream), stream.dataset.name) == (4, "mine")


def test_each_period_is_a_mega_batch_with_a_test_set_of_its_own():
    stream = Stream.from_dataset((PIXELS, LABELS), dates=DATES)
    periods = [DATES[10], DATES[0], DATES[30]]
    assert sorted({*DATES}) == ["2023-12", *sorted(periods)]
    train = stream.dataset.train.images.numpy()
    test = stream.dataset.test.images.numpy()
    for t, period in enumerate(sorted({*DATES})):
        mine = [*map(bytes, train[stream.parts[t]]), *map(bytes, test[stream.held_out[t]])]
        assert sorted(mine) == sorted(map(bytes, PIXELS.numpy()[period == DATES]))
        assert len(stream.held_out[t]) == 3
    weeks = np.array(["2026-W10", "2026-W02", "2025-W52", "2026-W11"])[np.arange(40) // 10]
    assert list(map(list, Stream.from_dataset((PIXELS, LABELS), dates=weeks).parts)) == list(
        map(list, stream.parts)
    )
    other_stream = Stream.from_dataset((PIXELS, LABELS), dates=DATES, seed=1)
    assert (other_stream.partition, other_stream.dataset.fingerprint) == (
        stream.partition,
        stream.dataset.fingerprint,
    )


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        ((PIXELS / 127, LABELS), {}, "to 2: give uint8, or floats from 0 to 1"),
        ((PIXELS.long(), LABELS), {}, "mine has an image int64"),
        ((PIXELS[:, 0, 0], LABELS), {}, "mine has an image uint8 (5,)"),
        (
            ([PIXELS[0], PIXELS[0, :, 1:]], [0, 1]),
            {},
            "sizes, such as (3, 5, 5) and (3, 6, 5)",
        ),
        ((PIXELS, LABELS[1:]), {}, "give images, each with a label"),
        ((PIXELS, LABELS / 2), {}, "whole numbers >= 0"),
        ((PIXELS, ["a"] * 40), {}, "<U1"),
        (TensorDataset(PIXELS), {}, "give images, each with a label"),
        ((PIXELS[:0], LABELS[:0]), {}, "give images, each with a label"),
        ({"images": PIXELS, "labels": LABELS}, {}, "give images, each with a label"),
        ((PIXELS, LABELS), {"dates": [[2024], 2025] * 20}, "give the period of each of 40 images"),
        ((PIXELS, LABELS), {"dates": DATES[1:]}, "give the period of each of 40 images"),
        ((PIXELS, LABELS), {"dates": [None] * 40}, "give the period of each of 40 images"),
        ((PIXELS, LABELS), {"dates": ["2024-9"] * 20 + ["2024-10"] * 20}, "or '2024-03'"),
        ((PIXELS, LABELS), {"dates": np.arange(40) // 39}, "2 periods, the smallest of 1 images"),
        ((PIXELS, LABELS), {"dates": DATES, "megabatches": 2}, "give megabatches, or dates"),
        ((PIXELS, LABELS), {"test": (PIXELS[..., 1:], LABELS)}, "give one size"),
    ],
)
def test_other_images_and_dates_are_one_line(refused, images, options, message):
    assert message in refused(Stream.from_dataset, images, **options)


def test_classes_without_images_have_their_outputs(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(Pictures, "classes", [*"abcdef"])
    run(
        Stream.from_dataset(Pictures(), megabatches=2),
        "sm",
        tmp_path,
        arch="mlp",
        hidden=4,
        **QUICK,
    )
    learner, data = deployed.load(tmp_path)
    assert (learner.classes, data.names) == (6, [*"abcdef"])
    monkeypatch.setattr(Pictures, "classes", [*"abc"])
    assert "3 names in its `classes`, and labels up to 3" in refused(
        Stream.from_dataset, Pictures()
    )


def test_a_palette_becomes_its_colours():
    pictures = [Image.fromarray(image.numpy().transpose(1, 2, 0)) for image in PIXELS // 128 * 255]
    few = [picture.convert("P", palette=Image.Palette.WEB) for picture in pictures]
    streams = [Stream.from_dataset((images, LABELS), megabatches=2) for images in (pictures, few)]
    assert equal(*(stream.dataset.train for stream in streams))


def tiny(channels, size, classes):
    flat = 4 * size[0] * size[1]
    layers = (
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(flat, classes),
    )
    return nn.Sequential(*layers)


def worst_class_error(predicted, labels):
    return max(float((predicted[labels == c] != c).float().mean()) for c in labels.unique())


@pytest.mark.parametrize("learner", ["sm", "ens", "umix", "gens"])
def test_a_network_of_ones_own_trains_resumes_and_predicts(tmp_path, learner):
    stream = Stream.from_dataset((PIXELS, LABELS), dates=DATES)
    called = []
    options = {"backbone": tiny, "metric": worst_class_error, **QUICK}
    options |= {"members": 2} if learner in ("ens", "umix") else {}

    def stop(stage, trained):
        called.append(stage.last)
        if called == [1, 2, 3]:
            raise KeyboardInterrupt

    whole = run(stream, learner, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(stream, learner, tmp_path / "stopped", after_stage=stop, save_interval=0.0, **options)
    record = run(stream, learner, tmp_path / "stopped", after_stage=stop, **options)
    assert called == [1, 2, 3, 3, 4]
    assert numbers(record) == numbers(whole)
    config = whole.config
    assert (config["arch"], config["metric"]) == ("own:tiny", "worst_class_error")
    assert "hidden" not in config
    trained, data = deployed.load(tmp_path / "whole", backbone=tiny)
    predicted = trained.judged(trained.deployed, data.examples(stream.dataset.test))[-1]
    last = whole.rows[-1]
    assert last["value"] == float((predicted != stream.dataset.test.labels).double().mean())
    assert last["extra"]["scores"] == {
        "worst_class_error": worst_class_error(predicted, stream.dataset.test.labels)
    }
    forward = 2 * 3 * 4 * 9 * 30 + 2 * 120 * 4
    assert last["extra"]["flops"]["forward"] == len(stream.split(4)[0]) * 2 * forward * options.get(
        "members", 1
    )


def frozen():
    return nn.Sequential(nn.Flatten(), nn.Linear(90, 8).requires_grad_(False), nn.Linear(8, 4))


ONE = nn.Sequential(nn.Flatten(), nn.Linear(90, 4))


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        ("gmoe", {"backbone": tiny}, "a model of yours neither grows nor has experts"),
        ("sm", {"backbone": tiny, "arch": "vgg"}, "give arch, or a backbone of your own"),
        ("sm", {"backbone": tiny, "hidden": 4}, "own:tiny has sizes of its own"),
        ("sm", {"arch": "own:tiny"}, "give arch, or a backbone of your own"),
        ("sm", {"backbone": lambda *_: nn.Linear(3, 4)}, "does not take images of 6 x 5 pixels"),
        (
            "sm",
            {"backbone": lambda c, s, n: nn.Sequential(nn.Flatten(), nn.Linear(90, n + 1))},
            "gives (2, 5)",
        ),
        ("sm", {"backbone": ONE}, "give a function"),
        ("ens", {"backbone": lambda *_: ONE}, "the same network twice"),
        ("sm", {"backbone": lambda *_: frozen()}, "1.weight, 1.bias get no gradient"),
    ],
)
def test_a_network_that_does_not_fit_starts_nothing(tmp_path, refused, learner, options, message):
    stream = Stream.from_dataset((PIXELS, LABELS), megabatches=2)
    assert message in refused(run, stream, learner, tmp_path / "run", **options, **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_is_no_number_is_one_line(tmp_path, refused):
    stream = Stream.from_dataset((PIXELS, LABELS), megabatches=2)
    for answer in (np.nan, None):
        options = {"metric": lambda *_, answer=answer: answer, "arch": "mlp"} | QUICK
        assert f"<lambda> is {answer}" in refused(run, stream, "sm", tmp_path, **options)


def test_another_network_or_metric_is_another_run(tmp_path, refused):
    stream = Stream.from_dataset((PIXELS, LABELS), megabatches=2)
    run(stream, "sm", tmp_path, backbone=tiny, **QUICK)

    def other(channels, size, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(90, classes))

    other.__name__ = "tiny"
    assert "other settings (backbone" in refused(
        run, stream, "sm", tmp_path, backbone=other, **QUICK
    )
    assert "metric" in refused(
        run, stream, "sm", tmp_path, backbone=tiny, metric=worst_class_error, **QUICK
    )
    assert "backbone of its own, own:tiny" in refused(deployed.load, tmp_path)


def test_equal_images_are_refused_only_if_all_are(refused):
    """Also if the one that differs is the last of many."""
    images = np.zeros((65, 4, 4), np.uint8)
    labels = np.arange(65) % 2
    fault = "all 65 images for training are equal"
    assert fault in refused(
        check_stream, MegaBatchStream(make_dataset("x", (images, labels), (images, labels)), 2)
    )
    images[64] = 9
    check_stream(MegaBatchStream(make_dataset("x", (images, labels), (images, labels)), 2))
