"""Firefly: function, size and cost of a growth."""

import itertools
import json
from collections import Counter
from statistics import median

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.vision.conftest import CPU, seeded
from vision.firefly import Overgrown
from vision.learners.firefly import Firefly, FireflySettings
from vision.models import MLP, VGG
from vision.train import Examples, loss_of

CLASSES = 7
SHAPE = (3, 16, 16)


class Stages:
    """The same examples at every stage; the mean of an image depends on its label."""

    black = torch.zeros(1)

    def __init__(self, n: int = 96, shape: tuple[int, ...] = SHAPE, valid: int = 10):
        generator = seeded(5)
        labels = torch.randint(CLASSES, (n,), generator=generator)
        images = torch.randn(n, *shape, generator=generator) + labels.view(-1, 1, 1, 1) / 3 - 1
        self.parts = [
            Examples(images[valid:], labels[valid:]),
            Examples(images[:valid], labels[:valid]),
        ]

    def train(self, index: int) -> Examples:
        return self.parts[0]

    def valid(self, index: int) -> Examples:
        return self.parts[1]

    def replay(self, index: int) -> None:
        """Epochs have all training examples."""


def learner(shape: tuple[int, ...] = SHAPE, seed: int = 0, **options) -> Firefly:
    options = {"arch": "mlp", "hidden": 8, "epochs": 3, "batch_size": 32} | options
    if options["arch"] == "vgg":
        options = {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9} | options
    return Firefly(shape, CLASSES, FireflySettings(**options), seed, CPU)


def trained(arch: str, **options) -> Firefly:
    subject = learner(arch=arch, **options)
    subject.train(0, Stages())
    return subject


def overgrown(arch: str, history: int = 10) -> tuple[Overgrown, MLP | VGG, torch.Tensor]:
    """An over-grown network, its model with running statistics of `history` batches, and images."""
    generator = seeded(1)
    model = (
        MLP([768, 8, 6, 5, CLASSES])
        if arch == "mlp"
        else VGG(SHAPE, [[4, 5], [3], [6, 4, 4]], CLASSES)
    )
    model.reset(generator)
    images = torch.randn(128, *SHAPE, generator=generator) * 1.5 + 0.2
    model.train()
    for _ in range(history):
        model(images)
    model.eval()
    network = Overgrown(model, 3, True, generator)
    network.measure(images)
    return network, model, images


def grown_network(network: Overgrown, choices) -> MLP | VGG:
    widths = network.widths(choices)
    model = MLP(widths) if isinstance(network.model, MLP) else VGG(SHAPE, widths, CLASSES)
    network.write(choices, network.model, model)
    return model.eval()


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def everything(network: Overgrown, kinds: str):
    """Choices with all candidates of some kinds: s(plits), n(ew neurons), l(ayers);
    and their parameters."""
    chosen = [kind in kinds for kind in "snl"] * len(network.candidates)
    pairs = list(zip(chosen, network.perturbations, strict=True))
    scores = [torch.full((len(p),), -1.0 if taken else 1.0) for taken, p in pairs]
    counts = [len(p) if taken else 0 for taken, p in pairs]
    budget = network.parameters(
        [*zip(counts[::3], counts[1::3], counts[2::3], strict=True)]
    ) - size(network.model)
    return network.select(scores, budget), budget


arches = pytest.mark.parametrize("arch", ["mlp", "vgg"])


@arches
@pytest.mark.parametrize("kinds", ["s", "n", "l", "sn", "snl"])
def test_candidates_without_perturbation_keep_the_function(arch, kinds):
    network, model, images = overgrown(arch)
    choices, budget = everything(network, kinds)
    moved = grown_network(network, choices)
    assert size(moved) - size(model) == budget > 0
    assert (moved(images) - model(images)).abs().max() > 1e-4  # perturbations have an effect
    for p in network.perturbations:
        p.data.zero_()
    same = grown_network(network, choices)
    torch.testing.assert_close(same(images), model(images), rtol=1e-5, atol=1e-6)
    assert any(len(choice.split) for choice in choices) == ("s" in kinds)
    assert any(len(choice.new) for choice in choices) == ("n" in kinds)
    assert any(choice.layer for choice in choices) == ("l" in kinds)


