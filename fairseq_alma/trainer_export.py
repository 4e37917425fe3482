"""Export the model of a run of `alma train --trainer`, for `alma export`.

The trainer is the user's own, and so is the format of its checkpoint. A folder of Hugging Face is
copied, with the stream's tokenizer if it has none and its ids are those of the stream.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from alma.card import CARD, card_of
from alma.errors import UserError, require_extra, require_package
from alma.files import filled, read_file
from alma.hub_files import TOKENIZER, TRAINING_STATE, WEIGHTS, matching, remove_others
from alma.markers import deployed_by
from alma.schema import COUNT, NATURAL, TEXT, parse_json, require
from alma.stream import is_stream
from alma.trainer import STAGE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONFIG: dict[str, Any] = {
    "vocab_size": COUNT,
    "bos_token_id": NATURAL | None,
    "pad_token_id": NATURAL | None,
    "max_position_embeddings": COUNT | None,
    "n_positions": COUNT | None,
}
"""Settings of config.json that a tokenizer needs; eos_token_id may also be a list."""


def checkpoint_of(run: Path, t: int | None = None) -> Path:
    """The folder of Hugging Face that `run` evaluated last, or after mega-batch `t`.

    UserError: it is none, or several.
    """
    deployed = deployed_by(run, t)
    checkpoint = deployed.checkpoints[-1]
    if deployed.models != 1:
        raise UserError(
            f"{run} deploys an ensemble of {deployed.models} models of its own trainer, and export "
            f"takes one: use a checkpoint as the trainer wrote it, such as {checkpoint}"
        )
    if not checkpoint.exists():
        stage = checkpoint.relative_to(run).parts[0]
        raise UserError(
            f"{checkpoint}: missing: restore it, or delete {run / stage} and rerun the command"
        )
    has_weights = any(matching(checkpoint, WEIGHTS))
    if not (has_weights and (checkpoint / "config.json").is_file()):
        raise UserError(
            f"{checkpoint}, the checkpoint of the run's own trainer, is no folder of Hugging Face "
            "(config.json and *.safetensors or pytorch_model*.bin): load it with the trainer's "
            "code; one of fairseq: `alma export CHECKPOINT --out DIR --tokenizer STREAM`"
        )
    return checkpoint


def _stream_of(run: Path, checkpoint: Path) -> Path:
    """The stream that the trainer was given. UserError: it is not here."""
    tasks = [folder / STAGE for folder in checkpoint.parents if (folder / STAGE).is_file()]
    if not tasks:
        raise UserError(f"{checkpoint.parent} has no {STAGE}: give the stream as --tokenizer")
    try:
        task = parse_json(read_file(tasks[0]))
        require(task, {"stream": TEXT}, ["stream"])
    except ValueError as error:
        raise UserError(f"{tasks[0]}: damaged ({error}): give the stream as --tokenizer") from None
    stream = Path(task["stream"])
    if not is_stream(stream):
        raise UserError(f"{stream}: the stream of {run} is not here; give it as --tokenizer")
    return stream


def _tokenizer_of(stream: Path, checkpoint: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a stream for a model. UserError: its ids are not those of the model."""
    try:
        config = parse_json(read_file(checkpoint / "config.json"))
        require(config, _CONFIG, ["vocab_size"])
    except ValueError as error:
        raise UserError(f"{checkpoint}/config.json: {error}") from None
    require_package("transformers", "a tokenizer", "export")
    require_extra("text", "a tokenizer")
    from fairseq_alma.hugging_face import tokenizer_of

    settings = {name: config.get(name) for name in (*_CONFIG, "eos_token_id")}
    if settings["max_position_embeddings"] is None:  # GPT-2's name
        settings["max_position_embeddings"] = settings["n_positions"]
    return tokenizer_of(stream, SimpleNamespace(**settings))


def export(model: str, out: Path, t: int | None = None, tokenizer: Path | None = None) -> None:
    """Copy the model of a run into the directory `out`, without the state of its training.

    `t`: the model after that mega-batch, by default the last one; `tokenizer`: a stream whose
    tokenizer replaces the model's own. UserError: the run deploys no folder of Hugging Face, the
    ids of `tokenizer` are not the model's, or the disk is full.
    """
    run = Path(model)
    checkpoint = checkpoint_of(run, t)
    own_tokenizer = matching(checkpoint, TOKENIZER)
    names = matching(checkpoint, ("[!.]*",)) - matching(checkpoint, TRAINING_STATE)
    converted = None
    if tokenizer:
        converted = _tokenizer_of(tokenizer, checkpoint)
        names -= own_tokenizer
        note = f"with the tokenizer of {tokenizer}"
    elif own_tokenizer:
        note = "with its own tokenizer"
    else:
        try:
            stream = _stream_of(run, checkpoint)
            converted = _tokenizer_of(stream, checkpoint)
            note = f"with the tokenizer of {stream}"
        except UserError as error:
            note = f"without a tokenizer ({error})"
    with filled(out, "config.json", (OSError,)) as place:
        for name in names:
            shutil.copyfile(checkpoint / name, place / name)
        if converted:
            converted.save_pretrained(place)
        (place / CARD).write_text(card_of(run, t))
        remove_others(out, place)
    print(f"{out}: a copy of {checkpoint}, {note}")
