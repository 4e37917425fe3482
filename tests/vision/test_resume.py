"""Results do not depend on interruptions, nor on the addresses of tensors, which are aligned."""

import contextlib
import random
from itertools import chain, cycle, product

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.vision.conftest import equal, numbers
from vision import MegaBatchStream, experiment, run
from vision.data import make_dataset
from vision.flat import Flat
from vision.learners import LEARNERS, resolve
from vision.stage_data import StageData
from vision.stage_trainer import CHECKPOINT, StageTrainer

BACKBONES = {"mlp": {"arch": "mlp", "hidden": 5}, "vgg": {"arch": "vgg", "hidden": 2}}
LIBRARY = {"torchvision": {"arch": "torchvision:mobilenet_v3_small"}}  # with dropout
OPTIMIZERS = {
    "adadelta": {"optimizer": "adadelta", "weight_decay": 1e-3},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 1e-3},
    "momentum": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3},
    "nesterov": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True},
}
KINDS = {
    "sm": ("sm", {"augment": True}),
    "ens": ("ens", {"members": 2, "augment": True}),
    "ens, shared order": ("ens", {"members": 3, "member_order": "shared", "average": "poly:4"}),
    "umix": ("umix", {"members": 2, "average": 0.5}),
    "sm, average of epochs": ("sm", {"average": "poly:8"}),
    "gmoe, average of epochs": ("gmoe", {"average": "poly:8"}),
    "gens": ("gens", {}),
    "gens of mixtures": ("gens", {"experts": 3, "router": "flat"}),
    "gmoe": ("gmoe", {}),
    "gmoe, flat": ("gmoe", {"router": "flat", "grow_every": 2, "average": 0.6}),
    "moe": ("moe", {"experts": 3}),
    "ff": ("ff", {}),
    "ff, average": ("ff", {"average": 0.6}),
    "ff, average of epochs": ("ff", {"average": "poly:2"}),
    "umix, bf16": ("umix", {"members": 2, "amp": "bf16"}),
}
REPLAYS = {
    "sm, replay": ("sm", {"replay_share": 0.5, "augment": True}),
    "ens, replay": ("ens", {"members": 2, "replay_share": 0.3, "replay_from": "recent"}),
}
GATED = ("gens of mixtures", "gmoe", "gmoe, flat", "moe")


def digits():
    """Eleven mega-batches of 31 digits, and 50 test images."""
    whole = MegaBatchStream("digits", 46).dataset
    test = type(whole.test)(whole.test.images[:50], whole.test.labels[:50])
    parts = np.array_split(np.arange(341), 11)
    return MegaBatchStream(make_dataset("digits", whole.train, test), parts=parts)


STREAM = digits()


def floats(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def learner(kind, backbone, **chosen):
    name, options = KINDS[kind]
    chosen = options | BACKBONES[backbone] | {"epochs": 2, "batch_size": 16} | chosen
    dataset = STREAM.dataset
    settings = resolve("digits", name, chosen=chosen)
    return LEARNERS[name](dataset.shape, dataset.classes, settings, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "backbone"),
    [*((kind, "mlp") for kind in KINDS), ("ens", "vgg"), ("gmoe", "vgg"), ("ff", "vgg")],
)
def test_all_tensors_are_aligned_in_training_after_growth_and_after_loading(
    kind, backbone, monkeypatch
):
    flats = []
    init = Flat.__init__
    monkeypatch.setattr(
        Flat, "__init__", lambda self, model: (init(self, model), flats.append(model))[0]
    )
    subject = learner(kind, backbone, epochs=1)
    data = StageData(STREAM, experiment.stages(11, 4), torch.device("cpu"))
    for index in range(2):
        subject.train(index, data)
    again = learner(kind, backbone)
    again.load(subject.state())
    for model in (subject.model, again.model, *flats, *getattr(again, "members", [])):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            assert not floats(tensor) or tensor.data_ptr() % 64 == 0, name
            assert tensor.grad is None


class Killed(BaseException):
    """Stands in for a kill; no handler catches it."""


class Kills:
    """Kills a run at `number` random points, counted in calls of `_due`:
    it requests a checkpoint there, and kills the run at that call or one of the next two."""

    def __init__(self, number, chances, seed):
        self.random = random.Random(seed)
        points = sorted(self.random.sample(range(1, chances + 1), number))
        self.gaps = [after - before for before, after in zip([0, *points], points, strict=False)]
        self.left = 0
        self.until_end = None

    def next_life(self):
        self.left = self.gaps.pop(0) if self.gaps else -1
        self.until_end = None

    def due(self, trainer):
        if self.until_end is not None:
            self.until_end -= 1
            if self.until_end <= 0:
                raise Killed
            return False
        self.left -= 1
        return self.left == 0

    def saved(self):
        if self.left == 0 and self.until_end is None:
            self.until_end = self.random.randrange(3)
            if not self.until_end:
                raise Killed


def tensors_of(path):
    state = torch.load(path, weights_only=True)
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def resumes(tmp_path, monkeypatch, kind, backbone, optimizer, gate, kills, epochs):
    """Check that a run killed `kills` times equals an uninterrupted run."""
    name, options = (KINDS | REPLAYS)[kind]
    options = {"epochs": epochs, "batch_size": 64} | options | (BACKBONES | LIBRARY)[backbone]
    options |= OPTIMIZERS[optimizer]
    options |= {"gate": gate} if gate else {}
    play = {"stream": STREAM, "learner": name, "waiting_time": 4, "save_interval": 1e9, **options}
    killer = Kills(kills, 3 * epochs, f"{kind} {backbone} {optimizer} {gate}")
    save = StageTrainer.save

    def save_and_maybe_die(trainer, progress=None, **last):
        save(trainer, progress, **last)
        killer.saved()

    lives = 0
    whole = run(out=tmp_path / "whole", **play)
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "_due", lambda trainer: killer.due(trainer))
        patch.setattr(StageTrainer, "save", save_and_maybe_die)
        part = None
        while part is None:
            killer.next_life()
            lives += 1
            with contextlib.suppress(Killed):
                part = run(out=tmp_path / "part", **play)
    assert lives == kills + 1
    assert numbers(part) == numbers(whole)
    assert equal(*(tensors_of(tmp_path / which / CHECKPOINT) for which in ("whole", "part")))


def combinations():
    for kind, backbone, optimizer in product(KINDS, BACKBONES, OPTIMIZERS):
        for gate in ("soft", "hard") if kind in GATED else (None,):
            yield kind, backbone, optimizer, gate


ALL = list(combinations())
FEW = [  # every kind, optimizers in turn, some VGGs
    (
        kind,
        "vgg" if kind in ("ens", "gmoe", "ff") else "mlp",
        optimizer,
        "hard" if kind in GATED else None,
    )
    for kind, optimizer in zip([*KINDS, *REPLAYS], cycle(OPTIMIZERS), strict=False)
]


@pytest.mark.parametrize("which", FEW, ids=str)
def test_runs_killed_several_times_equal_the_uninterrupted_one(tmp_path, monkeypatch, which):
    resumes(tmp_path, monkeypatch, *which, kills=3, epochs=3)


def test_a_run_of_torchvision_that_was_killed_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    which = "sm, average of epochs", "torchvision", "adadelta", None
    resumes(tmp_path, monkeypatch, *which, kills=1, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("which", ALL, ids=str)
def test_all_runs_killed_twenty_times_equal_the_uninterrupted_one(tmp_path, monkeypatch, which):
    resumes(tmp_path, monkeypatch, *which, kills=20, epochs=8)
