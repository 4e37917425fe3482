"""The model that a run starts from (`--init`): a checkpoint of a language model, or a folder of Hugging Face.

A folder has a config.json of the GPT-2 family and its weights as safetensors; transformers is not needed.
"""

import hashlib
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from alma.errors import UserError
from alma.files import sha256_file
from alma.options import flag_of
from alma.stream import Stream, is_stream
from fairseq_alma import gpt2
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.moe.layer import STACKED, SwitchFFN

_OF_MODEL: tuple[str, ...] = ("decoder_layers", "decoder_attention_heads", "decoder_embed_dim")
_OF_MODEL += ("decoder_input_dim", "decoder_output_dim", "decoder_ffn_embed_dim", "decoder_learned_pos")
_OF_MODEL += ("decoder_normalize_before", "no_decoder_final_norm", "no_token_positional_embeddings")
_OF_MODEL += ("no_scale_embedding", "layernorm_embedding", "share_decoder_input_output_embed")
_OF_MODEL += ("activation_fn", "moe_freq", "moe_expert_count")
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_SAVE = "save the model there by its save_pretrained"


def read(model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values of fairseq-train's flags that the architecture of `model` has, and fairseq's state dict.

    UserError: missing, damaged, or of another architecture.
    """
    if os.path.isdir(model):
        flags, state = _read_folder(Path(model))
    else:
        flags, state = _read_checkpoint(model)
    sums = "".join(map(sha256_file, _files(model)))
    return flags | {"--init-sha256": hashlib.sha256(sums.encode()).hexdigest()}, state


def _files(model: str) -> list[Path]:
    """The files of the weights."""
    folder = Path(model)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [folder / "model.safetensors"] if folder.is_dir() else [folder]


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        flags = gpt2.flags_of(json.loads((folder / "config.json").read_bytes()))
        weights: dict[str, Tensor] = {}
        for path in _files(str(folder)):
            weights |= load_file(path)
        return flags, gpt2.from_gpt2(weights, flags)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or error}: no such file: {_SAVE}") from error
    except LookupError as error:
        raise UserError(f"{folder}: it lacks {error}: {_SAVE}") from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: {error}") from error


def _read_checkpoint(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (checkpoint,) = memory_map_members([path])
    with reading(path):
        options, task, state = checkpoint["cfg"]["model"], checkpoint["cfg"]["task"], checkpoint["model"]
        flags = {flag_of(name): options[name] for name in _OF_MODEL if options.get(name) is not None}
        positions = state.get(f"{PREFIX}embed_positions.weight")
        longest = options.get("max_target_positions") or task["tokens_per_sample"]
        flags["--max-target-positions"] = longest if positions is None else len(positions) - gpt2.EOS
        flags["--end-token"] = task.get("end_token", -1)
        arch = "switch_gmoe" if "--moe-freq" in flags else "transformer_lm"
    return {"--arch": arch, **flags}, state


def check(args: Namespace, flags: dict[str, Any], tokens: int) -> None:
    """UserError: the command line or its stream contradicts the model of --init.

    `flags`: as `read` gives them; `tokens`: rows of the model's embeddings.
    """
    model = args.init
    for flag, value in flags.items():
        given = getattr(args, flag[2:].replace("-", "_"), None)
        grown = flag == "--moe-expert-count" and args.finetune_from_model
        if given != value and flag != "--arch" and not grown:
            raise UserError(f"{flag} {given}: {model} has {value}; give that model's, or leave the flag out")
    if args.tokens_per_sample > (positions := flags["--max-target-positions"]):
        raise UserError(
            f"--tokens-per-sample {args.tokens_per_sample}: {model} has {positions} positions: give "
            f"--tokens-per-sample {positions} or less"
        )
    if args.ddp_backend == "fully_sharded" or args.criterion == "label_smoothed_cross_entropy":
        raise UserError("--init: not with --ddp-backend fully_sharded or label_smoothed_cross_entropy")
    if not is_stream(args.data):  # of fairseq-preprocess, whose ids only its user knows
        return
    stream, remedy = Stream.load(args.data), f"make the stream by `alma data --tokenizer {model}`"
    if flags["--end-token"] >= 0 and not set(_TOKENIZERS) & stream.files.keys():
        raise UserError(f"{args.data}: its ids are not those of {model}: {remedy}")
    if os.path.isdir(model) and _ids(Path(model)) not in (None, _ids(stream.directory)):
        raise UserError(f"{args.data}: its tokenizer is not that of {model}: {remedy}")
    if tokens != stream.vocab_size + gpt2.UNK + 1:
        rows = f"{tokens - gpt2.UNK - 1:,} rows in its embeddings"
        raise UserError(
            f"{args.data} has a dictionary of {stream.vocab_size:,} tokens, {model} {rows}: {remedy}, or "
            f"give the model as many by its resize_token_embeddings"
        )


def _ids(folder: Path) -> dict[str, int] | None:
    """The ids of the tokens in a folder's files; None without."""
    for name in filter(lambda name: (folder / name).is_file(), _TOKENIZERS):
        made = json.loads((folder / name).read_bytes())
        return made["model"]["vocab"] if name == "tokenizer.json" else made
    return None


def load(module: nn.Module, model: str) -> None:
    """Give `module`, a language model of fairseq, the weights of --init `model`.

    Where `module` has a Switch layer and `model` a dense one, each expert is a copy of it. The router is a
    tree (see `Router`), whose output weights are 1: the function stays the same, whatever its gates are.
    UserError: as `read`; weights of other names or shapes.
    """
    _, state = read(model)
    for name, layer in module.named_modules():
        if isinstance(layer, SwitchFFN) and f"{name}.weight" in state:
            for ours, theirs in zip(STACKED, ("1.weight", "1.bias", "2.weight", "2.bias"), strict=True):
                dense = state.pop(name.removesuffix("1") + theirs)
                state[f"{name}.{ours}"] = dense.expand(layer.experts, *dense.shape)
            router = layer.router.state_dict()
            for expert in range(1, layer.experts):  # each split halves the tokens of its parent
                router["parent"][expert] = expert - (1 << expert.bit_length() - 1)
            state |= {f"{name}.router.{key}": value for key, value in router.items()}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{model}: {' '.join(str(error).split())[:300]}") from error
