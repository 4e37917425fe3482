"""The candidates of one hidden layer in Firefly growth (Wu et al., 2020).

`vision.firefly` explains the method and defines the letters of the shapes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.models import BATCH_NORM_EPSILON, Conv, Dense, uniform

RADIUS = 0.05
"""Norm of a perturbation, relative to the norm of a neuron's incoming weights (splits), to the mean
norm of the outgoing weights of the other neurons (new neurons), or to the identity (layers).

A much larger norm changes the function too much. With a much smaller one, the two copies of a
neuron stay similar; and new layers are favoured, because their effect on the loss is of first order
in the perturbation, that of splits of second order.
"""


Vectors = dict[str, Tensor]
_VECTORS = {Dense: ("bias",), Conv: ("bias", "scale", "shift", "mean", "variance")}
_CHANNEL = (0, 2, 3)  # dimensions to reduce for statistics per channel


class Candidates:
    """A hidden layer and the perturbations of its candidates, one candidate per row (dimension 0).

    Attributes:
        split: (H, I, *S). Candidate h replaces neuron h, with weights w, by two copies with the
            weights w + split[h] and w - split[h].
        outgoing: (K, O, *S). Outgoing weights of K new neurons.
        new: (K, I, *S). Their incoming weights: random, and no perturbation.
        layer: (1, H, H, *S), or (0, ...) where no layer fits. Added to the identity, it is the
            weight of a new layer after this one.
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
        # Vectors of the new layer, (H + K,): for the present neurons, then for the new ones.
        self.layer_vectors = {name: self.weight.new_zeros(neurons + new) for name in self.vectors}

    def _random(self, shape: Sequence[int], norm: Tensor, generator: torch.Generator) -> Tensor:
        """Perturbations (n, ...) of `shape` in random directions; each has norm RADIUS * `norm`."""
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
        """The forward pass of the layer with all its candidates.

        Args:
            x: inputs (n, I, ...), activations of the previous layer without its new neurons.
            carried: contribution (n, H, ...) of the previous layer's new neurons to this layer's
                products, before bias and ReLU; 0.0 for the first layer.
            measure: set the batch normalisation of the candidates from this batch.

        Returns:
            Activations (n, H, ...), and `carried` (n, O, ...) for the next layer.
        """
        neurons = len(self.weight)
        products = product(torch.cat([self.weight, self.split, self.new]), x)
        before, moved, new = products.split([neurons, neurons, len(self.new)], 1)
        before = before + carried
        if measure:
            self._measure(before, new)
        plus = _activation(before + moved, self.vectors)
        minus = _activation(before - moved, self.vectors)
        new = _activation(new, self.new_vectors)
        if self.pool:  # pool the two copies separately, as the grown network will
            plus = F.max_pool2d(plus, 2)
            minus = F.max_pool2d(minus, 2)
            new = F.max_pool2d(new, 2)
        x = (plus + minus) / 2
        for weight in self.layer:
            x = (x + product(weight, x)).relu()
        return x, product(self.outgoing.transpose(0, 1), new)

    def _measure(self, before: Tensor, new: Tensor) -> None:
        """Set the batch normalisation of the new neurons and of the new layer.

        `before` (n, H, ...) and `new` (n, K, ...) are the products of the present and of the new
        neurons, before normalisation.
        """
        values = new.numel() // new.shape[1]
        variance, mean = torch.var_mean(new, _CHANNEL, correction=0)
        # Count one more value at distance 1 from the mean: the variance would be near 0 with few
        # examples or a dead neuron.
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
        # Scale and shift undo the normalisation, so that the new layer is the identity in
        # evaluation mode, and nearly so in training mode.
        self.layer_vectors = {
            "bias": torch.zeros_like(mean),
            "scale": (variance + BATCH_NORM_EPSILON).sqrt(),
            "shift": mean,
            "mean": mean,
            "variance": variance,
        }

    def wider(self, layer: Any, split: Tensor, new: Tensor) -> tuple[Tensor, Vectors]:
        """Weight (H + s + k, I, *S) and vectors (H + s + k,) of the widened layer.

        Rows: the H present neurons, the second copies of the neurons `split` (s,), and the new
        neurons `new` (k,). `layer` has the present weights.
        """
        plus = layer.weight.data[0].clone()
        minus = plus[split] - self.split[split]
        plus[split] += self.split[split]
        vectors = {
            name: torch.cat([values, values[split], self.new_vectors[name][new]])
            for name, values in vectors_of(layer).items()
        }
        return torch.cat([plus, minus, self.new[new]]), vectors

    def deeper(self, new: Tensor) -> tuple[Tensor, Tensor, Vectors]:
        """The new layer after this one, which has H + k neurons for the k new neurons `new`.

        Returns its weights from the present neurons (H + k, H, *S), its weights from the new
        neurons (H + k, k, *S), which are the identity, and its vectors (H + k,).
        """
        neurons = len(self.weight)
        weight = self._identity(neurons + len(new))
        weight[:neurons, :neurons] += self.layer[0]
        chosen = torch.cat([torch.arange(neurons, device=new.device), neurons + new])
        vectors = {name: values[chosen] for name, values in self.layer_vectors.items()}
        return weight[:, :neurons], weight[:, neurons:], vectors


def vectors_of(layer: Any) -> Vectors:
    """The vectors of a layer (tensors with one value per neuron) by attribute name."""
    return {name: getattr(layer, name).data.flatten() for name in _VECTORS[type(layer)]}


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Weight (H, I, *S) times activations (n, I, ...) -> (n, H, ...).

    The weight is a 3x3 kernel or a matrix (S = ()). A matrix after a convolution is the classifier
    of a VGG: it takes the mean over the pixels.
    """
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
