"""Mixtures of experts that grow: tree or flat gating, soft or hard gates (section 4.2, appendix A).

Shapes: n examples, D inputs of a gating function, E experts. The experts of a layer are the members
of one stack (`vision.models`), so they are computed together.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vision.models import (
    Backbone,
    Conv,
    ConvBlock,
    Dense,
    Flops,
    combined,
    footprint_of,
    pooled,
    uniform,
)

POOLED = 4  # gating sees feature maps averaged to 4 x 4 pixels, as in the authors' code


class Gating(nn.Module):
    """The gating function g(j | z) of E experts. A tree has E - 1 inner nodes with two branches
    each; the gate value of a leaf is the product of the branch probabilities on its path (eq. 3).
    Flat gating is one softmax over the experts."""

    paths: Tensor  # (E, 2 (E - 1)): 1 for the branches on the path to each leaf; empty if flat

    def __init__(self, inputs: int, experts: int, tree: bool):
        super().__init__()
        self.tree = tree
        rows = 2 * (experts - 1) if tree else experts
        self.weight = nn.Parameter(torch.empty(rows, inputs))
        self.bias = nn.Parameter(torch.empty(rows, 1))
        self.register_buffer("paths", torch.zeros(1, 0))
        for leaf in range(experts - 1 if tree else 0):
            self._split_path(leaf)  # breadth first, so that the tree is balanced

    def forward(self, z: Tensor) -> Tensor:
        """Inputs (D, n) -> gate values (E, n); they sum to 1 over the experts."""
        logits = torch.addmm(self.bias, self.weight, z)
        if not self.tree:
            return logits.softmax(0)
        branches = logits.view(-1, 2, z.shape[1]).log_softmax(1).flatten(0, 1)
        return torch.mm(self.paths, branches).exp()

    def choose(self, z: Tensor) -> Tensor:
        """Inputs (D, n) -> the chosen expert (n,), by the more probable branch at each node.

        This is not the argmax of the gate values. When an expert is split, its gate value is
        divided between two leaves; the argmax could then move its examples to a third expert,
        whereas here they stay with the two.
        """
        logits = torch.addmm(self.bias, self.weight, z)
        if not self.tree:
            return logits.argmax(0)
        first, second = logits.view(-1, 2, z.shape[1]).unbind(1)
        taken = torch.stack([first >= second, first < second], 1).flatten(0, 1).to(z.dtype)
        return (torch.mm(self.paths, taken) - self.paths.sum(1, keepdim=True)).argmax(0)

    def reset(self, generator: torch.Generator) -> None:
        """Initialise all gates as torch.nn.Linear."""
        for values in (self.weight.data, self.bias.data):
            uniform(values, self.weight.shape[1], generator)

    def split(self, expert: int, generator: torch.Generator) -> None:
        """Add expert E. In a tree, the leaf becomes a node with a random gate; its children are
        `expert` and the new one. Flat gating gets one more random row."""
        new_rows = 2 if self.tree else 1
        device = self.weight.device
        for name in ("weight", "bias"):
            old = getattr(self, name).data
            new = torch.empty(new_rows, old.shape[1])
            uniform(new, self.weight.shape[1], generator)
            setattr(self, name, nn.Parameter(torch.cat([old, new.to(device)])))
        if self.tree:
            self._split_path(expert)

    def _split_path(self, leaf: int) -> None:
        """Add a node at `leaf`, whose second child is a new leaf."""
        grown = F.pad(self.paths, (0, 2, 0, 1))
        grown[-1] = grown[leaf]
        grown[leaf, -2] = grown[-1, -1] = 1
        self.paths = grown

    @property
    def flops(self) -> float:
        """FLOPs per example: logits, and sums along the paths."""
        return 2.0 * (self.weight.numel() + self.paths.numel())


class MixtureLayer(nn.Module):
    """Experts h and their gating function g: the sum over j of g(j | z) h(z | j). Hard gates are
    one-hot in the forward pass; in the backward pass the gradient goes to the gate probabilities
    (straight-through estimator)."""

    def __init__(self, experts: Dense | ConvBlock, router: Gating, hard: bool):
        super().__init__()
        self.experts = experts
        self.router = router
        self.hard = hard

    def forward(self, z: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Layer inputs -> layer outputs and gate values (E, n).

        In training, `generator` samples hard gates; in evaluation, only the chosen expert is
        computed.
        """
        if self.hard and not self.training:
            chosen = self.router.choose(self.features(z))
            z = self.apply_chosen(z, chosen)
            return z, F.one_hot(chosen, self.size).T.to(z.dtype)
        gates = self.router(self.features(z))
        if self.hard:
            drawn = torch.rand(gates.shape[1], generator=generator).to(z.device)
            chosen = (gates.detach().cumsum(0) < drawn).sum(0).clamp_(max=len(gates) - 1)
            gates = F.one_hot(chosen, len(gates)).T + gates - gates.detach()
        return self.combine(z, gates), gates

    def apply_chosen(self, z: Tensor, chosen: Tensor) -> Tensor:
        """Outputs of the expert `chosen` (n,) for each example; each expert computes its examples
        at once."""
        dimension = 1 if z.dim() == 2 else 0  # where the examples are in z
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=self.size).tolist()
        parts = z.index_select(dimension, order).split(counts, dimension)
        tensors = self.experts.state_dict(keep_vars=True)
        outputs = []
        for expert, part in enumerate(parts):
            if counts[expert] == 0:
                continue
            weights = {name: tensor[expert : expert + 1] for name, tensor in tensors.items()}
            if isinstance(self.experts, Dense):
                outputs.append(functional_call(self.experts, weights, part)[0].relu())
            else:
                outputs.append(functional_call(self.experts, weights, (part, True)))
        return torch.cat(outputs, dimension).index_select(dimension, order.argsort())

    def features(self, z: Tensor) -> Tensor:
        """Inputs of the gating function: (D, n) as they are, (n, c, H, W) averaged to 4 x 4
        pixels."""
        return F.adaptive_avg_pool2d(z, POOLED).flatten(1).t() if z.dim() == 4 else z

    def combine(self, z: Tensor, gates: Tensor) -> Tensor:
        """Outputs of all experts, weighted with the gates (E, n)."""
        if isinstance(self.experts, Dense):
            return (self.experts(z).relu() * gates[:, None]).sum(0)
        out = self.experts(z, shared=True)
        out = out.view(len(z), len(gates), -1, *out.shape[2:])
        return (out * gates.t()[:, :, None, None, None]).sum(1)

    @property
    def size(self) -> int:
        """Number of experts, E."""
        return len(next(self.experts.parameters()))

    def split(self, expert: int, generator: torch.Generator) -> None:
        """Split `expert`: append a copy of it, with a random gate between the two."""
        for module in self.experts.modules():
            parameters = list(module.named_parameters(recurse=False))
            buffers = list(module.named_buffers(recurse=False))
            for name, old in parameters:
                setattr(module, name, nn.Parameter(_repeated(old.data, expert)))
            for name, buffer in buffers:
                setattr(module, name, _repeated(buffer, expert))
        self.router.split(expert, generator)


