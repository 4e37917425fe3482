"""The paper's two backbones, each as a stack of M members that are computed together.

Shapes: n examples, D inputs, H units, C classes, M members, V voters. A voter is what is trained on a
loss of its own: every member of an ensemble (V = M), or one average of all members' logits (V = 1).
Images are (n, channels, height, width), the same for all members, or (M, n, channels, height, width).
Activations of the MLP have the examples last, (H, n), so that the first layer of all members is one
product (M*H, D) @ (D, n) and its result is M contiguous matrices. Convolutions are grouped by member.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (2, 2, 4, 4, 4)
"""Convolutions of each block of VGG19 (Simonyan and Zisserman); a 2x2 max-pooling ends each block."""

BATCH_NORM_EPSILON = 1e-5
threshold_backward = torch.ops.aten.threshold_backward.default  # the gradient of ReLU


class Flops(NamedTuple):
    """FLOPs for one example: matrix products and convolutions, two for each multiplication and addition."""

    forward: float  # in training
    backward: float
    inference: float  # a prediction in evaluation mode


class Dense(nn.Module):
    """M linear layers side by side: weight (M, out, in), bias (M, out, 1)."""

    def __init__(self, members: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(members, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(in, n), the same for all members, or (M, in, n) -> (M, out, n)."""
        return dense(self.weight, self.bias, x)

    def reset(self, member: int, generator: torch.Generator) -> None:
        """Draw one member's values as torch.nn.Linear does: uniform within 1 / sqrt(in)."""
        uniform(self.weight.data[member], self.weight.shape[2], generator)
        uniform(self.bias.data[member], self.weight.shape[2], generator)

    @property
    def flops(self) -> float:
        """Of one example through all members."""
        return 2.0 * self.weight.numel()


