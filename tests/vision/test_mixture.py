"""Gating, growth and FLOPs of mixtures of experts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.vision.conftest import flops_of, seeded
from vision.mixture import Gating, mixture_mlp, mixture_vgg
from vision.models import MLP, VGG, vgg_widths
from vision.train import loss_of

KINDS = ["mlp", "vgg"]


def mixture(kind, experts=1, tree=True, hard=False):
    if kind == "mlp":
        model = mixture_mlp([48, 9, 7, 5], experts, tree, hard)
    else:
        model = mixture_vgg((3, 32, 32), vgg_widths(3), 5, experts, tree, hard)
    model.reset(seeded(1))
    model.generator = seeded(2)
    return model


def images(kind, n=40):
    return torch.randn((n, 3, 4, 4) if kind == "mlp" else (n, 3, 32, 32), generator=seeded(3))


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("experts", [1, 2, 3, 6])
def test_gates_are_a_distribution_over_the_experts(tree, experts):
    router = Gating(8, experts, tree)
    router.reset(seeded(0))
    for expert in (0, experts - 1):
        router.split(expert, seeded(5))
    gates = router(torch.randn(8, 30, generator=seeded(1)))
    assert gates.shape == (experts + 2, 30)
    torch.testing.assert_close(gates.sum(0), torch.ones(30))
    assert (gates > 0).all()


def test_a_gate_value_is_the_product_of_the_branches_on_its_path():
    router = Gating(8, 1, tree=True)
    for leaf in (0, 1, 0):  # ((0, 3), (1, 2))
        router.split(leaf, seeded(leaf))
    z = torch.randn(8, 30, generator=seeded(1))
    node = torch.addmm(router.bias, router.weight, z).view(3, 2, 30).softmax(1)
    root, of_one, of_zero = node
    expected = [
        root[0] * of_zero[0],
        root[1] * of_one[0],
        root[1] * of_one[1],
        root[0] * of_zero[1],
    ]
    torch.testing.assert_close(router(z), torch.stack(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hard", [False, True])
def test_a_split_of_a_tree_keeps_the_outputs(kind, hard):
    """Over several growths in which each layer splits another expert."""
    model = mixture(kind, hard=hard)
    x = images(kind)
    model.train()(x)
    model.eval()
    for growth, experts in enumerate(([0, 0, 0, 0], [0, 1, 0, 1], [2, 0, 1, 2])):
        before = model(x).detach()
        for layer, expert in zip(model.layers, experts, strict=False):
            layer.split(expert, seeded(growth))
        assert (model(x) - before).abs().max() <= 1e-6
        assert model.experts == growth + 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_one_expert_equals_the_plain_network(kind):
    model = mixture(kind)
    x = images(kind, 7)
    plain = MLP([48, 9, 7, 5]) if kind == "mlp" else VGG((3, 32, 32), vgg_widths(3), 5)
    sources = [
        *filter(None, [model.head]),
        *(layer.experts for layer in model.layers),
        model.classifier,
    ]
    targets = plain.layers if kind == "mlp" else [*plain.blocks, plain.classifier]
    for source, target in zip(sources, targets, strict=True):
        target.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [True, False])
def test_hard_gates_compute_only_the_chosen_expert_in_evaluation(kind, tree):
    """With the outputs of a one-hot weighting of all experts, and the FLOPs of one."""
    model = mixture(kind, 3, tree, hard=True)
    x = images(kind)
    model.eval()
    with FlopCounterMode(display=False) as counter:
        logits, gates = model.routed(x)
    assert counter.get_total_flops() == pytest.approx(len(x) * model.flops.inference)
    assert model.flops.inference < model.flops.forward
    for layer, used in zip(model.layers, gates, strict=True):
        assert ((used == 0) | (used == 1)).all()
        assert (used.sum(0) == 1).all()
        layer.forward = lambda z, _, layer=layer, used=used: (layer.combine(z, used), used)
    assert any(len(used.sum(1).nonzero()) > 1 for used in gates)  # several experts are in use
    torch.testing.assert_close(model(x), logits)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_gates_are_sampled_and_have_gradients(kind):
    model = mixture(kind, 3, hard=True)
    x = images(kind)
    model.train()
    logits, gates = model.routed(x)
    for used in gates:
        assert torch.allclose(used.sum(0), torch.ones(len(x)))
        assert torch.allclose(used.detach().max(0).values, torch.ones(len(x)))
    gradients = torch.autograd.grad(
        loss_of(logits, torch.arange(len(x)) % 5).sum(), list(model.parameters())
    )
    named = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    routers = [name for name in named if "router" in name]
    assert all(named[name].abs().max() > 0 for name in routers)
    model.generator = seeded(2)
    again = model.routed(x)[1]
    model.generator = seeded(4)
    routed = model.routed(x)[1]
    assert torch.equal(again[0], gates[0])
    assert not torch.equal(routed[0], gates[0])


def test_hard_gates_are_sampled_in_proportion_to_their_probability():
    model = mixture("mlp", 3, hard=True)
    x = images("mlp", 1).expand(20000, -1, -1, -1)
    logits = model.layers[0].router(x.flatten(1).t())[:, 0]
    shares = model.train().routed(x)[1][0].mean(1)
    torch.testing.assert_close(shares, logits, atol=0.015, rtol=0)


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize(("kind", "experts"), [("mlp", 1), ("mlp", 3), ("vgg", 1), ("vgg", 3)])
def test_flops_equal_those_of_the_flop_counter(kind, experts, tree):
    model = mixture(kind, experts, tree)
    x = images(kind)
    forward, backward = flops_of(model, x, torch.arange(len(x)) % 5)
    assert forward == pytest.approx(len(x) * model.flops.forward)
    assert model.flops.inference == model.flops.forward
    if kind == "mlp" or experts == 1:  # the counter is wrong for grouped convolutions
        assert backward == pytest.approx(len(x) * model.flops.backward)
