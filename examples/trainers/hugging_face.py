"""A trainer of Hugging Face: alma train STREAM --trainer 'python examples/trainers/hugging_face.py [MODEL]'.

It trains the causal language model in the folder MODEL, whose ids must be those of the stream, else a small
Llama. (transformers.Trainer would need the package accelerate, too.)
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional

from alma.trainer import StageTask, TextPart, stop_requests

LENGTH, BATCH, EVERY = (
    64,
    16,
    20,
)  # tokens of a block, the first as context; blocks of an update; between saves


def build(task: StageTask, seed: int, folder: str | None = None) -> transformers.PreTrainedModel:
    transformers.set_seed(seed)
    if folder := folder or next(iter(sys.argv[1:-1]), None):
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=task.dictionary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def blocks(parts: tuple[TextPart, ...]) -> list[torch.Tensor]:
    """Blocks of LENGTH tokens that begin with the last one of the block before; the first begins with eos."""
    ids = np.concatenate([[2], *(part.read_tokens() for part in parts)]).astype(np.int64)
    return [torch.from_numpy(ids[at : at + LENGTH]) for at in range(0, len(ids) - 1, LENGTH - 1)]


def train(task: StageTask) -> None:
    stopped, began, path = stop_requests(), time.monotonic(), Path(task.out, "resume.pt")
    new, old = ([one for one in blocks(p) if len(one) == LENGTH] for p in (task.train, task.earlier))
    model, first, before, end = (
        build(task, task.seeds[0], task.checkpoint),
        0,
        0.0,
        task.budget.get("updates", 100),
    )
    optimizer = torch.optim.AdamW(model.train().parameters(), 3e-3)
    if path.exists():
        model_state, optimizer_state, first, before = torch.load(path, weights_only=True)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    for update in range(first, end):
        rng = np.random.default_rng([task.seeds[0], task.t, update])  # the same after a restart
        chosen = [old if replayed else new for replayed in rng.random(BATCH) < task.replay_share]
        ids = torch.stack([each[rng.integers(len(each))] for each in chosen])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if stopped() or (update + 1) % EVERY == 0 or update + 1 == end:
            task.progress(update + 1, loss.item())
            seconds = before + time.monotonic() - began
            torch.save((model.state_dict(), optimizer.state_dict(), update + 1, seconds), f"{path}.part")
            os.replace(f"{path}.part", path)
        if stopped() and update + 1 < end:
            sys.exit(75)
    model.save_pretrained(Path(task.out, "model"))
    seconds, tokens = before + time.monotonic() - began, end * BATCH * (LENGTH - 1)
    parameters = model.num_parameters()
    task.finish(parameters=parameters, checkpoint="model", updates=end, tokens=tokens, seconds=seconds)


@torch.no_grad()
def evaluate(task: StageTask) -> None:
    models = [build(task, 0, path) for path in task.members] or [build(task, seed) for seed in task.seeds]
    models, losses = [model.eval() for model in models], {}
    for part in task.evaluate:
        nats = 0.0
        for block in blocks((part,)):
            mean = torch.stack([model(block[None, :-1]).logits.softmax(-1) for model in models]).mean(0)
            nats += functional.nll_loss(mean[0].log(), block[1:], reduction="sum").item()
        losses[part.name] = nats / part.tokens, part.tokens
    task.finish(losses, parameters=sum(model.num_parameters() for model in models))


if __name__ == "__main__":
    given = StageTask.read(sys.argv[-1])
    train(given) if given.action == "train" else evaluate(given)
