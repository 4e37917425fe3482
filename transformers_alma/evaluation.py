"""Evaluate models on the parts of a task: the loss of each token, and of each document."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from alma.trainer import StageTask
from transformers_alma import models
from transformers_alma.arguments import Arguments
from transformers_alma.blocks import Layout, PartBlocks


def evaluate(task: StageTask, arguments: Arguments) -> None:
    """Answer a task with the losses of its models, whose probabilities are averaged.

    UserError: a model is damaged, or has changed.
    """
    engine = arguments.engine
    device = _device(arguments)
    dtype = "float32"
    if engine.dtype != "float32":
        dtype = engine.dtype
    members: list[str | None] = list(task.members) or [None] * len(task.seeds)
    ensemble = []
    for member, seed in zip(members, _seeds(task, len(members)), strict=True):
        ensemble.append(models.load(member, engine, seed, dtype).eval().to(device))
    if len(ensemble) > 1 and not task.members and not engine.random_weights:
        ensemble = ensemble[:1]  # all members start from one model
    layout = Layout(
        models.block_size_of(ensemble[0].config, engine.block_size),
        task.end_token,
        engine.first_token,
    )
    losses = {}
    documents = {}
    batch = arguments.training["per_device_eval_batch_size"]
    for part in task.evaluate:
        blocks = PartBlocks(part.map_tokens(), layout)
        of_batches = [
            token_losses(ensemble, tokens, device, _autocast(arguments))
            for tokens in batches(blocks, batch)
        ]
        nll = np.concatenate(of_batches)
        losses[part.name] = (float(nll.mean()), len(nll))
        documents[part.name] = part.document_losses(nll)
    parameters = sum(model.num_parameters() for model in ensemble)
    if not task.members:
        parameters = ensemble[0].num_parameters() * len(members)
    task.finish(losses, documents, parameters=parameters)


def _seeds(task: StageTask, count: int) -> Sequence[int]:
    """A seed for each model, of its random weights."""
    if task.members:
        return [0] * count
    return task.seeds


def _device(arguments: Arguments) -> torch.device:
    if arguments.training["use_cpu"] or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def _autocast(arguments: Arguments) -> torch.dtype | None:
    """The type of the products in mixed precision, as in training; None: that of the weights."""
    if arguments.training["bf16"]:
        return torch.bfloat16
    if arguments.training["fp16"]:
        return torch.float16
    return None


def batches(blocks: PartBlocks, size: int) -> Iterator[NDArray[np.int64]]:
    """The blocks in order, (blocks, length), `size` at a time; the short last one by itself."""
    batch: list[NDArray[np.int64]] = []
    for number in range(len(blocks)):
        block = blocks.read(number)
        if batch and (len(batch) == size or len(block) != len(batch[0])):
            yield np.stack(batch)
            batch = []
        batch.append(block)
    if batch:
        yield np.stack(batch)


@torch.inference_mode()
def token_losses(
    ensemble: Sequence[nn.Module],
    tokens: NDArray[np.int64],
    device: torch.device,
    autocast: torch.dtype | None,
) -> NDArray[np.float64]:
    """The loss in nats of each token but the first of each block, (blocks * (length - 1),).

    tokens: (blocks, length). The probabilities of several models are averaged.
    """
    inputs = torch.from_numpy(tokens).to(device)
    targets = inputs[:, 1:].flatten()
    log_probabilities: list[Tensor] = []
    for model in ensemble:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        negative = functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
        log_probabilities.append(-negative.double())
    mean = torch.stack(log_probabilities).logsumexp(0) - np.log(len(ensemble))
    return -mean.cpu().numpy()