def _repeated(tensor: Tensor, expert: int) -> Tensor:
    """The tensor with another copy of row `expert` at the end."""
    return torch.cat([tensor, tensor[expert : expert + 1]])


class Mixture(nn.Module):
    """A network with mixture layers: an MLP, or a VGG, whose `head` is a block of convolutions on
    images of (channels, height, width) `shape`."""

    members = voters = 1

    def __init__(
        self,
        layers: Iterable[MixtureLayer],
        classifier: Dense,
        head: ConvBlock | None = None,
        shape: Sequence[int] = (),
    ):
        super().__init__()
        self.layers: Sequence[MixtureLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.classifier = classifier
        self.head = head
        self.shape = tuple(shape)
        self.generator: torch.Generator | None = None  # samples hard gates in training

    def draw_from(self, generators: Sequence[torch.Generator]) -> None:
        """Sample hard gates with the first of the `generators`."""
        self.generator = generators[0]

    @property
    def experts(self) -> int:
        """Experts per layer, E."""
        return self.layers[0].size

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        """Initialise all parameters."""
        for module in self.modules():
            if isinstance(module, Gating):
                module.reset(generator)
            elif isinstance(module, Dense | Conv):
                for expert in range(len(module.weight)):
                    module.reset(expert, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, ...) -> logits (1, C, n)."""
        return self.routed(x)[0]

    def routed(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Images (n, ...) -> logits (1, C, n) and the gate values (E, n) of each mixture layer."""
        z = self.head(x, shared=True) if self.head else x.flatten(1).t()
        gates = []
        for layer in self.layers:
            z, layer_gates = layer(z, self.generator)
            gates.append(layer_gates)
        if self.head:
            z = pooled(z, 1)
        return self.classifier(z), gates

    @property
    def flops(self) -> Flops:
        """FLOPs per example. The backward pass costs twice the forward pass, less the gradients of
        the images and of the paths."""
        head: list[float] = []
        size: tuple[int, ...] = ()
        if self.head:
            head, size = self.head.flops(self.shape[1:])
        experts = []
        for layer in self.layers:
            if isinstance(layer.experts, Dense):
                experts.append(layer.experts.flops)
            else:
                layers, size = layer.experts.flops(size)
                experts.append(sum(layers))
        routers = [layer.router.flops for layer in self.layers]
        paths = [2.0 * layer.router.paths.numel() for layer in self.layers]
        forward = sum(head) + sum(experts) + sum(routers) + self.classifier.flops
        first = head[0] if head else experts[0] + routers[0] - paths[0]
        unused = sum(experts) * (1 - 1 / self.experts) if self.layers[0].hard else 0.0
        return Flops(forward, 2 * forward - first - sum(paths), forward - unused)

    @property
    def footprint(self) -> int:
        """Floats per example that evaluation holds at a time: images and activations of all
        experts."""
        experts: list[Any] = [layer.experts for layer in self.layers]
        if self.head:
            return footprint_of([self.head, *experts], self.shape)
        shapes = [stack.weight.shape for stack in experts]  # (E, out, in)
        return max(2 * inputs + 3 * number * outputs for number, outputs, inputs in shapes)


def mixture_mlp(widths: Sequence[int], experts: int, tree: bool, hard: bool) -> Mixture:
    """The MLP with a mixture at each hidden layer (section 5); experts are linear layers with
    ReLU."""
    *sizes, last = pairwise(widths)
    layers = [MixtureLayer(Dense(experts, d, h), Gating(d, experts, tree), hard) for d, h in sizes]
    return Mixture(layers, Dense(1, *last))


def mixture_vgg(
    shape: Sequence[int],
    widths: Sequence[list[int]],
    classes: int,
    experts: int,
    tree: bool,
    hard: bool,
) -> Mixture:
    """The reduced VGG19, `widths` as in `VGG`, with a mixture at each block but the first.

    Experts are blocks of convolutions.
    """
    layers = []
    for (*_, inputs), block in pairwise(widths):
        gating = Gating(inputs * POOLED**2, experts, tree)
        layers.append(MixtureLayer(ConvBlock(experts, inputs, block), gating, hard))
    classifier = Dense(1, widths[-1][-1], classes)
    head = ConvBlock(1, shape[0], widths[0])
    return Mixture(layers, classifier, head, shape)


class Committee(Backbone):
    """M whole networks (of torchvision or the user), computed one after the other.

    Each is a voter unless `joint` combines their logits.
    """

    def __init__(self, networks: Sequence[Any], joint: str | None = None):
        super().__init__(len(networks), joint)
        self.networks: Sequence[Any] = nn.ModuleList(networks)  # type: ignore[assignment]

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        self.networks[member].reset(generator)

    def draw_from(self, generators: Sequence[torch.Generator]) -> None:
        """Sample dropout with one generator per member, or with a single one for all."""
        for network, generator in zip(self.networks, cycle(generators), strict=False):
            network.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, ...), the same for all members, or (M, n, ...) -> logits (V, C, n)."""
        images = x if x.dim() == 5 else [x] * self.members
        logits = [network(part) for network, part in zip(self.networks, images, strict=True)]
        return combined(torch.cat(logits), self.joint)

    @property
    def flops(self) -> Flops:
        flops = [network.flops for network in self.networks]
        return Flops(
            forward=sum(cost.forward for cost in flops),
            backward=sum(cost.backward for cost in flops),
            inference=sum(cost.inference for cost in flops),
        )

    @property
    def footprint(self) -> int:
        """Floats per example that evaluation holds at a time; networks are computed one after the
        other."""
        return max(network.footprint for network in self.networks)
