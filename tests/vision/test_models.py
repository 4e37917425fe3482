"""The two backbones: sizes, gradients and FLOPs; stacks against their single members."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.vision.conftest import flops_of, seeded, started
from vision.flat import Flat
from vision.models import MLP, VGG, mlp_widths, vgg_widths


def stack(kind, members, joint=None, seed=0):
    """A stack whose member k is initialised with seed + k."""
    if kind == "mlp":
        return started(MLP([48, 9, 7, 5], members, joint), seed)
    return started(VGG((3, 32, 32), vgg_widths(3), 5, members, joint), seed)


def batch(kind, n=6):
    shape = (n, 3, 4, 4) if kind == "mlp" else (n, 3, 32, 32)
    x = torch.randn(shape, generator=seeded(9)).contiguous(memory_format=torch.channels_last)
    return x, torch.arange(n) % 5


def test_the_mlp_equals_torch_nn():
    model = stack("mlp", 1)
    x, _ = batch("mlp")
    layers = []
    for dense in model.layers:
        linear = nn.Linear(dense.weight.shape[2], dense.weight.shape[1])
        linear.weight.data = dense.weight.data[0]
        linear.bias.data = dense.bias.data[0, :, 0]
        layers += [linear, nn.ReLU()]
    torch.testing.assert_close(model(x)[0].t(), nn.Sequential(nn.Flatten(), *layers[:-1])(x))


@pytest.mark.parametrize("training", [True, False])
def test_the_vgg_equals_torch_nn(training):
    """Same outputs, and the same running statistics after a training batch."""
    model = stack("vgg", 1)
    x, _ = batch("vgg")
    layers = []
    for block in model.blocks:
        for conv in block.layers:
            plain = nn.Conv2d(conv.weight.shape[2], conv.weight.shape[1], 3, padding=1)
            plain.weight.data = conv.weight.data[0]
            plain.bias.data = conv.bias.data[0]
            layers += [plain, nn.BatchNorm2d(len(plain.weight)), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    classifier = nn.Linear(3, 5)
    classifier.weight.data = model.classifier.weight.data[0]
    classifier.bias.data = model.classifier.bias.data[0, :, 0]
    peer = nn.Sequential(*layers, nn.Flatten(), classifier).train(training)
    model.train(training)
    torch.testing.assert_close(model(x)[0].t(), peer(x), rtol=1e-4, atol=1e-5)
    norms = [layer for layer in peer if isinstance(layer, nn.BatchNorm2d)]
    convs = [conv for block in model.blocks for conv in block.layers]
    for norm, conv in zip(norms, convs, strict=True):
        torch.testing.assert_close(conv.mean[0], norm.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(conv.variance[0], norm.running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(28, 28), (8, 8), (3, 5), (1, 1), (48, 40)])
def test_the_vgg_takes_images_of_any_size(size):
    model = VGG((2, *size), vgg_widths(2), 4)
    model.reset(seeded(0))
    for n in (1, 3):
        assert model.train()(torch.randn(n, 2, *size)).shape == (1, 4, n)
        assert model(torch.randn(n, 2, *size)).isfinite().all()


@pytest.mark.parametrize("kind", ["mlp", "vgg"])
def test_a_stack_equals_its_members(kind):
    x, _ = batch(kind)
    together = stack(kind, 3, seed=20)(x)
    alone = [stack(kind, 1, seed=20 + member)(x) for member in range(3)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize(("members", "is_own"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("joint", [None, "mean", "sum"])
def test_the_formulas_of_the_mlps_gradient(members, is_own, joint):
    if is_own and joint:
        return  # a joint loss has one order of minibatches
    model = stack("mlp", members, joint)
    x, y = batch("mlp")
    if is_own:
        x, y = (torch.stack([values.roll(m, 0) for m in range(members)]) for values in (x, y))
    flat = Flat(model)
    for gradient in flat.parameters:
        gradient.grad.fill_(float("nan"))
    model.gradient_writer()(x, y)
    by_formula = [p.grad.clone() for p in flat.parameters]
    logits = model(x)
    labels = y if is_own else [y] * len(logits)
    loss = sum(
        F.cross_entropy(voter.t(), member_labels)
        for voter, member_labels in zip(logits, labels, strict=True)
    )
    for formula, autograd in zip(
        by_formula, torch.autograd.grad(loss, flat.parameters), strict=True
    ):
        torch.testing.assert_close(formula, autograd, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["mlp", "vgg"])
def test_members_may_have_separate_images(kind):
    model = stack(kind, 3).eval()
    x, _ = batch(kind)
    member_images = torch.stack([x.roll(m, 0) for m in range(3)])
    together = model(member_images)
    for member in range(3):
        torch.testing.assert_close(together[member], model(member_images[member])[member])


@pytest.mark.parametrize(("kind", "members"), [("mlp", 1), ("mlp", 3), ("vgg", 1), ("vgg", 3)])
def test_flops_equal_those_of_the_flop_counter(kind, members):
    model = stack(kind, members)
    x, y = batch(kind)
    forward, backward = flops_of(model, x, y)
    assert forward == len(x) * model.flops.forward
    if kind == "vgg" and members > 1:
        # The counter counts the gradient of a grouped convolution as that of a full one.
        assert model.flops.backward == pytest.approx(members * stack(kind, 1).flops.backward)
    else:
        assert backward == len(x) * model.flops.backward


@pytest.mark.parametrize(
    ("hidden", "mlp", "vgg"), [(4, 3210, 2510), (8, 6442, 9330), (64, 55050, 558410)]
)
def test_the_networks_have_the_papers_sizes(hidden, mlp, vgg):
    models = MLP(mlp_widths((1, 28, 28), hidden, 10)), VGG((3, 32, 32), vgg_widths(hidden), 10)
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [mlp, vgg]