def dense(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """`Dense` as a function of its weight (M, out, in) and bias (M, out, 1)."""
    if x.dim() == 2:
        out = torch.addmm(bias.view(-1, 1), weight.view(-1, weight.shape[2]), x)
        return out.view(bias.shape[0], bias.shape[1], -1)
    return torch.baddbmm(bias, weight, x)


class Conv(nn.Module):
    """M 3x3 convolutions side by side with batch normalisation and ReLU; weight (M, out, in, 3, 3)."""

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
        """(n, M * in, H, W), or `shared` (n, in, H, W) for all members, -> (n, M * out, H, W)."""
        groups = 1 if shared else len(self.weight)
        x = F.conv2d(x, self.weight.flatten(0, 1), self.bias.flatten(), padding=1, groups=groups)
        statistics = self.mean.view(-1), self.variance.view(-1), self.scale.flatten(), self.shift.flatten()
        values = x.numel() // x.shape[1]  # a single one has no variance
        x = F.batch_norm(x, *statistics, self.training and values > 1, eps=BATCH_NORM_EPSILON)
        return x.relu_()

    def reset(self, member: int, generator: torch.Generator) -> None:
        """Draw one member's values as torch.nn.Conv2d and torch.nn.BatchNorm2d do."""
        fan_in = self.weight[member, 0].numel()
        uniform(self.weight.data[member], fan_in, generator)
        uniform(self.bias.data[member], fan_in, generator)
        for ones, zeros in ((self.scale.data, self.shift.data), (self.variance, self.mean)):
            ones[member], zeros[member] = 1, 0


class Backbone(nn.Module):
    """What both backbones share. `joint` makes one voter of all members: "mean" or "sum" of their logits."""

    def __init__(self, members: int, joint: str | None):
        super().__init__()
        self.members, self.joint = members, joint

    @property
    def voters(self) -> int:
        """Number of independently trained outputs, V."""
        return 1 if self.joint else self.members

    @property
    def flops(self) -> Flops:
        """Per example, of all members."""
        raise NotImplementedError

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        """Draw new values for one member: the same as those of a stack of one."""
        for layer in self.modules():
            if isinstance(layer, Dense | Conv):
                layer.reset(member, generator)

    def vote(self, logits: Tensor) -> Tensor:
        """Logits of the members (M, C, n) -> those of the voters (V, C, n)."""
        if self.joint is None:
            return logits
        return logits.mean(0, True) if self.joint == "mean" else logits.sum(0, True)


class MLP(Backbone):
    """Fully connected layers with ReLU between them: `widths` are D, H, ..., H, C (appendix B.1.1)."""

    def __init__(self, widths: Sequence[int], members: int = 1, joint: str | None = None):
        super().__init__(members, joint)
        self.widths = tuple(widths)
        self.layers: Sequence[Dense] = nn.ModuleList(  # type: ignore[assignment]
            Dense(members, d, h) for d, h in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, ...) of D values, or (M, n, channels, height, width) -> logits (V, C, n)."""
        layers = [(layer.weight, layer.bias) for layer in self.layers]
        return self.vote(_activations(layers, _rows(x).mT)[-1])

    def train(self, mode: bool = True) -> "MLP":
        """Nothing to tell the layers, which do the same in training and evaluation."""
        self.training = mode
        return self

    def gradient_writer(self) -> Callable[[Tensor, Tensor], None]:
        """A function of images and labels, (n,) or (M, n), that writes the gradient of the voters' summed
        mean cross-entropies to each parameter's `grad`.

        By the formulas rather than by autograd, whose book-keeping takes longer than these small products
        (LOG.md).
        """
        layers = [(layer.weight.data, layer.bias.data) for layer in self.layers]
        gradients: list[Any] = [(layer.weight.grad, layer.bias.grad) for layer in self.layers]
        classes = torch.arange(self.widths[-1], device=layers[0][0].device)[:, None]
        share = 1 / self.members if self.joint == "mean" else 1.0

        def write(x: Tensor, labels: Tensor) -> None:
            x, n = _rows(x), labels.shape[-1]
            z = _activations(layers, x.mT)
            right = (classes == labels.unsqueeze(-2)).float()
            d = self.vote(z.pop()).softmax(1).sub_(right).mul_(share / n).expand(self.members, -1, -1)
            for i in reversed(range(len(layers))):
                weight_gradient, bias_gradient = gradients[i]
                torch.sum(d, 2, keepdim=True, out=bias_gradient)
                if i == 0 and x.dim() == 2:  # of all members at once
                    torch.mm(d.view(-1, n), x, out=weight_gradient.view(-1, x.shape[1]))
                else:
                    torch.bmm(d, z[i].mT, out=weight_gradient)
                if i:
                    d = threshold_backward(torch.bmm(layers[i][0].mT, d), z[i], 0)

        return torch.no_grad()(write)

    @property
    def flops(self) -> Flops:
        """Backward, every layer costs twice its forward, but the first has no gradient of its input."""
        layers = [layer.flops for layer in self.layers]
        return Flops(sum(layers), 2 * sum(layers) - layers[0], sum(layers))


def _rows(x: Tensor) -> Tensor:
    """Images as rows: (n, ...) -> (n, D), (M, n, channels, height, width) -> (M, n, D)."""
    return x.flatten(2 if x.dim() == 5 else 1)


def _activations(layers: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> list[Tensor]:
    """x, (D, n) or (M, D, n), the outputs of the hidden layers after their ReLU, and the members' logits
    (M, C, n)."""
    found = [x]
    for weight, bias in layers:
        found.append(dense(weight, bias, found[-1] if len(found) == 1 else found[-1].relu_()))
    return found


class VGG(Backbone):
    """The reduced VGG19 of section 5: `widths` are the channels of each convolution of each block.

    Blocks end in 2x2 max-pooling while the image has 2 pixels; what is left of larger ones is averaged.
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
        self.shape, self.widths = tuple(shape), [list(block) for block in widths]
        blocks, inputs = [], shape[0]
        for block in widths:
            blocks.append(ConvBlock(members, inputs, block))
            inputs = block[-1]
        self.blocks: Sequence[ConvBlock] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.classifier = Dense(members, inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, height, width), or (M, n, ...) -> logits (V, C, n)."""
        shared = x.dim() == 4
        if not shared:  # the members' channels side by side, channels last in memory
            x = x.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
        for i, block in enumerate(self.blocks):
            x = block(x, shared and i == 0)
        return self.vote(self.classifier(pooled(x, self.members)))

    @property
    def flops(self) -> Flops:
        """Backward, every layer costs twice its forward, but the first has no gradient of its input."""
        forward, first, size = self.classifier.flops, 0.0, self.shape[1:]
        for block in self.blocks:
            layers, size = block.flops(size)
            first = first or layers[0]
            forward += sum(layers)
        return Flops(forward, 2 * forward - first, forward)


class ConvBlock(nn.Module):
    """Some convolutions and a 2x2 max-pooling, for M members side by side."""

    def __init__(self, members: int, inputs: int, widths: Sequence[int]):
        super().__init__()
        sizes = zip([inputs, *widths[:-1]], widths, strict=True)
        self.layers: Sequence[Conv] = nn.ModuleList(  # type: ignore[assignment]
            Conv(members, before, after) for before, after in sizes
        )

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """(n, M * in, H, W), or `shared` (n, in, H, W), -> (n, M * out, H / 2, W / 2)."""
        for i, layer in enumerate(self.layers):
            x = layer(x, shared and i == 0)
        return F.max_pool2d(x, 2) if min(x.shape[2:]) > 1 else x

    def flops(self, size: Sequence[int]) -> tuple[list[float], tuple[int, ...]]:
        """Of each convolution for an image of height and width `size`, and the size after the block."""
        halved = tuple(s // 2 for s in size) if min(size) > 1 else tuple(size)
        return [2.0 * layer.weight.numel() * math.prod(size) for layer in self.layers], halved


def pooled(x: Tensor, members: int) -> Tensor:
    """Mean over the image: (n, M * c, H, W) -> (M, c, n)."""
    return x.mean((2, 3)).view(len(x), members, -1).permute(1, 2, 0)


def mlp_widths(shape: Sequence[int], hidden: int, classes: int) -> list[int]:
    """Sizes of the paper's three-layer MLP."""
    return [math.prod(shape), hidden, hidden, classes]


def vgg_widths(channels: int) -> list[list[int]]:
    """Channels of the paper's reduced VGG19: the same in every layer."""
    return [[channels] * depth for depth in BLOCKS]


def uniform(values: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Drawn on the CPU, so that a seed means the same on every device."""
    bound = 1 / math.sqrt(fan_in)
    values.copy_(torch.empty(values.shape).uniform_(-bound, bound, generator=generator))
