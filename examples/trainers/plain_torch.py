"""A trainer of plain PyTorch for `alma train STREAM --trainer 'python
examples/trainers/plain_torch.py'`."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from alma.trainer import StageTask, TextPart, stop_requests

LENGTH = 64  # tokens of a block
BATCH = 16  # blocks of an update
WIDTH = 32
EVERY = 20  # updates between saves


class TinyLM(nn.Module):
    """A causal transformer; ids (batch, length) -> logits (batch, length, dictionary)."""

    def __init__(self, dictionary: int):
        super().__init__()
        self.words = nn.Embedding(dictionary, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        nn.init.normal_(self.words.weight, std=WIDTH**-0.5)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids):
        length = ids.shape[1]
        vectors = self.words(ids) + self.places.weight[:length]
        outputs = self.layers(vectors, self.mask[:length, :length], is_causal=True)
        return outputs @ self.words.weight.T


def blocks(task: StageTask, parts: tuple[TextPart, ...]) -> list[torch.Tensor]:
    """The parts as blocks of LENGTH tokens and the one before; the first token of all follows the
    end of a text."""
    ids = np.concatenate([[task.end_token], *(part.read_tokens() for part in parts)]).astype(
        np.int64
    )
    return [torch.from_numpy(ids[at : at + LENGTH + 1]) for at in range(0, len(ids) - 1, LENGTH)]


def build(task: StageTask, seed: int, checkpoint: str | None = None) -> TinyLM:
    torch.manual_seed(seed)
    model = TinyLM(task.dictionary)
    if checkpoint:
        model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model


def train(task: StageTask) -> None:
    stopped = stop_requests()
    began = time.monotonic()
    new = [block for block in blocks(task, task.train) if len(block) > LENGTH]
    old = [block for block in blocks(task, task.earlier) if len(block) > LENGTH]
    model = build(task, task.seeds[0], task.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    path = Path(task.out, "model.pt")
    first = 0
    before = 0.0  # seconds
    if path.exists():  # a start before this one was stopped
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["updates"]
        before = state["seconds"]
    end = task.budget.get("updates", 100)
    for update in range(first, end):
        rng = np.random.default_rng([task.seeds[0], task.t, update])  # the same after a restart
        is_replay = rng.random(BATCH) < task.replay_share
        pools = [old if replay else new for replay in is_replay]
        batch = torch.stack([pool[rng.integers(len(pool))] for pool in pools])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
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
    task.finish(
        parameters=sum(p.numel() for p in model.parameters()),
        checkpoint="model.pt",
        updates=end,
        tokens=end * BATCH * LENGTH,
        seconds=before + time.monotonic() - began,
    )


@torch.no_grad()
def evaluate(task: StageTask) -> None:
    if task.members:
        models = [build(task, 0, path).eval() for path in task.members]
    else:
        models = [build(task, seed).eval() for seed in task.seeds]
    losses = {}
    documents = {}
    for part in task.evaluate:
        of_blocks = []
        for block in blocks(task, (part,)):
            probabilities = [model(block[None, :-1]).softmax(-1) for model in models]
            mean = torch.stack(probabilities).mean(0)
            of_blocks.append(nn.functional.nll_loss(mean[0].log(), block[1:], reduction="none"))
        nll = torch.cat(of_blocks).double()  # of each token
        losses[part.name] = (nll.mean().item(), len(nll))
        documents[part.name] = part.document_losses(nll.numpy())  # to compare models in pairs
    parameters = sum(p.numel() for model in models for p in model.parameters())
    task.finish(losses, documents, parameters=parameters)


if __name__ == "__main__":
    stage_task = StageTask.read(sys.argv[1])
    if stage_task.action == "train":
        train(stage_task)
    else:
        evaluate(stage_task)
