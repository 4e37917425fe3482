"""Evaluate a model of Hugging Face on texts, with its own tokenizer: a program of `alma matrix`.

Usage: python -m transformers_alma.texts FLAGS PATH/stage.json

The parts of the task are files of JSON lines. Their documents become one text of tokens, an end of
text after each document, and that is cut into blocks as the stream of a training is.
"""

import itertools
import json
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import Parser, UserError, command
from alma.trainer import StageTask, TextPart
from transformers_alma import worker

if TYPE_CHECKING:
    import numpy as np

_TEXTS = 1000  # documents that are given to the tokenizer at a time


def parser() -> Parser:
    """The flags before the path of the task."""
    flags = Parser(prog="python -m transformers_alma.texts", description=main.__doc__)
    add = flags.add_argument
    add("--text-key", default="text", help="field of the records that holds the text")
    add("--block-size", type=int, help="tokens of a block")
    add("--batch-size", type=int, default=8, help="blocks at a time")
    add("--dtype", default="auto", help="of the weights")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("task", metavar="PATH/stage.json", help="the task")
    return flags


@command
def main() -> None:
    """Measure the loss of the models of a task on each of its parts."""
    flags = parser().parse_args()
    worker.clean(os.environ)
    task = StageTask.read(flags.task)
    from transformers.utils import logging  # imports torch

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of texts that are longer than the model's positions
    try:
        evaluate(task, flags)
    except UserError as error:
        raise UserError(str(error).removeprefix("--init ")) from error


def evaluate(task: StageTask, flags: Namespace) -> None:
    """Answer a task with the losses of its models, whose probabilities are averaged.

    UserError: a model or its tokenizer is damaged.
    """
    import numpy as np

    from alma.token_ids import TokenIds
    from transformers_alma import models
    from transformers_alma.arguments import EngineArguments
    from transformers_alma.blocks import Layout, PartBlocks
    from transformers_alma.check import begin_token
    from transformers_alma.evaluation import batches, token_losses
    from transformers_alma.exported import register_code

    folder = task.members[0]
    device = _device(flags.device)
    register_code(folder)
    tokenizer = _tokenizer_of(folder)
    engine = EngineArguments(dtype=flags.dtype)
    _check_type(folder)
    ensemble = [models.pretrained(member, engine).eval().to(device) for member in task.members]
    config = ensemble[0].config
    block_size = models.block_size_of(config, flags.block_size)
    end_token = _end_token_of(folder, tokenizer, config)
    layout = Layout(block_size, end_token, begin_token(tokenizer))
    losses = {}
    for part in task.evaluate:
        texts = _texts_of(part, flags.text_key)
        ids = _encoded(texts, tokenizer, end_token)
        if ids.max() >= config.get_text_config().vocab_size:
            problem = "its tokenizer has more tokens than the model"
            raise UserError(f"{folder}: {problem}: give it the tokenizer that it was trained with")
        blocks = PartBlocks(TokenIds.in_memory(ids), layout)
        nll = np.concatenate(
            [
                token_losses(ensemble, tokens, device, None)
                for tokens in batches(blocks, flags.batch_size)
            ]
        )
        losses[part.name] = (float(nll.mean()), len(nll))
        task.save_part(part.name, *losses[part.name])
        print(f"{part.name}: {nll.mean():.4f} nats a token, {len(nll):,} tokens", flush=True)
    task.finish(losses, parameters=sum(model.num_parameters() for model in ensemble))


def _device(name: str) -> Any:
    """The device of --device. UserError: it is not there."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here: give --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _tokenizer_of(folder: str) -> Any:
    """The tokenizer in the folder of a model. UserError: none that transformers reads."""
    from transformers import AutoTokenizer

    from transformers_alma import models

    with models.reading(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _check_type(folder: str) -> None:
    """UserError: the model is none that transformers has."""
    from transformers_alma import models

    try:
        models.config_of(folder)
    except UserError as error:
        remedy = "test it by a program of your own, --command"
        raise UserError(str(error).replace("train it by --trainer COMMAND", remedy)) from error


def _end_token_of(folder: str, tokenizer: Any, config: Any) -> int:
    """The id that ends a text. UserError: neither tokenizer nor model names one."""
    of_model = config.get_text_config().eos_token_id
    if isinstance(of_model, list):
        of_model = of_model[0]
    end_token = of_model if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end_token is None:
        problem = "neither its tokenizer nor its config.json has an end of text"
        raise UserError(f"{folder}: {problem}: set eos_token in its tokenizer_config.json")
    return end_token


def _texts_of(part: TextPart, text_key: str) -> Iterator[str]:
    """The texts of a part; a key a.b that is no field means b in object a, as in `alma data`."""
    with Path(part.file(".jsonl")).open("rb") as lines:
        for line in lines:
            value: Any = json.loads(line)
            key = text_key
            while key not in value and "." in key:
                name, _, key = key.partition(".")
                value = value[name]
            yield value[key]


def _encoded(texts: Iterable[str], tokenizer: Any, end_token: int) -> "np.ndarray":
    """The ids of all texts, each followed by the end of text, int32 (tokens,)."""
    import numpy as np

    arrays = []
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, _TEXTS)):
        for ids in tokenizer(batch, add_special_tokens=False).input_ids:
            arrays.append(np.array([*ids, end_token], np.int32))
    return np.concatenate(arrays)


if __name__ == "__main__":
    main()
