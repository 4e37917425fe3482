"""Streams to and from Continuum and Avalanche: the real libraries if installed, and stand-ins."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vision import MegaBatchStream, adapters
from vision.data import Images, make_dataset

RNG = np.random.RandomState


def small_stream(channels: int = 3) -> MegaBatchStream:
    """47 random training images in 4 mega-batches, 9 test images."""
    images, labels = RNG(0).randint(0, 256, (56, channels, 6, 5)), RNG(1).randint(0, 4, 56)
    both = Images(torch.from_numpy(images).byte(), torch.from_numpy(labels))
    train, test = (Images(both.images[part], both.labels[part]) for part in (slice(47), slice(47, None)))
    return MegaBatchStream(make_dataset("folder", train, test), 4, seed=5)


def contents(images: Images) -> list[tuple[bytes, int]]:
    """Images with their labels, sorted."""
    pairs = zip(images.images, images.labels.tolist(), strict=True)
    return sorted((image.numpy().tobytes(), label) for image, label in pairs)


def assert_same_stream(found: MegaBatchStream, stream: MegaBatchStream, parts=None) -> None:
    """The same images and labels in each mega-batch and in the test set, with the same statistics."""
    assert len(found) == len(stream)
    for indices, expected in zip(found.parts, parts or stream.parts, strict=True):
        assert contents(found.images(indices)) == contents(stream.images(expected))
    assert torch.equal(found.dataset.test.images, stream.dataset.test.images)
    assert torch.equal(found.dataset.test.labels, stream.dataset.test.labels)
    assert found.dataset.shape == stream.dataset.shape
    assert found.dataset.classes == stream.dataset.classes
    if parts is None:
        assert found.dataset.mean == pytest.approx(stream.dataset.mean)
        assert found.dataset.std == pytest.approx(stream.dataset.std)


def training_parts(stream: MegaBatchStream) -> list[np.ndarray]:
    return [stream.split(t)[0] for t in range(1, len(stream) + 1)]


class FakeTaskSet:
    """Continuum's TaskSet, as far as it is documented."""

    def __init__(
        self, x, y, t=None, trsf=None, target_trsf=None, data_type="IMAGE_ARRAY", bounding_boxes=None
    ):
        self.raw = x, y, np.zeros(len(y)) if t is None else t
        self.trsf, self.target_trsf, self.bounding_boxes = trsf, target_trsf, bounding_boxes
        self.data_type = SimpleNamespace(name=data_type)

    def get_raw_samples(self, indexes=None):
        assert indexes is None
        return self.raw


class FakeExperience:
    """An Avalanche experience: a data set whose current transformations can be removed."""

    def __init__(self, pairs, transform=lambda x: 1 / 0):
        self.pairs, self.transform = pairs, transform

    @property
    def dataset(self):
        return self

    def remove_current_transform_group(self):
        return type(self)(self.pairs, lambda x: x)

    def __iter__(self):
        return ((self.transform(x), y, 0) for x, y in self.pairs)


def benchmark(train, test) -> SimpleNamespace:
    return SimpleNamespace(
        train_stream=list(map(FakeExperience, train)), test_stream=list(map(FakeExperience, test))
    )


@pytest.fixture
def fake_continuum(monkeypatch):
    monkeypatch.setitem(sys.modules, "continuum.tasks", SimpleNamespace(TaskSet=FakeTaskSet))


# Stand-ins for Continuum


def images(*shape: int) -> np.ndarray:
    return RNG(sum(shape)).randint(0, 256, shape).astype(np.uint8)


LABELS = np.arange(6) % 3


@pytest.mark.parametrize("channels", [1, 3])
def test_to_continuum_and_back(fake_continuum, channels):
    stream = small_stream(channels)
    tasks = adapters.to_continuum(stream, "all")
    assert_same_stream(adapters.from_continuum(tasks, adapters.to_continuum(stream, "test"), seed=1), stream)
    [test] = adapters.to_continuum(stream, "test")
    assert_same_stream(adapters.from_continuum(iter(tasks), test), stream)


def test_parts_of_tasks(fake_continuum, refused):
    stream = small_stream()
    for part in ("train", "valid"):
        tasks = adapters.to_continuum(stream, part)
        for t, (task, megabatch) in enumerate(zip(tasks, stream, strict=True)):
            x, y, task_labels = task.raw
            assert x.dtype == np.uint8
            assert np.array_equal(x.transpose(0, 3, 1, 2), getattr(megabatch, part).images)
            assert np.array_equal(y, getattr(megabatch, part).labels)
            assert task_labels.tolist() == [t] * len(y)
    assert "train, valid, all, test" in refused(adapters.to_continuum, stream, "both")