@arches
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_grown_network_equals_the_over_grown_one_without_the_other_candidates(arch, share):
    network, model, images = overgrown(arch)
    generator = seeded(2)
    scores = [torch.randn(len(p), generator=generator) for p in network.perturbations]
    choices = network.select(scores, share * everything(network, "snl")[1])
    grown = grown_network(network, choices)
    numbers = [part for c in choices for part in (c.split, c.new, torch.arange(int(c.layer)))]
    for p, indices in zip(network.perturbations, numbers, strict=True):
        p.data = torch.zeros_like(p).index_copy(0, indices, p.data[indices])
    torch.testing.assert_close(grown(images)[0].t(), network(images), rtol=1e-5, atol=1e-6)
    assert (grown(images) - model(images)).abs().max() > 1e-6


def test_a_new_layer_is_nearly_the_identity_in_training_mode():
    network, model, images = overgrown("vgg", history=120)  # running statistics of the images
    for p in network.perturbations:
        p.data.zero_()
    network.measure(images)
    deeper = grown_network(network, everything(network, "l")[0])
    before = model.train()(images)
    after = deeper.train()(images)
    assert len(list(deeper.modules())) == len(list(model.modules())) + 3
    assert (after - before).abs().max() < 0.01 * before.abs().max()


@arches
def test_all_flops_of_a_growth_are_counted(arch):
    subject = trained(arch)
    data = Stages()
    with FlopCounterMode(display=False) as counted:
        flops = subject.grow(1, data)
    assert set(flops) == {"growth", "validation"}
    assert counted.get_total_flops() == sum(flops.values())


@arches
def test_tuning_lowers_the_loss_and_keeps_the_norms(arch):
    subject = trained(arch, epochs=10)
    data = Stages()
    network = Overgrown(subject.model, 2, True, seeded(3))
    network.measure(data.train(1).images)
    before = [p.detach().clone() for p in network.perturbations]
    network.tune([data.train(1)] * 5)
    losses = []
    for vectors in (before, [p.detach().clone() for p in network.perturbations]):
        for p, value in zip(network.perturbations, vectors, strict=True):
            p.data = value / len(network.candidates)
        losses.append(
            torch.nn.functional.cross_entropy(network(data.train(1).images), data.train(1).labels)
        )
        for p, value in zip(network.perturbations, vectors, strict=True):
            p.data = value
    assert losses[1] < losses[0] - 1e-3
    for p, old in zip(network.perturbations, before, strict=True):
        torch.testing.assert_close(p.detach().flatten(1).norm(dim=1), old.flatten(1).norm(dim=1))
    moved = [
        (p - old).abs().max() > 1e-4
        for p, old in zip(network.perturbations, before, strict=True)
        if len(p)
    ]
    assert sum(moved) > len(moved) / 2  # the others belong to dead neurons


def test_scores_are_derivatives_by_epsilon():
    network, _, images = overgrown("mlp")
    labels = torch.arange(len(images)) % CLASSES
    batches = [Examples(images[:16], labels[:16]), Examples(images[16:], labels[16:])]
    scores, _ = network.scores(batches)
    for which, candidate in ((0, 2), (1, 1), (2, 0), (7, 2)):
        p = network.perturbations[which]
        old = p.data.clone()
        losses = []
        for epsilon in (0.9, 1.1):
            p.data = old.clone()
            p.data[candidate] *= epsilon
            losses.append(
                torch.nn.functional.cross_entropy(network(images).double(), labels).item()
            )
        p.data = old
        assert scores[which][candidate].item() == pytest.approx(
            (losses[1] - losses[0]) / 0.2, rel=0.05, abs=2e-6
        )


