"""Resolve the flags of runs by this engine without running them, and check model and stream.

Usage: `python -m transformers_alma.check < REQUESTS.json`.

Input: a JSON list of objects with `words`, the flags that the user gave, `init`, `average` and
`stream`. Output: a JSON list with one object each: `settings`, values that the plan of a run needs,
under the names of fairseq's flags; and `words`, flags to pass to the engine. If one is impossible:
one line on standard error and exit code 2.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from alma.errors import Parser, UserError, command
from alma.hub_files import VOCABULARY
from alma.options import flag_words
from alma.stream import Stream, is_stream
from transformers_alma import models
from transformers_alma.arguments import Arguments, check_given, parse
from transformers_alma.disk import disk_use


class Requested(msgspec.Struct):
    """What is asked of a run."""

    words: list[str]
    init: str
    average: str
    stream: str


def resolve(requested: Requested) -> dict[str, Any]:
    """The settings of a run and its words. UserError: it is impossible."""
    check_given(requested.words)
    words = ["--init", requested.init, *flag_words("--average", requested.average)]
    arguments = parse([*requested.words, *words])
    config = models.config_of(requested.init)
    if not arguments.engine.random_weights:
        models.check_weights(requested.init)
    block_size = models.block_size_of(config, arguments.engine.block_size)
    whole, trained = models.parameters_of(config, arguments.engine)
    if is_stream(requested.stream):  # else --dry-run --megabatches
        stream = Stream.load(requested.stream)
        check_tokens(requested.init, config.get_text_config().vocab_size, stream)
        words += flag_words("--first_token", first_token(requested.init, stream.directory))
    checksum = models.checksum_of(requested.init)
    words += ["--init_sha256", checksum, "--block_size", str(block_size)]
    settings = _settings(arguments, block_size)
    settings |= {"--init-sha256": checksum, "--arch": config.model_type}
    settings |= {"parameters": whole, "trained_parameters": trained}
    settings |= disk_use(arguments, config, whole, trained)
    return {"settings": settings, "words": words}


def _settings(arguments: Arguments, block_size: int) -> dict[str, Any]:
    """The values that the plan of a run reads, under the names of fairseq's flags."""
    training = arguments.training
    updates = training["max_steps"]
    return {
        "--cpu": training["use_cpu"],
        "--fp16": False,  # fairseq's needs a GPU at the launch
        "--batch-size": training["per_device_train_batch_size"],
        "--max-tokens": None,
        "--tokens-per-sample": block_size - 1,
        "--required-batch-size-multiple": 1,
        "--update-freq": [training["gradient_accumulation_steps"]],
        "--max-update": max(updates, 0),
        "--max-epoch": 0 if updates > 0 else training["num_train_epochs"],
        "--num-workers": training["dataloader_num_workers"],
        "--distributed-world-size": arguments.engine.num_processes,
        "--optimizer": "adam",
        "--moe-expert-count": None,
        "--members": 1,
        "--zero-sharding": "none",
        "--save-interval-updates": int(training["save_steps"]),
    }


def check_tokens(folder: str, rows: int, stream: Stream) -> None:
    """UserError: the ids of a stream are not those of the model, which has `rows` of them.

    A model may have more rows than its tokenizer has tokens.
    """
    remedy = f"make a stream by `alma data --tokenizer {folder}`"
    if stream.end_token is None:
        problem = "its tokens are not those of a model of Hugging Face"
        raise UserError(f"{stream.directory}: {problem}: {remedy}")
    for name in VOCABULARY:
        of_stream = stream.files.get(name)
        of_model = Path(folder, name)
        if of_stream and of_model.exists() and of_stream.problem(of_model):
            problem = f"its {name} is not that of {folder}"
            raise UserError(f"{stream.directory}: {problem}: {remedy}")
    if stream.vocab_size > rows:
        problem = f"{stream.vocab_size:,} tokens, and {folder} has {rows:,}"
        remedy = "give the model the tokenizer's by its resize_token_embeddings"
        raise UserError(f"{stream.directory}: {problem}: {remedy}")


def first_token(folder: str, stream: Path) -> int | None:
    """The id with which the model's tokenizer begins every text, such as <bos>; None: none."""
    kind: Any = AutoTokenizer
    place: str | Path = folder
    if not any(Path(folder, name).is_file() for name in VOCABULARY):
        kind = PreTrainedTokenizerFast  # the stream has no config.json, which names the class
        place = stream
    with models.reading(place):
        tokenizer = kind.from_pretrained(place, trust_remote_code=False, local_files_only=True)
        return begin_token(tokenizer)


def begin_token(tokenizer: Any) -> int | None:
    """The id with which a tokenizer begins every text; None: none."""
    ids = tokenizer("").input_ids
    begins = bool(ids) and ids[0] == tokenizer.bos_token_id
    return ids[0] if begins else None


@command
def main() -> None:
    """Resolve the requests on standard input, given as JSON."""
    Parser(prog="python -m transformers_alma.check", description=main.__doc__).parse_args()
    try:
        requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Requested])
    except msgspec.DecodeError as error:
        raise UserError(f"standard input: give a JSON list of requests ({error})") from None
    logging.disable()
    print(json.dumps([resolve(requested) for requested in requests]))


if __name__ == "__main__":
    main()