def test_tasks_do_not_share_memory_with_the_stream(fake_continuum):
    stream = small_stream()
    before = stream.dataset.fingerprint
    for part in adapters.PARTS:
        for task in adapters.to_continuum(stream, part):
            task.raw[1][:] = 0  # Continuum's class mappings write to the labels
            assert not np.shares_memory(task.raw[1], stream.dataset.test.labels.numpy())
    assert stream.dataset.fingerprint == before


@pytest.mark.parametrize(
    ("x", "kind", "expected"),
    [
        (images(6, 5, 4, 3), "IMAGE_ARRAY", images(6, 5, 4, 3).transpose(0, 3, 1, 2)),
        (images(6, 5, 4, 1), "IMAGE_ARRAY", images(6, 5, 4, 1).transpose(0, 3, 1, 2)),
        (images(6, 5, 4), "IMAGE_ARRAY", images(6, 5, 4)[:, None]),
        (images(6, 3, 5, 4), "TENSOR", images(6, 3, 5, 4)),
        (torch.from_numpy(images(6, 3, 5, 4)).float() / 255, "TENSOR", images(6, 3, 5, 4)),
        (images(6, 5, 4, 3) / 255, "IMAGE_ARRAY", images(6, 5, 4, 3).transpose(0, 3, 1, 2)),
        (images(6, 5, 4, 3).astype(np.int64), "IMAGE_ARRAY", images(6, 5, 4, 3).transpose(0, 3, 1, 2)),
    ],
)
def test_layouts_and_types(x, kind, expected):
    task = FakeTaskSet(x, LABELS, data_type=kind)
    found = adapters.from_continuum([task], task)
    assert found.dataset.test.images.dtype == torch.uint8
    assert np.array_equal(found.dataset.test.images, expected)
    assert found.dataset.test.labels.tolist() == LABELS.tolist()


def test_floats_are_rounded():
    x = np.array([0, 0.4, 0.6, 254.4, 254.6, 255]).reshape(6, 1, 1) / 255
    task = FakeTaskSet(x, LABELS)
    found = adapters.from_continuum([task], task)
    assert found.dataset.test.images.flatten().tolist() == [0, 0, 1, 254, 255, 255]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (FakeTaskSet(images(6, 5, 4, 3) - 100.0, LABELS), "not normalised"),
        (FakeTaskSet(images(6, 5, 4, 3) * 1.0, LABELS), "not normalised"),
        (FakeTaskSet(np.full((6, 5, 4, 3), np.nan), LABELS), "not normalised"),
        (FakeTaskSet(images(6, 5, 4, 3).astype(int) * 2, LABELS), "pixels from 0 to"),
        (FakeTaskSet(images(6, 5, 4, 2), LABELS), "1 or 3 channels"),
        (FakeTaskSet(images(6, 20), LABELS), "shape (6, 20)"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS[:5]), "labels of shape (5,)"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS - 1), "from 0"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS / 2), "type float64"),
        (FakeTaskSet(np.array(["a.png"] * 6), LABELS, data_type="IMAGE_PATH"), "type IMAGE_PATH"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS, target_trsf=int), "target_trsf"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS, bounding_boxes=[0]), "bounding_boxes"),
        (FakeTaskSet(images(6, 5, 4, 3), LABELS, trsf=Image.Image()), "Image would be lost"),
    ],
)
def test_unsupported_task_sets_are_refused(task, words, refused):
    assert words in refused(adapters.from_continuum, [task], task)


def test_transformations(refused):
    from torchvision import transforms

    ours = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    lossy = transforms.Compose([transforms.RandomRotation(90), transforms.ToTensor()])
    good = FakeTaskSet(images(6, 5, 4, 3), LABELS, trsf=ours)
    assert np.array_equal(
        adapters.from_continuum([good], good).dataset.test.images, images(6, 5, 4, 3).transpose(0, 3, 1, 2)
    )
    for trsf in (lossy, [ours, lossy]):  # one for all tasks, or one per task
        bad = FakeTaskSet(images(6, 5, 4, 3), LABELS, trsf=trsf)
        assert "RandomRotation would be lost" in refused(adapters.from_continuum, [bad], good)


def test_a_sorted_task_is_shuffled_before_it_is_split():
    task = FakeTaskSet(images(100, 2, 2), np.repeat(np.arange(10), 10))
    one, same, other = (adapters.from_continuum([task], task, seed=seed) for seed in (3, 3, 4))
    assert len(set(one[0].valid.labels.tolist())) > 3
    assert np.array_equal(one.parts[0], same.parts[0])
    assert not np.array_equal(one.parts[0], other.parts[0])
    assert one.seed == 3


