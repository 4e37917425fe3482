"""Growth of a network in width and depth (Wu et al. 2020, "Firefly Neural Architecture Descent").

The network is first over-grown with candidates: a split of every neuron, some new neurons, a new layer
wherever one fits. Each candidate is a perturbation p of the network that keeps its function at p = 0. A few
gradient steps turn the perturbations to where the loss falls, another pass over the data scores them, and
the best for their size are selected. Both backbones of `vision.models` are treated as a chain of hidden
layers and a classifier, with M = 1; in a convolution, a neuron is a channel.

Shapes: n examples, C classes, I inputs and H neurons of a hidden layer, O neurons of the layer after it, K
candidates for new neurons, S the kernel size, () or (3, 3). Activations are (n, H) or (n, H, height, width).
The vectors of a layer are its tensors with one value per neuron, by attribute: its bias and, if it is a
convolution, its batch normalisation.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.examples import Examples
from vision.models import BATCH_NORM_EPSILON, MLP, VGG, Conv, Dense, uniform

RADIUS = 0.05
"""Norm of a perturbation, relative to the norm of a neuron's incoming weights (splits), to the mean norm of
the outgoing weights of the other neurons (new neurons), or to the identity (layers). A much larger one
changes the function. A much smaller one leaves the copies of a neuron alike and favours new layers, whose
effect is of first order (that of splits: second)."""

MEASURED = 512
"""Examples that set the batch normalisation of candidates; more would exceed the memory of training."""

Vectors = dict[str, Tensor]
_VECTORS = {Dense: ("bias",), Conv: ("bias", "scale", "shift", "mean", "variance")}
_CHANNEL = (0, 2, 3)  # dimensions of the values of one channel


class Choice(NamedTuple):
    """Selected candidates of a hidden layer: indices of neurons to split (s,), indices of candidates for new
    neurons (k,), and whether a new layer follows."""

    split: Tensor
    new: Tensor
    layer: bool


class Candidates:
    """A hidden layer with its candidates, which are dimension 0 of each perturbation.

    `split` (H, I, *S) moves the two copies of a neuron from weights w to w + p and w - p. `outgoing`
    (K, O, *S) are the outgoing weights of new neurons; their incoming weights `new` (K, I, *S) are random.
    `layer` (1, H, H, *S), or (0, ...) where no layer fits, is added to the identity.
    """

    def __init__(
        self, layer: Any, after: Any, new: int, deepen: bool, pool: bool, generator: torch.Generator
    ):
        self.pool, self.weight, self.vectors = pool, layer.weight.data[0], vectors_of(layer)
        (neurons, inputs), kernel = self.weight.shape[:2], self.weight.shape[2:]
        outgoing = after.weight.data[0].transpose(0, 1)
        self.split = self._random(self.weight.shape, _norms(self.weight), generator)
        self.outgoing = self._random((new, *outgoing.shape[1:]), _norms(outgoing).mean(), generator)
        identity = self._identity(neurons)
        self.layer = self._random((int(deepen), *identity.shape), self.weight.new_ones(()), generator)
        incoming = torch.empty(new, inputs, *kernel)
        uniform(incoming, incoming[0].numel(), generator)
        self.new = incoming.to(self.weight.device)
        self.new_vectors = {name: self.weight.new_zeros(new) for name in self.vectors}
        # of the new layer, for the neurons and all new ones (H + K,)
        self.layer_vectors = {name: self.weight.new_zeros(neurons + new) for name in self.vectors}

    def _random(self, shape: Sequence[int], norm: Tensor, generator: torch.Generator) -> Tensor:
        """Candidates in random directions, with RADIUS times `norm` as their norm."""
        values = torch.randn(*shape, generator=generator).to(self.weight.device)
        return F.normalize(values.flatten(1)).mul_(RADIUS * norm[..., None]).view(shape).requires_grad_()

    def _identity(self, neurons: int) -> Tensor:
        """Weight (neurons, neurons, *S) of the identity."""
        eye = torch.eye(neurons, device=self.weight.device)
        return F.pad(eye[..., None, None], (1, 1, 1, 1)) if self.weight.dim() == 4 else eye

    def __call__(self, x: Tensor, carried: Tensor | float, measure: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs (n, I, ...) and the products (n, H, ...) `carried` from new neurons of the layer before ->
        activations (n, H, ...) and the products (n, O, ...) of the new neurons here."""
        neurons = len(self.weight)
        products = product(torch.cat([self.weight, self.split, self.new]), x)
        before, moved, new = products.split([neurons, neurons, len(self.new)], 1)
        before = before + carried
        if measure:
            self._measure(before, new)
        plus, minus = (_activation(values, self.vectors) for values in (before + moved, before - moved))
        new = _activation(new, self.new_vectors)
        if self.pool:  # each copy by itself, as in the grown network
            plus, minus, new = (F.max_pool2d(values, 2) for values in (plus, minus, new))
        x = (plus + minus) / 2
        for weight in self.layer:
            x = (x + product(weight, x)).relu()
        return x, product(self.outgoing.transpose(0, 1), new)

    def _measure(self, before: Tensor, new: Tensor) -> None:
        """Set the batch normalisation of new neurons and of a new layer, given the products of neurons
        (n, H, ...) and of new ones (n, K, ...)."""
        names, values = _VECTORS[Conv], new.numel() // new.shape[1]
        variance, mean = torch.var_mean(new, _CHANNEL, correction=0)
        # As with one more value at distance 1: few or dead examples have a variance near 0.
        variance = (variance * values + 1) / (values + 1)
        zeros = torch.zeros_like(mean)
        self.new_vectors = dict(zip(names, (zeros, zeros + 1, zeros, mean, variance), strict=True))
        after = _activation(before, self.vectors), _activation(new, self.new_vectors)
        variance, mean = torch.var_mean(torch.cat(after, 1), _CHANNEL, correction=0)
        # Undoes the normalisation: the identity in evaluation mode, and nearly so in training mode.
        scale, zeros = (variance + BATCH_NORM_EPSILON).sqrt(), torch.zeros_like(mean)
        self.layer_vectors = dict(zip(names, (zeros, scale, mean, mean, variance), strict=True))

    def wider(self, layer: Any, split: Tensor, new: Tensor) -> tuple[Tensor, Vectors]:
        """Weight (H + s + k, I, *S) and vectors (H + s + k,) of the layer: all neurons, second copies, new
        neurons."""
        plus = layer.weight.data[0].clone()
        minus = plus[split] - self.split[split]
        plus[split] += self.split[split]
        vectors = {
            name: torch.cat([values, values[split], self.new_vectors[name][new]])
            for name, values in vectors_of(layer).items()
        }
        return torch.cat([plus, minus, self.new[new]]), vectors

    def deeper(self, new: Tensor) -> tuple[Tensor, Tensor, Vectors]:
        """The new layer: its weights from the neurons (H + k, H, *S) and from the selected new ones
        (H + k, k, *S), which it passes through, and its vectors (H + k,)."""
        neurons, weight = len(self.weight), self._identity(len(self.weight) + len(new))
        weight[:neurons, :neurons] += self.layer[0]
        chosen = torch.cat([torch.arange(neurons, device=new.device), neurons + new])
        vectors = {name: values[chosen] for name, values in self.layer_vectors.items()}
        return weight[:, :neurons], weight[:, neurons:], vectors


