"""The training loop, the only one: all learners train here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alma.errors import UserError
from vision import optim
from vision.mixture import Mixture
from vision.models import MLP
from vision.presets import Settings

EVALUATION_BATCH = 2000
PADDING = 4
BLACK = -1.9  # about what a black pixel is once normalised, in each channel of CIFAR


class Examples(NamedTuple):
    """Normalised images (n, channels, height, width), channels last in memory, and labels (n,)."""

    images: Tensor
    labels: Tensor


class Flat:
    """A model's parameters as one vector, its gradients and its buffers too: one optimizer step is a few
    operations however many layers there are. The model's own tensors become views of the vectors."""

    def __init__(self, model: nn.Module):
        self.parameters: list[Tensor] = list(model.parameters())
        self.values = _flatten(self.parameters)
        self.gradients = torch.zeros_like(self.values)
        for p, value, gradient in zip(
            self.parameters,
            _views(self.values, self.parameters),
            _views(self.gradients, self.parameters),
            strict=True,
        ):
            p.data, p.grad = value, gradient
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.buffers = _flatten(self._buffers)
        for b, value in zip(self._buffers, _views(self.buffers, self._buffers), strict=True):
            b.data = value

    def gradient_writer(self, model: nn.Module) -> Callable[[Tensor, Tensor], None]:
        """A function of images and labels that writes the gradient of the voters' summed losses."""
        if isinstance(model, MLP):
            return model.gradient_writer()

        def write(images: Tensor, labels: Tensor) -> None:
            found = torch.autograd.grad(loss_of(model(images), labels).sum(), self.parameters)
            torch.cat([gradient.reshape(-1) for gradient in found], out=self.gradients)

        return write

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Copies of parameters and buffers."""
        return self.values.clone(), self.buffers.clone()

    def keep(self, snapshot: tuple[Tensor, Tensor], voters: Tensor) -> None:
        """Copy the values of those `voters` (V,) that are true into a snapshot.

        Tensors start with the members, so a mask of V = M takes some members', one of V = 1 everything.
        """
        for target, now, like in (
            (snapshot[0], self.values, self.parameters),
            (snapshot[1], self.buffers, self._buffers),
        ):
            if len(voters) == 1:
                target.copy_(now)
                continue
            chosen = voters.nonzero().flatten().tolist()
            for kept, new in zip(_views(target, like), _views(now, like), strict=True):
                for voter in chosen:
                    kept[voter].copy_(new[voter])

    def restore(self, snapshot: tuple[Tensor, Tensor]) -> None:
        """Set parameters and buffers to those of a snapshot."""
        self.values.copy_(snapshot[0])
        self.buffers.copy_(snapshot[1])


@dataclass
class Progress:
    """How far training on a stage is: all that `fit` needs to go on from here with the same numbers."""

    spent: dict[str, float] = field(default_factory=dict)  # FLOPs before training began, by purpose
    epoch: int = 0  # complete ones
    waited: int = 0  # epochs since any voter was at its best
    best: Tensor | None = None  # (V,) the lowest validation loss, or error, of each voter
    now: tuple[Tensor, Tensor] | None = None  # parameters and buffers
    kept: tuple[Tensor, Tensor] | None = None  # those of the best epoch
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None  # its state


class Watch(Protocol):
    """Who follows the training: a progress bar, a checkpoint."""

    def epoch_done(self) -> bool:
        """Called after every epoch; true if `save` should be called now."""

    def save(self, progress: Progress) -> None:
        """Write down how far training is. The tensors are live: they change with the next epoch."""


def fit(
    model: Any,
    train: Examples,
    valid: Examples,
    settings: Settings,
    generator: torch.Generator,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> dict[str, float]:
    """Train `model` on `train` and leave it as it was at its best epoch on `valid` (section 5, appendix B.1).

    The best epoch is that of the lowest validation loss (or error, by the settings), for each voter on its
    own; batch-normalisation statistics belong to it. Order and augmentation come from `generator`. With
    the `progress` that `watch` was given by an interrupted call, training goes on from there. Returns
    FLOPs by purpose: forward, backward, validation, and those of `progress.spent`.
    UserError when training diverged.
    """
    flat, at = Flat(model), progress or Progress()
    if isinstance(model, Mixture):
        model.generator = generator
    optimizer = optim.make(flat.values, settings)
    best = torch.full((model.voters,), torch.inf, device=flat.values.device)
    kept = flat.snapshot()
    if at.best is not None and at.now and at.kept and at.generator is not None:
        best, kept = at.best, at.kept
        flat.restore(at.now)
        optimizer.state.update(at.optimizer)
        generator.set_state(at.generator.cpu())
    write_gradients = flat.gradient_writer(model)
    measure = loss_of if settings.select == "loss" else error_of
    while at.epoch < settings.epochs and not (settings.patience and at.waited >= settings.patience):
        model.train()
        for images, labels in minibatches(train, settings, generator):
            write_gradients(images, labels)
            optimizer.step(flat.values, flat.gradients)
        score = validate(model, valid, measure)
        better = score < best - settings.patience_delta
        at.epoch += 1
        at.waited += 1
        if better.any():
            flat.keep(kept, better)
            best = torch.where(better, score, best)
            at.waited = 0
        if watch and watch.epoch_done():
            at.best, at.now, at.kept = best, (flat.values, flat.buffers), kept
            at.optimizer, at.generator = optimizer.state, generator.get_state()
            watch.save(at)
    flat.restore(kept)
    if not (best.isfinite().all() and flat.values.isfinite().all()):
        raise UserError("training diverged: the validation loss is not a number; use a lower --lr")
    for p in flat.parameters:
        p.grad = None
    flops, seen = model.flops, at.epoch * len(train.labels)
    return at.spent | {
        "forward": seen * flops.forward,
        "backward": seen * flops.backward,
        "validation": at.epoch * len(valid.labels) * flops.inference,
    }


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of each voter: logits (V, C, n), labels (n,) -> (V,)."""
    if len(logits) == 1:  # one operation instead of three
        return F.cross_entropy(logits, labels[None]).view(1)
    return F.cross_entropy(logits, labels.expand(len(logits), -1), reduction="none").mean(1)


