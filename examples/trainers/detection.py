"""A detector of torchvision on a stream of `alma images --manifest FILE --by week --write STREAM`,
for `alma train STREAM --learner sm --trainer 'python examples/trainers/detection.py'`.

The manifest has `boxes`, a list of [x1, y1, x2, y2] in pixels, of the class `label`.
"""

import itertools
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchvision.io import ImageReadMode, decode_image
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from alma.errors import fail
from alma.trainer import StageTask, TextPart, stop_requests

CLASSES = ("circle", "square")
BATCH = 8  # images of an update
EVERY = 20  # updates between saves


class Features(nn.Module):
    """A tiny backbone; a trainer of yours would take `resnet_fpn_backbone`."""

    out_channels = 32

    def __init__(self):
        super().__init__()
        sizes = (3, 16, 32, 32)
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in itertools.pairwise(sizes)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, images):
        return OrderedDict({"0": self.layers(images)})


def examples(task: StageTask, parts: tuple[TextPart, ...]) -> list[tuple[torch.Tensor, dict]]:
    """Images (3, height, width) in 0..1, and the boxes and labels of each."""
    labelled = []
    for line in itertools.chain.from_iterable(part.read_documents() for part in parts):
        image = decode_image(str(Path(task.stream, line["path"])), ImageReadMode.RGB) / 255
        boxes = torch.tensor(line["boxes"], dtype=torch.float32).view(-1, 4)
        labels = torch.full((len(boxes),), CLASSES.index(line["label"]))
        labelled.append((image, {"boxes": boxes, "labels": labels}))
    return labelled


def build(seed: int, checkpoint: str | None = None) -> RetinaNet:
    torch.manual_seed(seed)
    anchors = AnchorGenerator(((8, 16, 32),), ((1.0,),))
    model = RetinaNet(Features(), len(CLASSES), min_size=64, max_size=64, anchor_generator=anchors)
    if checkpoint:
        model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model.train()  # only then torchvision's detectors return losses


def loss_of(model: RetinaNet, batch: list[tuple[torch.Tensor, dict]]) -> torch.Tensor:
    images, targets = zip(*batch, strict=True)
    return sum(model(list(images), list(targets)).values())


def train(task: StageTask) -> None:
    stopped = stop_requests()
    began = time.monotonic()
    new = examples(task, task.train)
    old = examples(task, task.earlier)
    model = build(task.seeds[0], task.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    path = Path(task.out, "model.pt")
    first = 0
    before = 0.0  # seconds
    if path.exists():  # a start before this one was stopped
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["updates"]
        before = state["seconds"]
    end = task.budget.get("updates", 60)
    for update in range(first, end):
        rng = np.random.default_rng([task.seeds[0], task.t, update])  # the same after a restart
        is_replay = rng.random(BATCH) < task.replay_share
        pools = [old if replay else new for replay in is_replay]
        loss = loss_of(model, [pool[rng.integers(len(pool))] for pool in pools])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = update + 1 == end or stopped()
        if last or (update + 1) % EVERY == 0:
            task.progress(update + 1, loss.item())
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "updates": update + 1,
            }
            torch.save(state | {"seconds": before + time.monotonic() - began}, f"{path}.part")
            os.replace(f"{path}.part", path)
        if stopped() and update + 1 < end:
            sys.exit(75)
    sizes = sum(p.numel() for p in model.parameters())
    seconds = before + time.monotonic() - began
    task.finish(
        parameters=sizes, checkpoint="model.pt", updates=end, tokens=end * BATCH, seconds=seconds
    )


@torch.no_grad()
def evaluate(task: StageTask) -> None:
    if len(task.seeds) > 1:
        fail("detectors have no mean of probabilities: give --learner sm")
    model = build(0, task.members[0]) if task.members else build(task.seeds[0])
    losses = {}
    for part in task.evaluate:
        batch = examples(task, (part,))
        total = sum(loss_of(model, [example]).item() for example in batch)
        losses[part.name] = (total / len(batch), len(batch))
    task.finish(losses, parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    stage_task = StageTask.read(sys.argv[1])
    if stage_task.action == "train":
        train(stage_task)
    else:
        evaluate(stage_task)
