"""Growth of a network in width and depth (Wu et al. 2020, "Firefly Neural Architecture Descent").

The network is first over-grown with all candidates: a split of every neuron, some new neurons, and
a new layer wherever one fits. Each candidate is a perturbation p of the network; at p = 0 the
network computes its old function. Four steps follow: a few gradient steps `tune` the directions of
the perturbations so that the loss falls, another pass over the data `scores` them, `select` takes
those with the largest decrease of loss per parameter, and `write` builds the grown network. Both
backbones of `vision.models` are treated as a chain of hidden layers and a classifier, with M = 1;
in a convolution, a neuron is a channel.

Shapes: n examples, C classes, I inputs and H neurons of a hidden layer, O neurons of the layer
after it, K candidates for new neurons, S the kernel size, () or (3, 3). Activations are (n, H) or
(n, H, height, width). The vectors of a layer are its tensors with one value per neuron, by
attribute: its bias and, if it is a convolution, its batch normalisation.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.candidates import Candidates, Vectors, norms, product
from vision.examples import Examples
from vision.models import MLP, VGG

MEASURED = 512
"""Number of examples from which the candidates' batch normalisation is measured; more of them would
take more memory than training does."""


class Choice(NamedTuple):
    """Selected candidates of a hidden layer: indices of neurons to split (s,), indices of
    candidates for new neurons (k,), and whether a new layer follows."""

    split: Tensor
    new: Tensor
    layer: bool


class Overgrown:
    """An MLP or VGG (M = 1) in evaluation mode with candidates in each hidden layer.

    Candidates are a split of every neuron, `new` neurons and, if `depth`, a layer unless pooling
    follows.
    """

    def __init__(self, model: MLP | VGG, new: int, depth: bool, generator: torch.Generator):
        self.model = model
        *hidden, self.classifier = layers_of(model)
        blocks: Sequence[Sequence[int]] = [model.widths[1:-1]]  # type: ignore[list-item]
        size: tuple[int, ...] = (1,)
        if isinstance(model, VGG):
            blocks = model.widths
            size = model.shape[1:]
        self.pixels: list[int] = []  # pixels (height * width) of each hidden layer's output
        pools: list[bool] = []  # whether pooling follows
        for block in blocks:
            pooled = min(size) > 1
            self.pixels += [math.prod(size) for _ in block]
            pools += [False] * (len(block) - 1) + [pooled]
            if pooled:
                size = tuple(side // 2 for side in size)
        after = [*hidden[1:], self.classifier]
        self.candidates = [
            Candidates(layer, follower, new, depth and not pool, pool, generator)
            for layer, follower, pool in zip(hidden, after, pools, strict=True)
        ]
        # Three for each hidden layer, in the order of `Choice`: splits, new neurons, new layer.
        self.perturbations: list[Tensor] = []
        for candidates in self.candidates:
            self.perturbations += [candidates.split, candidates.outgoing, candidates.layer]

    def __call__(self, x: Tensor, measure: bool = False) -> Tensor:
        """Images (n, ...) -> logits (n, C)."""
        carried: Tensor | float = 0.0
        x = x.flatten(1) if isinstance(self.model, MLP) else x
        for candidates in self.candidates:
            x, carried = candidates(x, carried, measure)
        logits = product(self.classifier.weight.data[0], x)
        return logits + self.classifier.bias.data.flatten() + carried

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
        """Optimise the directions of the perturbations, one gradient step per batch.

        Their norms do not change. During tuning they are divided by the number of layers: with all
        of them at full size, the gradient at that point would not describe the effect of the few
        that are selected. Returns the FLOPs.
        """
        torch._foreach_mul_([p.data for p in self.perturbations], 1 / len(self.candidates))
        seen = 0
        for images, labels in batches:
            for p, gradient in zip(self.perturbations, self.gradients(images, labels), strict=True):
                turned = F.normalize(p.detach().flatten(1)) - F.normalize(gradient.flatten(1))
                p.data = F.normalize(turned).mul_(norms(p.data)[:, None]).view(p.shape)
            seen += len(labels)
        torch._foreach_mul_([p.data for p in self.perturbations], len(self.candidates))
        return seen * sum(self.flops)

    def scores(self, batches: Iterable[Examples]) -> tuple[list[Tensor], float]:
        """Score all candidates; negative scores lower the loss.

        The score of a candidate p is the derivative of the mean loss with respect to a factor
        epsilon of p. It is taken at epsilon = 1, as in the authors' code: at 0 the derivative of a
        split is always 0, and that of a layer ignores that a full step may overshoot. Returns a
        tensor (candidates,) for each tensor of `perturbations`, and the FLOPs.
        """
        total = [torch.zeros_like(p) for p in self.perturbations]
        seen = 0
        for images, labels in batches:
            for sums, gradient in zip(total, self.gradients(images, labels), strict=True):
                sums += gradient * len(labels)
            seen += len(labels)
        scores = []
        for p, sums in zip(self.perturbations, total, strict=True):
            scores.append((p.data * sums).flatten(1).sum(1) / seen)
        return scores, seen * sum(self.flops)

    @property
    def flops(self) -> tuple[float, float]:
        """Forward and backward FLOPs per example, counted as in `vision.models.Flops`; the weights
        of the classifier have no gradient."""
        forward = 0.0
        head = 2.0 * self.classifier.weight.numel()
        pixels_after = [*self.pixels[1:], 1]
        for layer, pixels, after in zip(self.candidates, self.pixels, pixels_after, strict=True):
            weights = 2 * layer.weight.numel() + layer.new.numel() + layer.layer.numel()
            forward += 2.0 * (weights * pixels + layer.outgoing.numel() * after)
        first = self.candidates[0]
        images = 2.0 * (2 * first.weight.numel() + first.new.numel()) * self.pixels[0]
        return forward + head, 2 * forward + head - images

    def select(self, scores: Sequence[Tensor], budget: float) -> list[Choice]:
        """Select candidates by decrease of loss per parameter, up to about `budget` parameters.

        Candidates are visited in the order of score / parameters, where a candidate's parameters
        are those that it would add alone. One is skipped if the total is nearer to the budget
        without it; the total counts the parameters that the selected ones add together. At least
        one candidate is selected.
        """
        counts = [
            [0, 0, 0] for _ in self.candidates
        ]  # splits, new neurons and layers of each hidden layer
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
            added_with_it = self.parameters(counts) - present
            if abs(added_with_it - budget) < abs(added - budget):
                chosen[which].append(index)
                added = added_with_it
            else:
                counts[layer][kind] -= 1
        if not added:
            _, which, index = order[0]
            chosen[which].append(index)
        tensor = partial(torch.tensor, dtype=torch.long, device=self.classifier.weight.device)
        choices = []
        for split, new, layers in zip(chosen[::3], chosen[1::3], chosen[2::3], strict=True):
            choices.append(Choice(tensor(sorted(split)), tensor(sorted(new)), bool(layers)))
        return choices

    def parameters(self, counts: Sequence[Sequence[int]]) -> int:
        """Number of parameters of the network after growth.

        `counts` has the numbers of splits, new neurons and new layers for each hidden layer.
        """
        first = self.candidates[0].weight
        taps = first[0, 0].numel()  # size of the kernel: 1 or 9
        vectors = 1 if first.dim() == 2 else 3
        outputs = [first.shape[1], *chain(*self._outputs(counts))]
        hidden = sum((taps * before + vectors) * after for before, after in pairwise(outputs))
        return hidden + (outputs[-1] + 1) * self.classifier.weight.shape[1]

    def _outputs(self, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each hidden layer, its neurons after growth, then those of the new layer, if any."""
        outputs = []
        for candidates, (splits, new, layer) in zip(self.candidates, counts, strict=True):
            neurons = len(candidates.weight)
            if layer:
                outputs.append([neurons + splits + new, neurons + new])
            else:
                outputs.append([neurons + splits + new])
        return outputs

    def widths(self, choices: Sequence[Choice]) -> list[Any]:
        """Widths of the grown network, as MLP and VGG take them."""
        counts = [(len(split), len(new), int(layer)) for split, new, layer in choices]
        outputs = self._outputs(counts)
        if isinstance(self.model, MLP):
            return [self.model.widths[0], *chain(*outputs), self.model.widths[-1]]
        rest = iter(outputs)
        return [list(chain(*islice(rest, len(block)))) for block in self.model.widths]

    @torch.no_grad()
    def write(self, choices: Sequence[Choice], source: MLP | VGG, model: MLP | VGG) -> None:
        """Write the grown network into `model`, which has the widths `widths(choices)`.

        `source` is the network, or its average of weights, to which the selected candidates are
        added.
        """
        *hidden, head = layers_of(source)
        layers = iter(layers_of(model))

        def fill(weight: Tensor, vectors: Vectors) -> None:
            layer = next(layers)
            layer.weight[0] = weight
            for name, values in vectors.items():
                getattr(layer, name).view(-1).copy_(values)

        first = self.candidates[0].weight
        split = choices[0].split[:0]
        outgoing = first[:, :0]
        for candidates, before, choice in zip(self.candidates, hidden, choices, strict=True):
            weight, vectors = candidates.wider(before, choice.split, choice.new)
            unused = outgoing.new_zeros(len(choice.new), *outgoing.shape[1:])
            incoming = torch.cat([outgoing, outgoing[choice.split], unused])
            fill(_columns(weight, split, incoming), vectors)
            split = choice.split
            outgoing = candidates.outgoing[choice.new].transpose(0, 1)
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


def _columns(rows: Tensor, split: Tensor, outgoing: Tensor) -> Tensor:
    """Adapt the weights of a layer to a previous layer that has grown: (H, I + s + k, *S).

    `rows` (H, I, *S) are the old weights. Columns of the `split` (s,) neurons are halved, and
    repeated for the second copies; `outgoing` (H, k, *S) are the columns of the new neurons.
    """
    rows = rows.clone()
    rows[:, split] /= 2
    return torch.cat([rows, rows[:, split], outgoing], 1)