def test_tasks_of_different_shapes_are_refused(refused):
    one, wide = FakeTaskSet(images(6, 5, 4), LABELS), FakeTaskSet(images(6, 5, 9), LABELS)
    none = FakeTaskSet(images(6, 5, 4)[:0], LABELS[:0])
    assert "(1, 5, 4) and (1, 5, 9)" in refused(adapters.from_continuum, [one, wide], one)
    assert "(1, 5, 4) and (1, 5, 9)" in refused(adapters.from_continuum, [one], wide)
    assert "no test images" in refused(adapters.from_continuum, [one], [])
    assert "no test images" in refused(adapters.from_continuum, [one], none)
    assert "no training images" in refused(adapters.from_continuum, [], one)
    assert "at least 2 images" in refused(adapters.from_continuum, [one, none], one)
    assert "digits, mnist" in refused(adapters.from_continuum, [one], one, name="mine")
    assert adapters.from_continuum([one], one, name="mnist").dataset.name == "mnist"


# Stand-ins for Avalanche


def test_experiences_of_pictures():
    colour = [(Image.fromarray(x), y) for x, y in zip(images(6, 5, 4, 3), LABELS, strict=True)]
    found = adapters.from_avalanche(benchmark([colour[:3], colour[3:]], [colour[:2], colour[2:]]))
    expected = torch.from_numpy(images(6, 5, 4, 3).transpose(0, 3, 1, 2).copy())
    assert [sorted(part.tolist()) for part in found.parts] == [[0, 1, 2], [3, 4, 5]]
    for part in (found.dataset.train, found.dataset.test):
        assert torch.equal(part.images, expected)
        assert part.labels.tolist() == LABELS.tolist()
    gray = [(Image.fromarray(x), torch.tensor(y)) for x, y in zip(images(6, 5, 4), LABELS, strict=True)]
    found = adapters.from_avalanche(benchmark([gray], [gray]))
    assert np.array_equal(found.dataset.test.images[:, 0], images(6, 5, 4))
    assert found.dataset.test.labels.tolist() == LABELS.tolist()


def test_experiences_of_tensors(refused):
    tensors = [(torch.from_numpy(x) / 255, y) for x, y in zip(images(6, 3, 5, 4), LABELS, strict=True)]
    found = adapters.from_avalanche(benchmark([tensors], [tensors]))
    assert np.array_equal(found.dataset.train.images, images(6, 3, 5, 4))
    normalised = [(x - 0.5, y) for x, y in tensors]
    assert "not normalised" in refused(adapters.from_avalanche, benchmark([normalised], [tensors]))
    mixed = [*tensors, (torch.zeros(3, 6, 6), 0)]
    assert "2 sizes" in refused(adapters.from_avalanche, benchmark([mixed], [tensors]))


def test_to_avalanche(monkeypatch):
    def attribute(values, name, use_in_getitem=False):
        return SimpleNamespace(values=values, name=name, use_in_getitem=use_in_getitem)

    def dataset(datasets, *, data_attributes, transform_groups):
        return SimpleNamespace(items=datasets[0], attributes=data_attributes, transforms=transform_groups)

    utils = SimpleNamespace(
        DataAttribute=attribute,
        ConstantSequence=lambda value, n: [value] * n,
        DefaultTransformGroups=lambda pair: pair,
        TaskAwareSupervisedClassificationDataset=dataset,
    )
    scenarios = SimpleNamespace(benchmark_from_datasets=lambda **streams: streams)
    monkeypatch.setitem(sys.modules, "avalanche.benchmarks.utils", utils)
    monkeypatch.setitem(sys.modules, "avalanche.benchmarks.scenarios", scenarios)
    stream = small_stream()
    made = adapters.to_avalanche(stream)
    assert {name: len(experiences) for name, experiences in made.items()} == {
        "train": 4,
        "valid": 4,
        "test": 1,
    }
    expected = {
        "train": [megabatch.train for megabatch in stream],
        "valid": [megabatch.valid for megabatch in stream],
        "test": [stream.dataset.test],
    }
    for name, experiences in made.items():
        for experience, part in zip(experiences, expected[name], strict=True):
            transform, target_transform = experience.transforms
            assert target_transform is None
            samples = [experience.items[i] for i in range(len(experience.items))]
            x = torch.stack([transform(image) for image, _ in samples])
            assert torch.allclose(x, stream.dataset.examples(part).images, atol=1e-5)
            targets, task_labels = experience.attributes
            assert (targets.name, targets.values) == ("targets", part.labels.tolist())
            assert [label for _, label in samples] == targets.values
            assert (task_labels.name, task_labels.use_in_getitem) == ("targets_task_labels", True)
            assert task_labels.values == [0] * len(samples)


