"""The training loop of all learners, minibatches, replay and evaluation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alma.errors import UserError
from vision import optim
from vision.examples import AnyExamples, Examples
from vision.flat import Flat
from vision.mixture import Committee, Mixture
from vision.models import MLP
from vision.optim import Average
from vision.presets import Settings

EVALUATION_BATCH = 2000  # examples, at most
EVALUATION_BYTES = {"cpu": 20_000_000, "cuda": 1 << 30}
"""Most bytes of images and activations in an evaluation batch, unless one example has more.
Small batches are as fast on a CPU core, and every process of a sweep holds one in memory."""
PADDING = 4
DIVERGED = "training diverged: the validation loss is not finite; use a lower --lr"


@dataclass(frozen=True)
class Replay:
    """Draws the epochs of replay by share that `alma.stages` describes."""

    earlier: tuple[int, ...]  # number of examples of each earlier mega-batch, in order
    new: int  # number of new examples; their indices follow the old ones
    share: float

    @cached_property
    def old(self) -> int:
        """Number of old examples in an epoch: share * new, rounded, but at least one is new."""
        most = max(1, self.new - 1)
        return min(round(self.share * self.new), most)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Indices of an epoch (new,) in random order.

        Earlier mega-batches have equal shares, up to one example.
        """
        sizes = torch.tensor(self.earlier)
        starts = sizes.cumsum(0) - sizes
        order = torch.randperm(self.new, generator=generator)
        fresh = sum(self.earlier) + order[: self.new - self.old]
        # Each turn takes one example of each earlier mega-batch, in random order.
        turns = max(1, math.ceil(self.old / len(sizes)))
        sources = [torch.randperm(len(sizes), generator=generator) for _ in range(turns)]
        chosen = torch.cat(sources)[: self.old]
        fractions = torch.rand(self.old, generator=generator, dtype=torch.float64)
        places = (fractions * sizes[chosen]).long()
        epoch = torch.cat([fresh, starts[chosen] + places])
        return epoch[torch.randperm(len(epoch), generator=generator)]

    def sample(self, random: np.random.RandomState) -> np.ndarray:
        """Indices (new,) with the same shares as an epoch, for validation.

        An index is repeated only if an earlier mega-batch has fewer examples than its share.
        """
        sources = len(self.earlier)
        counts = np.full(sources, self.old // sources)
        counts[random.permutation(sources)[: self.old % sources]] += 1
        chosen = []
        start = 0
        for size, count in zip(self.earlier, counts, strict=True):
            # Drawn even if the count is 0, because the results depend on the number of draws.
            chosen.append(start + np.resize(random.permutation(size), count))
            start += size
        fresh = start + random.permutation(self.new)[: self.new - self.old]
        return np.concatenate([*chosen, fresh])


@dataclass(frozen=True)
class Drawing:
    """How minibatches are made from the training examples of a stage."""

    black: Tensor | float = 0.0  # pixel (channels,) that pads images in augmentation
    replay: Replay | None = None  # draws each epoch; None: all examples


ALL_EXAMPLES = Drawing()


@dataclass
class Progress:
    """State of training within a stage, from which `fit` resumes, on a CPU bit for bit."""

    spent: dict[str, float] = field(default_factory=dict)  # FLOPs before training, by purpose
    epoch: int = 0  # completed epochs
    waited: int = 0  # epochs since any voter improved
    best: Tensor | None = None  # (V,) lowest validation loss or error
    now: tuple[Tensor, Tensor] | None = None  # current parameters and buffers
    kept: tuple[Tensor, Tensor] | None = None  # parameters and buffers of each voter's best epoch
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    generators: list[Tensor] = field(default_factory=list)  # states


Callback = Callable[[Callable[[], Progress]], None]
"""Called after every epoch with a function that returns the `Progress`. The next epoch overwrites
the tensors of that object, so use or copy them at once."""


def fit(
    model: Any,
    train: AnyExamples,
    valid: AnyExamples,
    settings: Settings,
    generators: Sequence[torch.Generator],
    drawing: Drawing = ALL_EXAMPLES,
    progress: Progress | None = None,
    callback: Callback | None = None,
    average: Average | None = None,
) -> dict[str, float]:
    """Train `model` on `train` and leave it at its best epoch on `valid` (section 5, appendix B.1).

    The best epoch of each voter has the lowest validation loss or error, or is the last
    (`settings.select`); its batch statistics are kept, too. `generators` and `drawing` are those of
    `minibatches`. Training continues from `progress`, and `average` is updated every epoch.

    Returns FLOPs by purpose. UserError: training diverged.
    """
    flat = Flat(model)
    at = progress or Progress()
    if isinstance(model, Mixture | Committee):
        model.draw_from(generators)
    optimizer = optim.make(flat.values, settings)
    write_gradients = gradient_writer(model, flat, settings.amp)
    update_average = average.following(model) if average else lambda: None
    measure = error_of if settings.select == "error" else loss_of
    if at.best is None or at.now is None or at.kept is None:
        best = torch.full((model.voters,), torch.inf, device=flat.values.device)
        kept = (flat.values.clone(), flat.buffers.clone())
    else:
        best = at.best
        kept = at.kept
        flat.restore(at.now)
        optimizer.load(at.optimizer)
        for generator, state in zip(generators, at.generators, strict=True):
            generator.set_state(state.cpu())

    while at.epoch < settings.epochs and not (settings.patience and at.waited >= settings.patience):
        model.train()
        optimizer.lr = settings.lr * optim.decay(settings.lr_scheduler, at.epoch / settings.epochs)
        for images, labels in minibatches(train, settings, generators, drawing):
            write_gradients(images, labels)
            optimizer.step(flat.values, flat.gradients)
        update_average()
        score = validate(model, valid, measure)
        better = (score < best - settings.patience_delta) | (settings.select == "last")
        at.epoch += 1
        at.waited += 1
        if better.any():
            flat.keep(kept, better)
            best = torch.where(better, score, best)
            at.waited = 0
        if callback:
            at.best = best
            at.kept = kept
            at.now = (flat.values, flat.buffers)
            at.optimizer = optimizer.state
            callback(lambda: replace(at, generators=[g.get_state() for g in generators]))

    flat.restore(kept)
    if not (best.isfinite().all() and flat.values.isfinite().all()):
        raise UserError(DIVERGED)
    model.zero_grad()
    cost = model.flops
    epoch_size = drawing.replay.new if drawing.replay else len(train.labels)
    seen = at.epoch * epoch_size
    validation = at.epoch * len(valid.labels) * cost.inference
    return at.spent | {
        "forward": seen * cost.forward,
        "backward": seen * cost.backward,
        "validation": at.spent.get("validation", 0.0) + validation,
    }


def gradient_writer(model: nn.Module, flat: Flat, amp: str) -> Callable[[Tensor, Tensor], None]:
    """A function of images and labels that writes the gradient of the voters' summed losses to
    `flat`.

    With `amp` "bf16", matrix products and convolutions compute in half precision.
    """
    if isinstance(model, MLP) and amp == "off":
        return model.gradient_writer()

    def write(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp == "bf16"):
            logits = model(images)
        loss = loss_of(logits.float(), labels).sum()
        flat.write(torch.autograd.grad(loss, flat.parameters))

    return write


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of each voter: logits (V, C, n), labels (n,) or (V, n) -> (V,)."""
    if len(logits) == 1:  # the same result in one operation instead of three
        return F.cross_entropy(logits, labels[None]).view(1)
    return F.cross_entropy(logits, labels.expand(len(logits), -1), reduction="none").mean(1)


def error_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Error, as a fraction, of each voter: logits (V, C, n), labels (n,) -> (V,)."""
    return (logits.argmax(1) != labels).float().mean(1)


@torch.no_grad()
def validate(
    model: Any, examples: AnyExamples, measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`measure` (`loss_of` or `error_of`) over all examples in evaluation mode, (V,)."""
    model.eval()
    count = len(examples.labels)
    parts = []
    for images, labels in evaluation_batches(model, examples):
        share = len(labels) / count
        parts.append(measure(model(images), labels) * share)
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


@torch.no_grad()
def evaluate(
    model: Any, examples: AnyExamples, function: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Outputs of `model` for all examples, which are the last dimension, in evaluation mode.

    `function` maps a batch of images to outputs; by default it is `model` itself.
    """
    model.eval()
    function = function or model
    batches = evaluation_batches(model, examples)
    return torch.cat([function(batch.images) for batch in batches], -1)


def evaluation_batches(model: Any, examples: AnyExamples) -> Iterator[Examples]:
    """The examples in batches of at most EVALUATION_BATCH examples and EVALUATION_BYTES of images
    and activations in `model`."""
    limit = EVALUATION_BYTES["cpu" if examples.labels.device.type == "cpu" else "cuda"]
    size = min(EVALUATION_BATCH, max(1, limit // (4 * model.footprint)))
    if size > 16:
        size -= size % 16  # so that every batch starts at a multiple of 64 bytes
    for start in range(0, len(examples.labels), size):
        yield examples.part(start, start + size)


def minibatches(
    examples: AnyExamples,
    settings: Settings,
    generators: Sequence[torch.Generator],
    drawing: Drawing = ALL_EXAMPLES,
) -> Iterator[Examples]:
    """The minibatches of one epoch in random order; with M `generators`, in one order per member
    (M, n).

    If one minibatch holds all examples, they keep their order, except with replay. A last minibatch
    of one example is joined to the one before it, because batch normalisation needs two.
    """
    replay = drawing.replay
    n = replay.new if replay else len(examples.labels)
    size = settings.batch_size
    if n <= size and not settings.augment and not replay:
        yield examples.part(0, n)
        return
    if replay:
        orders = [replay.draw(generator) for generator in generators]
    elif n <= size:
        orders = [torch.arange(n) for _ in generators]
    else:
        orders = [torch.randperm(n, generator=generator) for generator in generators]
    chosen = torch.stack(orders)
    pieces = list(chosen.to(examples.labels.device).split(size, 1))
    if n > size and pieces[-1].shape[1] == 1:
        pieces[-2:] = [torch.cat(pieces[-2:], 1)]
    for piece in pieces:
        images = examples.pixels(piece)
        if settings.augment:
            augmented = []
            for member, generator in zip(images, generators, strict=True):
                augmented.append(augment(member, generator, drawing.black))
            images = torch.stack(augmented)
        images = images.permute(0, 1, 4, 2, 3)
        labels = examples.labels[piece]
        if len(piece) > 1:
            yield Examples(images, labels)
        else:
            yield Examples(images[0], labels[0])


def augment(images: Tensor, generator: torch.Generator, black: Tensor | float) -> Tensor:
    """Randomly crop images (n, height, width, channels) after padding each side with 4 `black`
    pixels (channels,), and flip half of them (B.1.2)."""
    n, height, width, channels = images.shape
    shift = torch.randint(0, 2 * PADDING + 1, (n, 2), generator=generator).to(images.device)
    flipped = (torch.rand(n, generator=generator) < 0.5).to(images.device)
    padded = images.new_empty(n, height + 2 * PADDING, width + 2 * PADDING, channels)
    padded[:] = black
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = images
    # Views of all crops, (n, row, column, height, width, channels); picking one copies whole rows.
    crops = padded.unfold(1, height, 1).unfold(2, width, 1).permute(0, 1, 2, 4, 5, 3)
    images = crops[torch.arange(n, device=images.device), shift[:, 0], shift[:, 1]]
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(2), images)
