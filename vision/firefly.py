"""Growth of a network in width and depth (Wu et al. 2020, "Firefly Neural Architecture Descent").

A network is first over-grown with candidates: every neuron split in two, some new neurons, a new layer
wherever one fits. Each candidate is a perturbation p of the network, which at p = 0 keeps its function; a
few gradient steps turn the perturbations to where the loss falls, one more pass over the data scores them,
and the best for their size are planted. Both backbones of `vision.models` are seen as a chain of hidden
layers and a classifier, with M = 1; a neuron is a channel where the layer is a convolution.

Shapes: n examples, I inputs and H neurons of a hidden layer, O neurons of the layer after it, K new
neurons, S the kernel, () or (3, 3). Activations are (n, H) or (n, H, height, width).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.models import BATCH_NORM_EPSILON, MLP, VGG, Conv, Dense, uniform
from vision.train import Examples

RADIUS = 0.05
"""Norm of a perturbation: of a neuron's incoming weights, as a share of their norm; of a new neuron's
outgoing weights, as a share of the mean norm of the others'; of what a new layer adds to the identity. Much
more changes the function, much less leaves the copies of a neuron alike and prefers new layers, whose effect
is of the first order (splits: the second)."""

MEASURED = 512
"""Examples that set the batch normalisation of candidates; more would take more memory than training."""

_VALUES = (0, 2, 3)  # dimensions of a channel's values

_VECTORS = {Dense: ("bias",), Conv: ("bias", "scale", "shift", "mean", "variance")}


class Choice(NamedTuple):
    """What a hidden layer gets: the neurons (s,) that are split, the new ones (k,) of the candidates that
    are planted, and whether a layer comes after it."""

    split: Tensor
    new: Tensor
    layer: bool


class Sprouts:
    """A hidden layer and its candidates, all kinds with the candidates first.

    `split` (H, I, *S) moves the two copies of a neuron to theta + p and theta - p; `outgoing` (K, O, *S) are
    the outgoing weights of the new neurons, whose incoming ones `new` (K, I, *S) are random; `layer`
    (1, H, H, *S), or with 0 in front where none fits, is what a new layer adds to the identity.
    """

    def __init__(
        self, layer: Any, after: Any, new: int, deepen: bool, pool: bool, generator: torch.Generator
    ):
        self.weight, self.pool = layer.weight.data[0], pool
        self.vectors = torch.stack([getattr(layer, name).data.flatten() for name in _VECTORS[type(layer)]])
        (neurons, inputs), kernel = self.weight.shape[:2], self.weight.shape[2:]
        outgoing = after.weight.data[0].transpose(0, 1)
        self.split = self._drawn(self.weight.shape, _norms(self.weight), generator)
        self.outgoing = self._drawn((new, *outgoing.shape[1:]), _norms(outgoing).mean(), generator)
        identity = self._identity(neurons)
        self.layer = self._drawn((int(deepen), *identity.shape), self.weight.new_ones(()), generator)
        incoming = torch.empty(new, inputs, *kernel)
        uniform(incoming, incoming[0].numel(), generator)
        self.new = incoming.to(self.weight.device)
        self.fresh = self.vectors.new_zeros(len(self.vectors), new)  # like `vectors`, of the new neurons
        self.identity = self.vectors.new_zeros(len(self.vectors), neurons + new)  # of a new layer, H + K

    def _drawn(self, shape: Sequence[int], norm: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randn(*shape, generator=generator).to(self.weight.device)
        return F.normalize(drawn.flatten(1)).mul_(RADIUS * norm[..., None]).view(shape).requires_grad_()

    def _identity(self, neurons: int) -> Tensor:
        """The weight (neurons, neurons, *S) that changes nothing."""
        eye = torch.eye(neurons, device=self.weight.device)
        return F.pad(eye[..., None, None], (1, 1, 1, 1)) if self.weight.dim() == 4 else eye

    @property
    def perturbations(self) -> list[Tensor]:
        """In the order of `Choice`."""
        return [self.split, self.outgoing, self.layer]

    def __call__(self, x: Tensor, carried: Tensor | float, measure: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs (n, I, ...), and what new neurons before add to the neurons (n, H, ...) -> the activations
        (n, H, ...) and what the new neurons here add to those of the next layer."""
        neurons = len(self.weight)
        products = product(torch.cat([self.weight, self.split, self.new]), x)
        before, moved, new = products.split([neurons, neurons, len(self.new)], 1)
        before = before + carried
        if measure:
            self._measure(before, new)
        plus, minus = (_normalised(values, self.vectors) for values in (before + moved, before - moved))
        fresh = _normalised(new, self.fresh)
        if self.pool:  # of each copy of its own, as it will be
            plus, minus, fresh = (F.max_pool2d(values, 2) for values in (plus, minus, fresh))
        x = (plus + minus) / 2
        for weight in self.layer:
            x = (x + product(weight, x)).relu()
        return x, product(self.outgoing.transpose(0, 1), fresh)

    def _measure(self, before: Tensor, new: Tensor) -> None:
        """Set the batch normalisation of new neurons and of a new layer by what they normalise: convolutions
        (n, H, ...) and (n, K, ...)."""
        values = new.numel() // new.shape[1]
        variance, mean = torch.var_mean(new, _VALUES, correction=0)
        # One value more, at 1 from the mean: few or dead examples would give a variance near 0.
        variance = (variance * values + 1) / (values + 1)
        self.fresh = torch.stack([mean * 0, mean * 0 + 1, mean * 0, mean, variance])
        after = _normalised(before, self.vectors), _normalised(new, self.fresh)
        variance, mean = torch.var_mean(torch.cat(after, 1), _VALUES, correction=0)
        # Scaling back what it normalises, it is the identity in evaluation, and about that in training.
        scale = (variance + BATCH_NORM_EPSILON).sqrt()
        self.identity = torch.stack([mean * 0, scale, mean, mean, variance])

    def wider(self, split: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Weight (H + s + k, I, *S) and vectors (., H + s + k): neurons, second copies, new ones."""
        plus = self.weight.clone()
        plus[split] += self.split[split]
        minus = self.weight[split] - self.split[split]
        vectors = torch.cat([self.vectors, self.vectors[:, split], self.fresh[:, new]], 1)
        return torch.cat([plus, minus, self.new[new]]), vectors

    def deeper(self, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer after this one: its weights from the neurons (H + k, H, *S) and from the planted new
        ones (H + k, k, *S), which it hands on as they are, and its vectors (., H + k)."""
        neurons, both = len(self.weight), self._identity(len(self.weight) + len(new))
        both[:neurons, :neurons] += self.layer[0]
        chosen = torch.cat([torch.arange(neurons, device=new.device), neurons + new])
        return both[:, :neurons], both[:, neurons:], self.identity[:, chosen]


class Overgrown:
    """An MLP or VGG (M = 1) in evaluation mode, with all splits, `new` candidates for new neurons in each
    hidden layer, and where `depth` is true a new layer after each that is not followed by pooling."""

    def __init__(self, model: MLP | VGG, new: int, depth: bool, generator: torch.Generator):
        self.model, (*hidden, self.classifier) = model, layers_of(model)
        self.pixels, pools = _pixels(model)
        after = [*hidden[1:], self.classifier]
        self.sprouts = [
            Sprouts(layer, follower, new, depth and not pool, pool, generator)
            for layer, follower, pool in zip(hidden, after, pools, strict=True)
        ]
        self.perturbations = [p for sprouts in self.sprouts for p in sprouts.perturbations]

    def __call__(self, x: Tensor, measure: bool = False) -> Tensor:
        """Images (n, ...) -> logits (n, C)."""
        carried: Tensor | float = 0.0
        x = x.flatten(1) if isinstance(self.model, MLP) else x
        for sprouts in self.sprouts:
            x, carried = sprouts(x, carried, measure)
        return product(self.classifier.weight.data[0], x) + self.classifier.bias.data.flatten() + carried

    @torch.no_grad()
    def measure(self, images: Tensor) -> float:
        """Set the batch normalisation of all candidates on some of the images; returns the FLOPs."""
        if isinstance(self.model, MLP):
            return 0.0
        self(images[:MEASURED], measure=True)
        return min(MEASURED, len(images)) * self.flops[0]

    def gradients(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Of the mean cross-entropy, by the perturbations."""
        loss = F.cross_entropy(self(images), labels)
        return list(torch.autograd.grad(loss, self.perturbations, materialize_grads=True))

    def tune(self, batches: Iterable[Examples]) -> float:
        """Turn the perturbations, each of a norm that stays, to where the loss falls; returns the FLOPs.

        All of them at full size would move a deep network too far for its gradient to say what a few of
        them do: meanwhile they are smaller by the number of layers."""
        self._resize(1 / len(self.sprouts))
        seen = 0
        for images, labels in batches:
            found = self.gradients(images, labels)
            for p, gradient in zip(self.perturbations, found, strict=True):
                turned = F.normalize(p.detach().flatten(1)) - F.normalize(gradient.flatten(1))
                p.data = F.normalize(turned).mul_(_norms(p.data)[:, None]).view(p.shape)
            seen += len(labels)
        self._resize(len(self.sprouts))
        return seen * sum(self.flops)

    def _resize(self, factor: float) -> None:
        for p in self.perturbations:
            p.data *= factor

    def scores(self, batches: Iterable[Examples]) -> tuple[list[Tensor], float]:
        """For each tensor of `perturbations`, (candidates,): the derivative of the mean loss by a factor
        epsilon of each candidate. At epsilon = 1, as in the authors' code: at 0 that of a split is 0, and
        that of a layer says nothing of how soon it overshoots. And the FLOPs."""
        total, seen = [torch.zeros_like(p) for p in self.perturbations], 0
        for images, labels in batches:
            for sums, gradient in zip(total, self.gradients(images, labels), strict=True):
                sums += gradient * len(labels)
            seen += len(labels)
        pairs = zip(self.perturbations, total, strict=True)
        found = [(p.data * sums).flatten(1).sum(1) / seen for p, sums in pairs]
        return found, seen * sum(self.flops)

    @property
    def flops(self) -> tuple[float, float]:
        """Forward and backward for one example, counted as in `vision.models.Flops`; backward, the weights
        of the classifier have no gradient."""
        forward, head = 0.0, 2.0 * self.classifier.weight.numel()
        for sprouts, now, after in zip(self.sprouts, self.pixels, [*self.pixels[1:], 1], strict=True):
            weights = 2 * sprouts.weight.numel() + sprouts.new.numel() + sprouts.layer.numel()
            forward += 2.0 * (weights * now + sprouts.outgoing.numel() * after)
        first = self.sprouts[0]
        images = 2.0 * (2 * first.weight.numel() + first.new.numel()) * self.pixels[0]
        return forward + head, 2 * forward + head - images

    def select(self, scores: Sequence[Tensor], budget: float) -> list[Choice]:
        """The candidates with the largest decrease of loss for each parameter that they add, until about
        `budget` parameters are added: a candidate is passed over if the sum is nearer without it.

        The costs in the order are those of each candidate alone; in the sum, those of all together."""
        counts = [[0, 0, 0] for _ in self.sprouts]
        present = self.parameters(counts)
        order = []
        for at, values in enumerate(scores):
            counts[at // 3][at % 3] = 1
            cost = self.parameters(counts) - present
            counts[at // 3][at % 3] = 0
            order += [(value / cost, at, which) for which, value in enumerate(values.tolist())]
        order.sort()
        chosen: list[list[int]] = [[] for _ in scores]
        added = 0
        for _, at, which in order:
            counts[at // 3][at % 3] += 1
            more = self.parameters(counts) - present
            if abs(more - budget) < abs(added - budget):
                chosen[at].append(which)
                added = more
            else:
                counts[at // 3][at % 3] -= 1
        if not added:
            chosen[order[0][1]].append(order[0][2])
        return [self._choice(*chosen[at : at + 3]) for at in range(0, len(chosen), 3)]

    def _choice(self, split: list[int], new: list[int], layer: list[int]) -> Choice:
        device = self.classifier.weight.device
        indices = [torch.tensor(sorted(w), dtype=torch.long, device=device) for w in (split, new)]
        return Choice(indices[0], indices[1], bool(layer))

    def parameters(self, counts: Sequence[Sequence[int]]) -> int:
        """Of the network with (splits, new neurons, new layers) at each hidden layer."""
        first = self.sprouts[0].weight
        taps, vectors = first[0, 0].numel(), 1 if first.dim() == 2 else 3
        outputs = [first.shape[1], *chain(*self._outputs(counts))]
        hidden = sum((taps * before + vectors) * after for before, after in pairwise(outputs))
        return hidden + (outputs[-1] + 1) * self.classifier.weight.shape[1]

    def _outputs(self, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Neurons of each hidden layer followed by those of the layer planted after it."""
        neurons = [len(sprouts.weight) for sprouts in self.sprouts]
        return [[h + s + k] + [h + k] * layer for h, (s, k, layer) in zip(neurons, counts, strict=True)]

    def widths(self, choices: Sequence[Choice]) -> list[Any]:
        """Of the network with the choices, as MLP and VGG take them."""
        outputs = self._outputs([(len(split), len(new), int(layer)) for split, new, layer in choices])
        if isinstance(self.model, MLP):
            return [self.model.widths[0], *chain(*outputs), self.model.widths[-1]]
        rest = iter(outputs)
        return [list(chain(*islice(rest, len(block)))) for block in self.model.widths]

    @torch.no_grad()
    def plant(self, choices: Sequence[Choice], model: MLP | VGG) -> None:
        """Write this network with the choices, and nothing of the other candidates, to `model`, which is of
        `widths(choices)`."""
        for layer, (weight, vectors) in zip(layers_of(model), self._layers(choices), strict=True):
            layer.weight[0] = weight
            for name, values in zip(_VECTORS[type(layer)], vectors, strict=True):
                getattr(layer, name).view(-1).copy_(values)

    def _layers(self, choices: Sequence[Choice]) -> Iterable[tuple[Tensor, Tensor]]:
        """Weight and vectors of each layer of the grown network."""
        first = self.sprouts[0].weight
        split, outgoing = choices[0].split[:0], first[:, :0]
        for sprouts, choice in zip(self.sprouts, choices, strict=True):
            weight, vectors = sprouts.wider(choice.split, choice.new)
            unused = outgoing.new_zeros(len(choice.new), *outgoing.shape[1:])
            yield _columns(weight, split, torch.cat([outgoing, outgoing[choice.split], unused])), vectors
            split, outgoing = choice.split, sprouts.outgoing[choice.new].transpose(0, 1)
            if choice.layer:
                weight, kept, vectors = sprouts.deeper(choice.new)
                yield _columns(weight, split, kept), vectors
                split = split[:0]
        head = self.classifier
        yield _columns(head.weight.data[0], split, outgoing), head.bias.data.view(1, -1)


def layers_of(model: MLP | VGG) -> list[Any]:
    """The layers in order, the classifier last."""
    if isinstance(model, MLP):
        return list(model.layers)
    return [*(layer for block in model.blocks for layer in block.layers), model.classifier]


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Weight (H, I, *S) times activations (n, I, ...) -> (n, H, ...). A matrix takes the mean of images."""
    if weight.dim() == 4:
        return F.conv2d(x, weight, padding=1)
    return F.linear(x.mean((2, 3)) if x.dim() == 4 else x, weight)


def _normalised(x: Tensor, vectors: Tensor) -> Tensor:
    """Bias, batch normalisation in evaluation mode and ReLU of (n, H, ...); `vectors` as in `_VECTORS`."""
    if len(vectors) == 1:
        return (x + vectors[0]).relu()
    bias, scale, shift, mean, variance = vectors
    return F.batch_norm(x, mean - bias, variance, scale, shift, eps=BATCH_NORM_EPSILON).relu()


def _columns(rows: Tensor, split: Tensor, outgoing: Tensor) -> Tensor:
    """Rows (H, I, *S) for inputs of which those that were `split` (s,) are two, and more that are new."""
    rows = rows.clone()
    rows[:, split] /= 2
    return torch.cat([rows, rows[:, split], outgoing], 1)


def _norms(weights: Tensor) -> Tensor:
    """Norm of each row (rows,)."""
    return weights.flatten(1).norm(dim=1)


def _pixels(model: MLP | VGG) -> tuple[list[int], list[bool]]:
    """Positions at which each hidden layer is computed, and whether pooling comes after it."""
    if isinstance(model, MLP):
        return [1] * (len(model.widths) - 2), [False] * (len(model.widths) - 2)
    pixels, pools, size = [], [], model.shape[1:]
    for block in model.widths:
        pixels += [math.prod(size)] * len(block)
        pools += [False] * (len(block) - 1) + [min(size) > 1]
        size = tuple(s // 2 for s in size) if min(size) > 1 else size
    return pixels, pools
