"""Memory of evaluation, and the error where memory does not suffice."""

import resource
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alma.errors import command
from vision import MegaBatchStream, data, run, train
from vision.data import Images, make_dataset
from vision.examples import Examples
from vision.mixture import Committee, mixture_mlp, mixture_vgg
from vision.models import MLP, VGG, vgg_widths

SHAPE = (3, 24, 24)
MODELS = {
    "mlp": lambda: MLP([1728, 300, 500, 10], 3),
    "vgg": lambda: VGG(SHAPE, vgg_widths(8), 10),
    "ens of vgg": lambda: VGG(SHAPE, vgg_widths(8), 10, 5),
    "grown vgg": lambda: VGG(SHAPE, [[4, 5], [300], [6, 4, 4]], 10),
    "mixture": lambda: mixture_mlp([1728, 300, 300, 10], 6, True, False),
    "hard mixture of vgg": lambda: mixture_vgg(SHAPE, vgg_widths(8), 10, 6, True, True),
    "committee": lambda: Committee(
        [mixture_vgg(SHAPE, vgg_widths(8), 10, 3, True, False) for _ in range(3)]
    ),
}


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they are in use."""

    def __init__(self, *arguments):
        super().__init__()
        self.users = Counter()
        self.bytes = {}
        self.peak = 0
        self.before = {tensor.untyped_storage().data_ptr() for tensor in arguments}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage and storage.data_ptr() not in self.before:
                self.bytes[storage.data_ptr()] = storage.nbytes()
                self.users[storage.data_ptr()] += 1
                weakref.finalize(tensor, self.users.subtract, [storage.data_ptr()])
        self.peak = max(
            self.peak, sum(self.bytes[place] for place, users in self.users.items() if users > 0)
        )
        return result


@pytest.mark.parametrize("name", MODELS)
def test_the_footprint_is_what_evaluation_holds(name):
    model = MODELS[name]().eval()
    images = torch.randn(8, *SHAPE)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.uniform_(0.1, 0.2)
    with torch.no_grad(), Live(images, *model.parameters()) as live:
        model(images)
    held = live.peak / 4 / len(images) + images[0].numel()
    assert held < 1.3 * model.footprint
    if "hard" not in name:  # whose examples may all go to one expert
        assert model.footprint < 3 * held


def test_batches_are_bounded_by_bytes_and_small_images_are_as_many_as_ever():
    def sizes(model, n):
        labels = torch.zeros(n, dtype=torch.long)
        batches = train.evaluation_batches(model, Examples(labels.view(-1, 1, 1, 1), labels))
        return [len(batch.labels) for batch in batches]

    large = VGG((3, 224, 224), vgg_widths(64), 10, 5)
    assert sum(sizes(large, 600)) == 600
    assert max(sizes(large, 600)) == 1
    single = VGG((3, 224, 224), vgg_widths(8), 10)
    assert 0.5 < max(sizes(single, 600)) * 4 * single.footprint / 20_000_000 <= 1
    assert sizes(MLP([784, 64, 64, 10], 5), 5000) == [2000, 2000, 1000]


@pytest.mark.parametrize("learner", ["ens", "gens", "ff"])
def test_results_are_the_same_with_batches_of_few_and_images_as_bytes(
    tmp_path, monkeypatch, learner
):
    """The values of bytes are the same bit for bit; a batch changes the rounding of a sum."""

    def values():
        options = {"hidden": 4, "epochs": 2, "batch_size": 32, "waiting_time": 2, "augment": True}
        rows = run(stream, learner, tmp_path / str(len(list(tmp_path.iterdir()))), **options).rows
        return [(row["value"], row["extra"]["valid"]) for row in rows]

    stream = MegaBatchStream("digits", 5)
    whole = values()
    with monkeypatch.context() as patch:
        patch.setattr(data, "NORMALISED", 0)
        assert values() == whole
    monkeypatch.setattr(train, "EVALUATION_BYTES", {"cpu": 4 * 1000 * 23})
    for (value, valid), (other, rounded) in zip(whole, values(), strict=True):
        assert value == pytest.approx(other, abs=0.01)  # of 360 images
        assert valid == rounded or valid == pytest.approx(rounded, abs=0.03)


def test_out_of_memory_is_one_line_that_says_what_to_lower(tmp_path, child):
    labels = torch.arange(80) % 4
    pixels = torch.arange(80, dtype=torch.uint8)[:, None, None, None].repeat(1, 3, 32, 32)
    images = Images(pixels, labels)
    stream = MegaBatchStream(make_dataset("folder", images, images), 2)

    def limited():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
        command(
            lambda: run(stream, "ens", tmp_path / "run", hidden=20_000, arch="mlp", batch_size=40)
        )()

    line = child(tmp_path / "log", limited).wait().error
    assert "out of memory" in line
    assert "lower --batch-size" in line
