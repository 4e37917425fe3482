"""Candidates for the growth of a hidden layer, see `vision.firefly`, which has the shapes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.models import BATCH_NORM_EPSILON, Conv, Dense, uniform

RADIUS = 0.05
"""Norm of a perturbation, relative to the norm of a neuron's incoming weights (splits), to the mean
norm of the outgoing weights of the other neurons (new neurons), or to the identity (layers).

A much larger norm changes the function. With a much smaller one, the copies of a neuron stay
similar, and new layers are favoured: their effect is of first order, that of splits of second.
"""


Vectors = dict[str, Tensor]
_VECTORS = {Dense: ("bias",), Conv: ("bias", "scale", "shift", "mean", "variance")}
_CHANNEL = (0, 2, 3)  # dimensions of the values of one channel


class Candidates:
    """A hidden layer with its candidates, which are dimension 0 of each perturbation.

    `split` (H, I, *S) moves the two copies of a neuron from weights w to w + p and w - p.
    `outgoing` (K, O, *S) are the outgoing weights of new neurons; their incoming weights `new` (K,
    I, *S) are random. `layer` (1, H, H, *S), or (0, ...) where no layer fits, is added to the
    identity.
    """

    def __init__(
        self, layer: Any, after: Any, new: int, deepen: bool, pool: bool, generator: torch.Generator
    ):
        self.pool = pool
        self.weight = layer.weight.data[0]
        self.vectors = vectors_of(layer)
        neurons, inputs, *kernel = self.weight.shape
        outgoing = after.weight.data[0].transpose(0, 1)
        self.split = self._random(self.weight.shape, norms(self.weight), generator)
        self.outgoing = self._random((new, *outgoing.shape[1:]), norms(outgoing).mean(), generator)
        identity = self._identity(neurons)
        self.layer = self._random(
            (int(deepen), *identity.shape), self.weight.new_ones(()), generator
        )
        incoming = torch.empty(new, inputs, *kernel)
        uniform(incoming, incoming[0].numel(), generator)
        self.new = incoming.to(self.weight.device)
        self.new_vectors = {name: self.weight.new_zeros(new) for name in self.vectors}
        # of the new layer, for the neurons and all new ones (H + K,)
        self.layer_vectors = {name: self.weight.new_zeros(neurons + new) for name in self.vectors}

    def _random(self, shape: Sequence[int], norm: Tensor, generator: torch.Generator) -> Tensor:
        """Candidates in random directions, with RADIUS times `norm` as their norm."""
        values = torch.randn(*shape, generator=generator).to(self.weight.device)
        return (
            F.normalize(values.flatten(1))
            .mul_(RADIUS * norm[..., None])
            .view(shape)
            .requires_grad_()
        )

    def _identity(self, neurons: int) -> Tensor:
        """Weight (neurons, neurons, *S) of the identity."""
        eye = torch.eye(neurons, device=self.weight.device)
        if self.weight.dim() == 2:
            return eye
        return F.pad(eye[..., None, None], (1, 1, 1, 1))

    def __call__(
        self, x: Tensor, carried: Tensor | float, measure: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Inputs (n, I, ...), and products (n, H, ...) `carried` from new neurons of the previous
        layer -> activations (n, H, ...), and products (n, O, ...) of the new neurons of this
        layer."""
        neurons = len(self.weight)
        products = product(torch.cat([self.weight, self.split, self.new]), x)
        before, moved, new = products.split([neurons, neurons, len(self.new)], 1)
        before = before + carried
        if measure:
            self._measure(before, new)
        plus = _activation(before + moved, self.vectors)
        minus = _activation(before - moved, self.vectors)
        new = _activation(new, self.new_vectors)
        if self.pool:  # each copy separately, as in the grown network
            plus = F.max_pool2d(plus, 2)
            minus = F.max_pool2d(minus, 2)
            new = F.max_pool2d(new, 2)
        x = (plus + minus) / 2
        for weight in self.layer:
            x = (x + product(weight, x)).relu()
        return x, product(self.outgoing.transpose(0, 1), new)

    def _measure(self, before: Tensor, new: Tensor) -> None:
        """Set the batch normalisation of new neurons and of a new layer, given the products of
        neurons (n, H, ...) and of new ones (n, K, ...)."""
        values = new.numel() // new.shape[1]
        variance, mean = torch.var_mean(new, _CHANNEL, correction=0)
        # One more value at distance 1: with few or dead examples, the variance is near 0.
        variance = (variance * values + 1) / (values + 1)
        self.new_vectors = {
            "bias": torch.zeros_like(mean),
            "scale": torch.ones_like(mean),
            "shift": torch.zeros_like(mean),
            "mean": mean,
            "variance": variance,
        }
        old_activations = _activation(before, self.vectors)
        new_activations = _activation(new, self.new_vectors)
        activations = torch.cat([old_activations, new_activations], 1)
        variance, mean = torch.var_mean(activations, _CHANNEL, correction=0)
        # Undoes the normalisation: the identity in evaluation mode, and nearly so in training mode.
        self.layer_vectors = {
            "bias": torch.zeros_like(mean),
            "scale": (variance + BATCH_NORM_EPSILON).sqrt(),
            "shift": mean,
            "mean": mean,
            "variance": variance,
        }

    def wider(self, layer: Any, split: Tensor, new: Tensor) -> tuple[Tensor, Vectors]:
        """Weight (H + s + k, I, *S) and vectors (H + s + k,) of the grown layer: all neurons,
        second copies of split ones, new neurons."""
        plus = layer.weight.data[0].clone()
        minus = plus[split] - self.split[split]
        plus[split] += self.split[split]
        vectors = {
            name: torch.cat([values, values[split], self.new_vectors[name][new]])
            for name, values in vectors_of(layer).items()
        }
        return torch.cat([plus, minus, self.new[new]]), vectors

    def deeper(self, new: Tensor) -> tuple[Tensor, Tensor, Vectors]:
        """The new layer: its weights (H + k, H, *S) from the neurons, those (H + k, k, *S) from the
        selected new neurons, which are the identity, and its vectors (H + k,)."""
        neurons = len(self.weight)
        weight = self._identity(neurons + len(new))
        weight[:neurons, :neurons] += self.layer[0]
        chosen = torch.cat([torch.arange(neurons, device=new.device), neurons + new])
        vectors = {name: values[chosen] for name, values in self.layer_vectors.items()}
        return weight[:, :neurons], weight[:, neurons:], vectors


def vectors_of(layer: Any) -> Vectors:
    """The vectors of a layer, by attribute."""
    return {name: getattr(layer, name).data.flatten() for name in _VECTORS[type(layer)]}


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Weight (H, I, *S) times activations (n, I, ...) -> (n, H, ...); a matrix takes means of
    images."""
    if weight.dim() == 4:
        return F.conv2d(x, weight, padding=1)
    if x.dim() == 4:
        x = x.mean((2, 3))
    return F.linear(x, weight)


def _activation(x: Tensor, vectors: Vectors) -> Tensor:
    """Bias, batch normalisation in evaluation mode, and ReLU of products (n, H, ...)."""
    if "mean" not in vectors:
        return (x + vectors["bias"]).relu()
    mean = vectors["mean"] - vectors["bias"]
    normalised = F.batch_norm(
        x,
        mean,
        vectors["variance"],
        vectors["scale"],
        vectors["shift"],
        eps=BATCH_NORM_EPSILON,
    )
    return normalised.relu()


def norms(weights: Tensor) -> Tensor:
    return weights.flatten(1).norm(dim=1)
