"""The training loop, the only one: all learners train here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alma.errors import UserError
from vision import optim
from vision.flat import Flat, aligned
from vision.mixture import Committee, Mixture
from vision.models import MLP
from vision.presets import Settings

EVALUATION_BATCH = 2000
PADDING = 4
DIVERGED = "training diverged: the validation loss is not a number; use a lower --lr"


class Examples(NamedTuple):
    """Normalised images (n, channels, height, width), channels last in memory, and labels (n,). Minibatches
    that differ between the M members of an ensemble have M in front of both."""

    images: Tensor
    labels: Tensor

    def aligned(self) -> "Examples":
        """The same, copied if they do not start at multiples of 64 bytes."""
        return Examples(*map(aligned, self))


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
    generators: list[Tensor] = field(default_factory=list)  # their states


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
    generators: Sequence[torch.Generator],
    progress: Progress | None = None,
    watch: Watch | None = None,
    black: Tensor | float = 0.0,
) -> dict[str, float]:
    """Train `model` on `train` and leave it as it was at its best epoch on `valid` (section 5, appendix B.1).

    The best epoch is that of the lowest validation loss (or error, by the settings), for each voter on its
    own; batch-normalisation statistics belong to it. Order and augmentation come from the `generators`: one,
    or one for each member. `black` (channels,) is what augmentation pads with. With the `progress` that
    `watch` was given by an interrupted call, training goes on from there. Returns FLOPs by purpose: forward,
    backward, validation, and those of `progress.spent`.
    UserError when training diverged.
    """
    train, valid = train.aligned(), valid.aligned()
    flat, at = Flat(model), progress or Progress()
    if isinstance(model, Mixture | Committee):
        model.draw_from(generators)
    optimizer = optim.make(flat.values, settings)
    best = torch.full((model.voters,), torch.inf, device=flat.values.device)
    kept = flat.snapshot()
    if at.best is not None and at.now and at.kept:
        best, kept = at.best, at.kept
        flat.restore(at.now)
        for name, values in at.optimizer.items():
            optimizer.state[name].copy_(values)
        for generator, state in zip(generators, at.generators, strict=True):
            generator.set_state(state.cpu())
    write_gradients = gradient_writer(model, flat)
    measure = loss_of if settings.select == "loss" else error_of
    while at.epoch < settings.epochs and not (settings.patience and at.waited >= settings.patience):
        model.train()
        for images, labels in minibatches(train, settings, generators, black):
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
            at.optimizer = optimizer.state
            at.generators = [generator.get_state() for generator in generators]
            watch.save(at)
    flat.restore(kept)
    if not (best.isfinite().all() and flat.values.isfinite().all()):
        raise UserError(DIVERGED)
    for p in flat.parameters:
        p.grad = None
    flops, seen = model.flops, at.epoch * len(train.labels)
    validation = at.epoch * len(valid.labels) * flops.inference
    return at.spent | {
        "forward": seen * flops.forward,
        "backward": seen * flops.backward,
        "validation": at.spent.get("validation", 0.0) + validation,
    }


def gradient_writer(model: nn.Module, flat: Flat) -> Callable[[Tensor, Tensor], None]:
    """A function of images and labels that writes the gradient of the voters' summed losses to `flat`."""
    if isinstance(model, MLP):
        return model.gradient_writer()

    def write(images: Tensor, labels: Tensor) -> None:
        flat.write(torch.autograd.grad(loss_of(model(images), labels).sum(), flat.parameters))

    return write


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of each voter: logits (V, C, n), labels (n,) or (V, n) -> (V,)."""
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


def minibatches(
    examples: Examples,
    settings: Settings,
    generators: Sequence[torch.Generator],
    black: Tensor | float = 0.0,
) -> Iterator[Examples]:
    """One epoch in random order, or in M orders of M `generators`: minibatches of n examples or (M, n).

    What fits one minibatch is used as it is; a last one of a single example, which has no batch statistics,
    joins the one before."""
    n, size = len(examples.labels), settings.batch_size
    if n <= size and not settings.augment:
        yield examples
        return
    orders = [torch.arange(n) if n <= size else torch.randperm(n, generator=g) for g in generators]
    pieces = list(torch.stack(orders).to(examples.labels.device).split(size, 1))
    if n > size and pieces[-1].shape[1] == 1:
        pieces[-2:] = [torch.cat(pieces[-2:], 1)]
    pixels = examples.images.permute(0, 2, 3, 1)  # contiguous: whole images are copied
    rows = pixels.reshape(n, -1)
    for piece in pieces:
        images = rows.index_select(0, piece.flatten()).view(*piece.shape, *pixels.shape[1:])
        if settings.augment:
            pairs = zip(images, generators, strict=True)
            images = torch.stack([augment(own, generator, black) for own, generator in pairs])
        images, labels = images.permute(0, 1, 4, 2, 3), examples.labels[piece]
        yield Examples(images, labels) if len(piece) > 1 else Examples(images[0], labels[0])


def augment(images: Tensor, generator: torch.Generator, black: Tensor | float) -> Tensor:
    """Images (n, height, width, channels), cropped at random after padding each side with 4 `black` pixels
    (channels,), half of them flipped (B.1.2)."""
    n, height, width, channels = images.shape
    shift = torch.randint(0, 2 * PADDING + 1, (n, 2, 1), generator=generator)
    flip = torch.rand(n, 1, generator=generator) < 0.5
    rows = torch.arange(height) + shift[:, 0]
    columns = torch.arange(width).expand(n, -1)
    columns = torch.where(flip, columns.flip(1), columns) + shift[:, 1]
    padded = images.new_empty(n, height + 2 * PADDING, width + 2 * PADDING, channels)
    padded[:] = black
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = images
    rows, columns = rows.to(images.device), columns.to(images.device)
    which = torch.arange(n, device=images.device)[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None]]