def test_missing_libraries(monkeypatch, refused):
    for module in ("continuum.tasks", "avalanche.benchmarks.scenarios"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install continuum" in refused(adapters.to_continuum, small_stream())
    assert "pip install avalanche-lib" in refused(adapters.to_avalanche, small_stream())


# The real libraries


@pytest.fixture
def continuum():
    return pytest.importorskip(
        "continuum", reason="Continuum is not here: pip install continuum", exc_type=ImportError
    )


@pytest.fixture
def avalanche():
    reason = "Avalanche is not here: pip install avalanche-lib"
    pytest.importorskip("avalanche.training", reason=reason, exc_type=ImportError)
    return pytest.importorskip("avalanche.benchmarks", reason=reason, exc_type=ImportError)


@pytest.mark.parametrize("channels", [1, 3])
def test_to_real_continuum_and_back(continuum, channels):
    stream = small_stream(channels)
    test = adapters.to_continuum(stream, "test")
    assert_same_stream(adapters.from_continuum(adapters.to_continuum(stream, "all"), test), stream)
    train = adapters.to_continuum(stream)
    assert_same_stream(adapters.from_continuum(train, test), stream, training_parts(stream))
    for task, megabatch in zip(train, stream, strict=True):
        x, y, t = next(iter(torch.utils.data.DataLoader(task, batch_size=len(task))))
        assert torch.allclose(x, stream.dataset.examples(megabatch.train).images, atol=1e-5)
        assert torch.equal(y, megabatch.train.labels)
        assert set(t.tolist()) == {megabatch.t - 1}


def test_continuum_scenario(continuum):
    from continuum.datasets import InMemoryDataset
    from continuum.scenarios import InstanceIncremental

    pixels, labels = images(60, 5, 4, 3), np.arange(60) % 3
    scenario = InstanceIncremental(InMemoryDataset(pixels, labels), nb_tasks=5)
    found = adapters.from_continuum(scenario, scenario)
    assert len(found) == 5
    for part, task in zip(found.parts, scenario, strict=True):
        x, y, _ = task.get_raw_samples()
        expected = Images(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y))
        assert contents(found.images(part)) == contents(expected)
    assert len(found.dataset.test.labels) == 60


@pytest.mark.parametrize("channels", [1, 3])
def test_to_real_avalanche_and_back(avalanche, channels):
    stream = small_stream(channels)
    made = adapters.to_avalanche(stream)
    assert_same_stream(adapters.from_avalanche(made), stream, training_parts(stream))
    for experience, megabatch in zip(made.valid_stream, stream, strict=True):
        x = torch.stack([sample[0] for sample in experience.dataset])
        assert torch.allclose(x, stream.dataset.examples(megabatch.valid).images, atol=1e-5)
        assert list(experience.dataset.targets) == megabatch.valid.labels.tolist()


def test_avalanche_benchmark(avalanche):
    from avalanche.benchmarks.scenarios.supervised import new_instances_benchmark
    from avalanche.benchmarks.utils import DefaultTransformGroups, as_classification_dataset
    from torchvision.transforms import Compose, Normalize, ToTensor

    class Pictures(torch.utils.data.Dataset):
        targets = (np.arange(60) % 3).tolist()

        def __len__(self):
            return 60

        def __getitem__(self, index):
            return Image.fromarray(images(60, 5, 4, 3)[index]), self.targets[index]

    groups = DefaultTransformGroups((Compose([ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)]), None))
    pictures = as_classification_dataset(Pictures(), transform_groups=groups)
    made = new_instances_benchmark(pictures, pictures, 4, seed=0)
    found = adapters.from_avalanche(made)
    assert [len(part) for part in found.parts] == [len(e.dataset) for e in made.train_stream]
    expected = torch.from_numpy(images(60, 5, 4, 3).transpose(0, 3, 1, 2).copy())
    assert torch.equal(found.dataset.test.images, expected)
    assert contents(found.dataset.train) == contents(found.dataset.test)


def test_avalanche_trains_on_an_experience(avalanche):
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive

    stream = MegaBatchStream("digits", 2)
    made = adapters.to_avalanche(stream)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    naive = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=3,
        evaluator=EvaluationPlugin(),
    )
    naive.train(made.train_stream[0])
    x, y = stream.dataset.examples(stream.dataset.test)
    with torch.no_grad():
        assert (model(x).argmax(1) != y).double().mean() < 0.15
    naive.eval(made.test_stream)