def test_selection_by_score_per_parameter_takes_at_least_one():
    network, model, _ = overgrown("mlp")
    scores = [torch.zeros(len(p)) for p in network.perturbations]
    scores[3][4] = -1.0  # second hidden layer; first, which costs more
    scores[0][5] = -1.5
    cheap = 8 + 1 + 5
    costly = 768 + 1 + 6
    choices = network.select(scores, cheap)
    assert [c.split.tolist() for c in choices] == [[], [4], []]
    assert size(grown_network(network, choices)) == size(model) + cheap
    choices = network.select(scores, cheap + costly + 1)
    assert [c.split.tolist() for c in choices] == [[5], [4], []]
    choices = network.select(scores, 1e-9)
    assert [c.split.tolist() for c in choices] == [[], [4], []]


@arches
@pytest.mark.parametrize("depth", [True, False])
def test_growth_is_linear_in_width_and_depth_and_keeps_the_classes(arch, depth):
    options = {"shape": (3, 8, 8), "arch": arch, "hidden": 6, "ff_depth": depth, "lr": 0.01}
    subject = learner(**options, epochs=2)
    data = Stages(shape=(3, 8, 8))
    counts = Counter()
    initial = subject.parameters
    modules = len(list(subject.model.modules()))
    for index in range(1, 5):
        before = subject.parameters
        subject.grow(index, data)
        counts.update(subject.growth)
        assert subject.growth["added_parameters"] == subject.parameters - before > 0
        hidden = (
            list(itertools.chain(*subject.model.widths))
            if arch == "vgg"
            else subject.model.widths[1:-1]
        )
        largest = 9 * max(hidden) * (max(hidden) + 1) if arch == "vgg" else 193 + 2 * max(hidden)
        assert abs(subject.parameters - before - initial / 4) <= largest / 2
        assert subject.model(data.valid(index).images).shape == (1, CLASSES, 10)
    assert abs(subject.parameters - 2 * initial) < 0.3 * initial
    assert len(list(subject.model.modules())) == modules + counts["layers"]
    assert min(counts["split"], counts["new"]) > 0
    assert (counts["layers"] > 0) == depth
    json.dumps(subject.details)


@arches
def test_growth_changes_the_function_little_and_does_not_raise_the_loss(arch):
    data = Stages(shape=(3, 8, 8))
    changed = []
    gained = []
    images, labels = data.train(1)
    for seed in range(9):  # a hardly trained VGG can overshoot, depending on rounding
        subject = learner((3, 8, 8), arch=arch, epochs=15, seed=seed)
        subject.train(0, data)
        before = subject.model.eval()(data.valid(1).images)
        loss = loss_of(subject.model(images), labels).item()
        subject.grow(1, data)
        after = subject.model.eval()(data.valid(1).images)
        growth = subject.details["growth"]
        assert growth["function_error"] == pytest.approx(
            (after - before).abs().max().item(), rel=1e-5
        )
        assert growth["loss_before"] == pytest.approx(
            loss_of(before, data.valid(1).labels).item(), rel=1e-5
        )
        assert growth["loss_after"] == pytest.approx(
            loss_of(after, data.valid(1).labels).item(), rel=1e-5
        )
        assert growth["function_error"] > 0
        changed.append(growth["function_error"] / before.abs().max().item())
        gained.append(loss - loss_of(subject.model(images), labels).item())
    assert median(changed) < 0.2
    assert median(gained) > -0.01


@arches
def test_one_neuron_and_two_examples_are_enough(arch):
    subject = learner((3, 8, 8), arch=arch, hidden=1, lr=0.01)
    data = Stages(2, (3, 8, 8), valid=1)
    for index in range(1, 4):
        subject.grow(index, data)
        for mode in (True, False):
            assert subject.model.train(mode)(torch.randn(20, 3, 8, 8)).isfinite().all()