class Overgrown:
    """An MLP or VGG (M = 1) in evaluation mode with candidates in each hidden layer. Candidates are a split
    of every neuron, `new` neurons and, if `depth`, a layer unless pooling follows."""

    def __init__(self, model: MLP | VGG, new: int, depth: bool, generator: torch.Generator):
        self.model, (*hidden, self.classifier) = model, layers_of(model)
        blocks, size = (
            (model.widths, model.shape[1:]) if isinstance(model, VGG) else ([model.widths[1:-1]], (1,))
        )
        self.pixels: list[int] = []  # positions of each hidden layer
        pools: list[bool] = []  # whether pooling follows
        for block in blocks:
            pooled = min(size) > 1
            self.pixels += [math.prod(size)] * len(block)
            pools += [False] * (len(block) - 1) + [pooled]
            size = tuple(s // 2 for s in size) if pooled else size
        after = [*hidden[1:], self.classifier]
        self.candidates = [
            Candidates(layer, follower, new, depth and not pool, pool, generator)
            for layer, follower, pool in zip(hidden, after, pools, strict=True)
        ]
        # of each hidden layer, in the order of `Choice`
        self.perturbations = [p for one in self.candidates for p in (one.split, one.outgoing, one.layer)]

    def __call__(self, x: Tensor, measure: bool = False) -> Tensor:
        """Images (n, ...) -> logits (n, C)."""
        carried: Tensor | float = 0.0
        x = x.flatten(1) if isinstance(self.model, MLP) else x
        for candidates in self.candidates:
            x, carried = candidates(x, carried, measure)
        return product(self.classifier.weight.data[0], x) + self.classifier.bias.data.flatten() + carried

    @torch.no_grad()
    def measure(self, images: Tensor) -> float:
        """Set the batch normalisation of all candidates from `images`; returns the FLOPs."""
        if isinstance(self.model, MLP):
            return 0.0
        self(images, measure=True)
        return len(images) * self.flops[0]

    def gradients(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Gradients of the mean cross-entropy with respect to the perturbations."""
        loss = F.cross_entropy(self(images), labels)
        return list(torch.autograd.grad(loss, self.perturbations, materialize_grads=True))

    def tune(self, batches: Iterable[Examples]) -> float:
        """Turn the perturbations to where the loss falls and keep their norms; returns the FLOPs. Meanwhile
        they are divided by the number of layers: all of them at full size would move a deep network too far
        for its gradient to describe the effect of a few."""
        torch._foreach_mul_([p.data for p in self.perturbations], 1 / len(self.candidates))
        seen = 0
        for images, labels in batches:
            for p, gradient in zip(self.perturbations, self.gradients(images, labels), strict=True):
                turned = F.normalize(p.detach().flatten(1)) - F.normalize(gradient.flatten(1))
                p.data = F.normalize(turned).mul_(_norms(p.data)[:, None]).view(p.shape)
            seen += len(labels)
        torch._foreach_mul_([p.data for p in self.perturbations], len(self.candidates))
        return seen * sum(self.flops)

    def scores(self, batches: Iterable[Examples]) -> tuple[list[Tensor], float]:
        """Scores (candidates,) for each tensor of `perturbations`, and the FLOPs. A score is the derivative
        of the mean loss by a factor epsilon of the candidate, at epsilon = 1 as in the authors' code. At 0,
        that of a split is 0 and that of a layer ignores how soon it overshoots."""
        total, seen = [torch.zeros_like(p) for p in self.perturbations], 0
        for images, labels in batches:
            for sums, gradient in zip(total, self.gradients(images, labels), strict=True):
                sums += gradient * len(labels)
            seen += len(labels)
        pairs = zip(self.perturbations, total, strict=True)
        return [(p.data * sums).flatten(1).sum(1) / seen for p, sums in pairs], seen * sum(self.flops)

    @property
    def flops(self) -> tuple[float, float]:
        """Forward and backward FLOPs per example, counted as in `vision.models.Flops`; the weights of the
        classifier have no gradient."""
        forward, head = 0.0, 2.0 * self.classifier.weight.numel()
        for layer, now, after in zip(self.candidates, self.pixels, [*self.pixels[1:], 1], strict=True):
            weights = 2 * layer.weight.numel() + layer.new.numel() + layer.layer.numel()
            forward += 2.0 * (weights * now + layer.outgoing.numel() * after)
        first = self.candidates[0]
        images = 2.0 * (2 * first.weight.numel() + first.new.numel()) * self.pixels[0]
        return forward + head, 2 * forward + head - images

    def select(self, scores: Sequence[Tensor], budget: float) -> list[Choice]:
        """Select candidates by decrease of loss per added parameter, until about `budget` are added. A
        candidate is skipped if the total is nearer to the budget without it; one at least is selected. The
        order uses the parameters that each candidate adds alone, the total those that all add together."""
        counts = [[0, 0, 0] for _ in self.candidates]  # splits, new neurons and layers of each hidden layer
        present = self.parameters(counts)
        order = []
        for which, values in enumerate(scores):
            layer, kind = divmod(which, 3)
            counts[layer][kind] = 1
            cost = self.parameters(counts) - present
            counts[layer][kind] = 0
            order += [(value / cost, which, index) for index, value in enumerate(values.tolist())]
        order.sort()
        chosen: list[list[int]] = [[] for _ in scores]
        added = 0
        for _, which, index in order:
            layer, kind = divmod(which, 3)
            counts[layer][kind] += 1
            more = self.parameters(counts) - present
            if abs(more - budget) < abs(added - budget):
                chosen[which].append(index)
                added = more
            else:
                counts[layer][kind] -= 1
        if not added:
            chosen[order[0][1]].append(order[0][2])
        tensor = partial(torch.tensor, dtype=torch.long, device=self.classifier.weight.device)
        sets = zip(chosen[::3], chosen[1::3], chosen[2::3], strict=True)
        return [Choice(tensor(sorted(split)), tensor(sorted(new)), bool(layer)) for split, new, layer in sets]

    def parameters(self, counts: Sequence[Sequence[int]]) -> int:
        """Parameters of the network grown by (splits, new neurons, new layers) at each hidden layer."""
        first = self.candidates[0].weight
        taps, vectors = first[0, 0].numel(), 1 if first.dim() == 2 else 3
        outputs = [first.shape[1], *chain(*self._outputs(counts))]
        hidden = sum((taps * before + vectors) * after for before, after in pairwise(outputs))
        return hidden + (outputs[-1] + 1) * self.classifier.weight.shape[1]

    def _outputs(self, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each hidden layer, its neurons and those of the new layer after it, if there is one."""
        neurons = [len(candidates.weight) for candidates in self.candidates]
        return [[h + s + k] + [h + k] * layer for h, (s, k, layer) in zip(neurons, counts, strict=True)]

    def widths(self, choices: Sequence[Choice]) -> list[Any]:
        """Widths of the grown network, as MLP and VGG take them."""
        outputs = self._outputs([(len(split), len(new), int(layer)) for split, new, layer in choices])
        if isinstance(self.model, MLP):
            return [self.model.widths[0], *chain(*outputs), self.model.widths[-1]]
        rest = iter(outputs)
        return [list(chain(*islice(rest, len(block)))) for block in self.model.widths]

    @torch.no_grad()
    def write(self, choices: Sequence[Choice], source: MLP | VGG, model: MLP | VGG) -> None:
        """Write `source`, the network or an average of its weights, with only the selected candidates to
        `model`, a network of `widths(choices)`."""
        *hidden, head = layers_of(source)
        layers = iter(layers_of(model))

        def fill(weight: Tensor, vectors: Vectors) -> None:
            layer = next(layers)
            layer.weight[0] = weight
            for name, values in vectors.items():
                getattr(layer, name).view(-1).copy_(values)

        first = self.candidates[0].weight
        split, outgoing = choices[0].split[:0], first[:, :0]
        for candidates, before, choice in zip(self.candidates, hidden, choices, strict=True):
            weight, vectors = candidates.wider(before, choice.split, choice.new)
            unused = outgoing.new_zeros(len(choice.new), *outgoing.shape[1:])
            fill(_columns(weight, split, torch.cat([outgoing, outgoing[choice.split], unused])), vectors)
            split, outgoing = choice.split, candidates.outgoing[choice.new].transpose(0, 1)
            if choice.layer:
                weight, passed, vectors = candidates.deeper(choice.new)
                fill(_columns(weight, split, passed), vectors)
                split = split[:0]
        fill(_columns(head.weight.data[0], split, outgoing), {"bias": head.bias.data.flatten()})


def layers_of(model: MLP | VGG) -> list[Any]:
    """All layers in order; the classifier is the last."""
    if isinstance(model, MLP):
        return list(model.layers)
    return [*(layer for block in model.blocks for layer in block.layers), model.classifier]


def vectors_of(layer: Any) -> Vectors:
    """The vectors of a layer, by attribute."""
    return {name: getattr(layer, name).data.flatten() for name in _VECTORS[type(layer)]}


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Weight (H, I, *S) times activations (n, I, ...) -> (n, H, ...). A matrix takes the mean of an image."""
    if weight.dim() == 4:
        return F.conv2d(x, weight, padding=1)
    return F.linear(x.mean((2, 3)) if x.dim() == 4 else x, weight)


def _activation(x: Tensor, vectors: Vectors) -> Tensor:
    """Bias, batch normalisation in evaluation mode, and ReLU of products (n, H, ...)."""
    if "mean" not in vectors:
        return (x + vectors["bias"]).relu()
    norm = vectors["mean"] - vectors["bias"], vectors["variance"], vectors["scale"], vectors["shift"]
    return F.batch_norm(x, *norm, eps=BATCH_NORM_EPSILON).relu()


def _columns(rows: Tensor, split: Tensor, outgoing: Tensor) -> Tensor:
    """Weight (H, I, *S) with the inputs `split` (s,) halved and repeated, and with the `outgoing` weights
    (H, k, *S) of new inputs."""
    rows = rows.clone()
    rows[:, split] /= 2
    return torch.cat([rows, rows[:, split], outgoing], 1)


def _norms(weights: Tensor) -> Tensor:
    return weights.flatten(1).norm(dim=1)
