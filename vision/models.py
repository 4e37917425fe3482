"""The paper's two backbones, each as a stack of M networks (members) that are computed together.

Shapes: n examples, D inputs, H units, C classes, M members, V voters. A voter is an output with a
loss of its own: each member of an ensemble (V = M), or the average of all members' logits (V = 1).
Images are (n, channels, height, width), the same for all members, or (M, n, channels, height,
width). Activations of the MLP have examples last, (H, n): the first layer of all members is then
one product (M*H, D) @ (D, n) with M contiguous matrices as its result. Convolutions are grouped by
member.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (2, 2, 4, 4, 4)  # convolutions per block of VGG19 (Simonyan and Zisserman, 2015)
BATCH_NORM_EPSILON = 1e-5
Factory = Callable[[int, tuple[int, ...], int], nn.Module]
"""Builds a network of images (n, channels, height, width) -> logits (n, C), given the channels,
(height, width) and C. Initial weights come from torch's global generator."""
threshold_backward = torch.ops.aten.threshold_backward.default  # the gradient of ReLU


class Flops(NamedTuple):
    """FLOPs per example of matrix products and convolutions; a multiply-add counts as two."""

    forward: float  # in training
    backward: float
    inference: float  # forward in evaluation mode


class Dense(nn.Module):
    """M linear layers side by side: weight (M, out, in), bias (M, out, 1)."""

    def __init__(self, members: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(members, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (in, n), the same for all members, or (M, in, n) -> outputs (M, out, n)."""
        return dense(self.weight, self.bias, x)

    def reset(self, member: int, generator: torch.Generator) -> None:
        """Initialise one member as torch.nn.Linear: uniform within 1 / sqrt(in)."""
        uniform(self.weight.data[member], self.weight.shape[2], generator)
        uniform(self.bias.data[member], self.weight.shape[2], generator)

    @property
    def flops(self) -> float:
        """FLOPs per example of all members."""
        return 2.0 * self.weight.numel()


def dense(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Functional form of `Dense`: weight (M, out, in), bias (M, out, 1), x as in
    `Dense.forward`."""
    if x.dim() == 2:
        out = torch.addmm(bias.view(-1, 1), weight.view(-1, weight.shape[2]), x)
        return out.view(bias.shape[0], bias.shape[1], -1)
    return torch.baddbmm(bias, weight, x)


class Conv(nn.Module):
    """M 3x3 convolutions side by side with batch normalisation and ReLU; weight (M, out, in, 3,
    3)."""

    mean: Tensor  # running, (M, out)
    variance: Tensor

    def __init__(self, members: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.empty(members, outputs))
        self.scale = nn.Parameter(torch.empty(members, outputs))
        self.shift = nn.Parameter(torch.empty(members, outputs))
        self.register_buffer("mean", torch.empty(members, outputs))
        self.register_buffer("variance", torch.empty(members, outputs))

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """Images (n, M * in, H, W), or `shared` by all members (n, in, H, W) -> (n, M * out, H,
        W)."""
        groups = 1 if shared else len(self.weight)
        x = F.conv2d(x, self.weight.flatten(0, 1), self.bias.flatten(), padding=1, groups=groups)
        values = x.numel() // x.shape[1]  # values per channel; a single one has no variance
        x = F.batch_norm(
            x,
            self.mean.view(-1),
            self.variance.view(-1),
            self.scale.flatten(),
            self.shift.flatten(),
            training=self.training and values > 1,
            eps=BATCH_NORM_EPSILON,
        )
        return x.relu_()

    def reset(self, member: int, generator: torch.Generator) -> None:
        """Initialise one member as torch.nn.Conv2d and torch.nn.BatchNorm2d."""
        fan_in = self.weight[member, 0].numel()
        uniform(self.weight.data[member], fan_in, generator)
        uniform(self.bias.data[member], fan_in, generator)
        self.scale.data[member] = 1
        self.shift.data[member] = 0
        self.mean[member] = 0
        self.variance[member] = 1


class Backbone(nn.Module):
    """Base class of M networks. `joint`, "mean" or "sum", combines all members' logits into one
    voter."""

    def __init__(self, members: int, joint: str | None):
        super().__init__()
        self.members = members
        self.joint = joint

    @property
    def voters(self) -> int:
        """Number of outputs with a loss of their own, V."""
        return 1 if self.joint else self.members

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        """Initialise one member with the same values that a stack of one would get."""
        for layer in self.modules():
            if isinstance(layer, Dense | Conv):
                layer.reset(member, generator)


def combined(logits: Tensor, joint: str | None) -> Tensor:
    """Members' logits (M, C, n) -> voters' logits.

    Without `joint` they are the same, with "mean" or "sum" their mean or sum (1, C, n).
    """
    if joint is None:
        return logits
    return logits.mean(0, True) if joint == "mean" else logits.sum(0, True)


class MLP(Backbone):
    """Fully connected layers with ReLU; `widths` are D, H, ..., H, C (appendix B.1.1)."""

    def __init__(self, widths: Sequence[int], members: int = 1, joint: str | None = None):
        super().__init__(members, joint)
        self.widths = tuple(widths)
        layers = (Dense(members, d, h) for d, h in pairwise(widths))
        self.layers: Sequence[Dense] = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, ...) with D values each, or (M, n, channels, height, width) -> logits (V, C,
        n)."""
        layers = [(layer.weight, layer.bias) for layer in self.layers]
        return combined(_activations(layers, _rows(x).mT)[-1], self.joint)

    def train(self, mode: bool = True) -> "MLP":
        """Set the mode of this module only: its layers ignore the mode, and visiting them takes
        time."""
        self.training = mode
        return self

    def gradient_writer(self) -> Callable[[Tensor, Tensor], None]:
        """A function of images and labels, (n,) or (M, n), that writes each parameter's `grad`.

        The loss is the sum of the voters' mean cross-entropies. Formulas replace autograd, whose
        overhead exceeds the cost of products this small (log/).
        """
        layers = [(layer.weight.data, layer.bias.data) for layer in self.layers]
        gradients: list[Any] = [(layer.weight.grad, layer.bias.grad) for layer in self.layers]
        classes = torch.arange(self.widths[-1], device=layers[0][0].device)[:, None]
        share = 1 / self.members if self.joint == "mean" else 1.0

        def write(x: Tensor, labels: Tensor) -> None:
            x = _rows(x)
            n = labels.shape[-1]
            z = _activations(layers, x.mT)
            right = (classes == labels.unsqueeze(-2)).float()
            d = combined(z.pop(), self.joint).softmax(1).sub_(right).mul_(share / n)
            d = d.expand(self.members, -1, -1)
            for i in reversed(range(len(layers))):
                weight_gradient, bias_gradient = gradients[i]
                torch.sum(d, 2, keepdim=True, out=bias_gradient)
                if i == 0 and x.dim() == 2:  # all members see the same images: one product
                    torch.mm(d.view(-1, n), x, out=weight_gradient.view(-1, x.shape[1]))
                else:
                    torch.bmm(d, z[i].mT, out=weight_gradient)
                if i:
                    d = threshold_backward(torch.bmm(layers[i][0].mT, d), z[i], 0)

        return torch.no_grad()(write)

    @property
    def flops(self) -> Flops:
        """The backward pass costs twice the forward pass, less the gradient of the images."""
        layers = [layer.flops for layer in self.layers]
        return Flops(sum(layers), 2 * sum(layers) - layers[0], sum(layers))

    @property
    def footprint(self) -> int:
        """Floats per example that evaluation holds at a time: images and activations of all
        members."""
        return 2 * self.widths[0] + self.members * sum(self.widths[1:])


def _rows(x: Tensor) -> Tensor:
    """Flatten images: (n, ...) -> (n, D), (M, n, channels, height, width) -> (M, n, D)."""
    return x.flatten(2 if x.dim() == 5 else 1)


def _activations(layers: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> list[Tensor]:
    """Inputs (D, n) or (M, D, n) -> [inputs, outputs of each hidden layer after ReLU, logits (M, C,
    n)]."""
    values = [x]
    for index, (weight, bias) in enumerate(layers):
        inputs = values[-1] if index == 0 else values[-1].relu_()
        values.append(dense(weight, bias, inputs))
    return values


class VGG(Backbone):
    """The reduced VGG19 of section 5; `widths` are the channels of each convolution by block.

    Each block ends with 2x2 max-pooling unless the image is one pixel high or wide; the last
    feature map is averaged.
    """

    def __init__(
        self,
        shape: Sequence[int],
        widths: Sequence[Sequence[int]],
        classes: int,
        members: int = 1,
        joint: str | None = None,
    ):
        super().__init__(members, joint)
        self.shape = tuple(shape)
        self.widths = [list(block) for block in widths]
        inputs = [shape[0], *(block[-1] for block in widths)]
        blocks = (
            ConvBlock(members, size, block) for size, block in zip(inputs, widths, strict=False)
        )
        self.blocks: Sequence[ConvBlock] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.classifier = Dense(members, inputs[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, height, width), or (M, n, ...) -> logits (V, C, n)."""
        shared = x.dim() == 4
        if not shared:  # put the members' channels side by side, channels last in memory
            x = x.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
        for i, block in enumerate(self.blocks):
            x = block(x, shared and i == 0)
        return combined(self.classifier(pooled(x, self.members)), self.joint)

    @property
    def flops(self) -> Flops:
        """The backward pass costs twice the forward pass, less the gradient of the images."""
        forward = self.classifier.flops
        first = 0.0
        size = self.shape[1:]
        for block in self.blocks:
            layers, size = block.flops(size)
            first = first or layers[0]
            forward += sum(layers)
        return Flops(forward, 2 * forward - first, forward)

    @property
    def footprint(self) -> int:
        return footprint_of(self.blocks, self.shape)


class ConvBlock(nn.Module):
    """Convolutions and a 2x2 max-pooling, for M members side by side."""

    def __init__(self, members: int, inputs: int, widths: Sequence[int]):
        super().__init__()
        layers = (Conv(members, before, after) for before, after in pairwise([inputs, *widths]))
        self.layers: Sequence[Conv] = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """(n, M * in, H, W), or `shared` by all members (n, in, H, W) -> (n, M * out, H / 2, W /
        2)."""
        for i, layer in enumerate(self.layers):
            x = layer(x, shared and i == 0)
        return F.max_pool2d(x, 2) if min(x.shape[2:]) > 1 else x

    def flops(self, size: Sequence[int]) -> tuple[list[float], tuple[int, ...]]:
        """FLOPs of each convolution on an image of (height, width) `size`, and the size after the
        block."""
        flops = [2.0 * layer.weight.numel() * math.prod(size) for layer in self.layers]
        if min(size) > 1:
            return flops, tuple(side // 2 for side in size)
        return flops, tuple(size)


def footprint_of(blocks: Iterable["ConvBlock"], shape: Sequence[int]) -> int:
    """Floats per example that the largest layer of the blocks holds, for images of (channels,
    height, width) `shape`: its inputs, and its outputs before and after batch normalisation."""
    largest = 2 * math.prod(shape)  # images in two layouts
    size = tuple(shape[1:])
    for block in blocks:
        shapes = [layer.weight.shape for layer in block.layers]  # (M, out, in, 3, 3)
        channels = max(members * (before + 2 * after) for members, after, before, *_ in shapes)
        largest = max(largest, channels * math.prod(size))
        _, size = block.flops(size)
    return largest


def pooled(x: Tensor, members: int) -> Tensor:
    """Mean over the pixels: (n, M * c, H, W) -> (M, c, n)."""
    return x.mean((2, 3)).view(x.shape[0], members, -1).permute(1, 2, 0)


def mlp_widths(shape: Sequence[int], hidden: int, classes: int) -> list[int]:
    """Widths of the paper's three-layer MLP."""
    return [math.prod(shape), hidden, hidden, classes]


def vgg_widths(channels: int) -> list[list[int]]:
    """Channels of the paper's reduced VGG19, the same in every layer."""
    return [[channels] * depth for depth in BLOCKS]


def uniform(values: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill `values` uniformly within 1 / sqrt(fan_in), with the same values on every device."""
    bound = 1 / math.sqrt(fan_in)
    values.copy_(torch.empty(values.shape).uniform_(-bound, bound, generator=generator))
