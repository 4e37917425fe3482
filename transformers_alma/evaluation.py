"""Evaluate models on the parts of a task: the loss of each token, and of each document."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from alma.trainer import StageTask
from transformers_alma import models
from transformers_alma.arguments import Arguments, EngineArguments
from transformers_alma.blocks import Layout, PartBlocks


def evaluate(task: StageTask, arguments: Arguments) -> None:
    """Answer a task with the losses of its models, whose probabilities are averaged.

    UserError: a model is damaged, or has changed.
    """
    engine = arguments.engine
    device = _device(arguments)
    ensemble = [model.eval().to(device) for model in _models(task, engine)]
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
    members = len(task.members or task.seeds)
    task.finish(losses, documents, parameters=members * ensemble[0].num_parameters())


def _models(task: StageTask, engine: EngineArguments) -> list[Any]:
    """The models of an evaluation; one of several that are equal: the untrained ones of --init."""
    if task.members:
        return [models.load(member, engine, seed=0) for member in task.members]
    seeds = task.seeds if engine.random_weights else task.seeds[:1]
    return [models.load(None, engine, seed) for seed in seeds]


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