def error_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of examples each voter is wrong on: logits (V, C, n), labels (n,) -> (V,)."""
    return (logits.argmax(1) != labels).float().mean(1)


@torch.no_grad()
def validate(model: Any, examples: Examples, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean over the examples of `loss_of` or `error_of`, (V,), in evaluation mode."""
    model.eval()
    n = len(examples.labels)
    if n <= EVALUATION_BATCH:
        return measure(model(examples.images), examples.labels)
    batches = zip(*(tensor.split(EVALUATION_BATCH) for tensor in examples), strict=True)
    return torch.stack([measure(model(x), labels) * (len(labels) / n) for x, labels in batches]).sum(0)


def minibatches(examples: Examples, settings: Settings, generator: torch.Generator) -> Iterator[Examples]:
    """One epoch in random order. What fits one minibatch is used as it is; a last one of a single
    example, which has no batch statistics, joins the one before."""
    n, size = len(examples.labels), settings.batch_size
    if n <= size:
        batches = [examples]
    else:
        order = torch.randperm(n, generator=generator).to(examples.labels.device)
        pieces = list(order.split(size))
        if len(pieces[-1]) == 1:
            pieces[-2:] = [torch.cat(pieces[-2:])]
        batches = (Examples(examples.images[piece], examples.labels[piece]) for piece in pieces)  # type: ignore[assignment]
    for images, labels in batches:
        yield Examples(augment(images, generator) if settings.augment else images, labels)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop at random after padding each side with 4 black pixels, and flip half of the images (B.1.2)."""
    n, _, height, width = images.shape
    shift = torch.randint(0, 2 * PADDING + 1, (n, 2, 1), generator=generator)
    flip = torch.rand(n, 1, generator=generator) < 0.5
    rows = torch.arange(height) + shift[:, 0]
    columns = torch.arange(width).expand(n, -1)
    columns = torch.where(flip, columns.flip(1), columns) + shift[:, 1]
    padded = F.pad(images, [PADDING] * 4, value=BLACK)
    rows, columns = rows.to(images.device), columns.to(images.device)
    which = torch.arange(n, device=images.device)[:, None, None]
    # Indexing the channels-last view gives channels-last images without another copy.
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _views(vector: Tensor, like: list[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in like:
        yield vector[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
