"""The model that a run starts from (`--init`): a checkpoint of a language model, or a folder of Hugging Face.

A folder has a config.json of the GPT-2 family, and its weights as safetensors; transformers is not needed.
"""

import hashlib
import json
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
_BAD = (OSError, LookupError, TypeError, json.JSONDecodeError, SafetensorError)
"""What a folder that is damaged or not whole raises."""


def read(model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The flags of fairseq-train that `model` determines, with their values, and fairseq's weights, without
    PREFIX. UserError: missing, damaged, or of another architecture."""
    folder, files = Path(model), [Path(model)]
    if not folder.is_dir():
        flags, state = _of_checkpoint(model)
    else:
        try:
            index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
            if index.is_file():
                names = set(json.loads(index.read_bytes())["weight_map"].values())
            flags = gpt2.flags_of(json.loads((folder / "config.json").read_bytes()))
            files = [folder / name for name in sorted(names)]
            weights = {name: value for file in files for name, value in load_file(file).items()}
            state = gpt2.from_gpt2(weights, flags)
        except _BAD as error:
            why = f"not a whole model of Hugging Face ({type(error).__name__}: {error})"
            raise UserError(f"{folder}: {why}: save it again by its save_pretrained") from error
        except ValueError as error:
            raise UserError(f"{folder}: {error}") from error
    sums = "".join(map(sha256_file, files))
    return {**flags, "--init-sha256": hashlib.sha256(sums.encode()).hexdigest()}, state


def _of_checkpoint(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (checkpoint,) = memory_map_members([path])
    with reading(path):
        options, task = checkpoint["cfg"]["model"], checkpoint["cfg"]["task"]
        state = {name.removeprefix(PREFIX): value for name, value in checkpoint["model"].items()}
        flags: dict[str, Any] = {"--arch": "switch_gmoe" if "moe_freq" in options else "transformer_lm"}
        flags |= {flag_of(name): options[name] for name in _OF_MODEL if options.get(name) is not None}
        longest = options.get("max_target_positions") or task["tokens_per_sample"]
        positions = state.get("embed_positions.weight", range(longest + gpt2.EOS))
        flags |= {
            "--max-target-positions": len(positions) - gpt2.EOS,
            "--end-token": task.get("end_token", -1),
        }
    return flags, state


def check(args: Namespace, flags: dict[str, Any], rows: int) -> None:
    """UserError: a command line or its stream contradicts its --init, of which `read` gave `flags`.

    `rows`: of fairseq's embeddings.
    """
    model, positions = args.init, flags["--max-target-positions"]
    for flag, value in flags.items():
        given = getattr(args, flag[2:].replace("-", "_"), None)
        grown = flag == "--moe-expert-count" and args.finetune_from_model
        if given != value and (given or value) and flag != "--arch" and not grown:  # None: off
            raise UserError(f"{flag} {given}: {model} has {value}: leave the flag out, or give its model")
    if args.tokens_per_sample > positions:
        less = f"{model} has {positions} positions: give --tokens-per-sample {positions} or less"
        raise UserError(f"--tokens-per-sample {args.tokens_per_sample}: {less}")
    if args.ddp_backend == "fully_sharded" or args.criterion == "label_smoothed_cross_entropy":
        raise UserError("--init: not with --ddp-backend fully_sharded or label_smoothed_cross_entropy")
    if not is_stream(args.data):  # the output of fairseq-preprocess, or only planned
        return
    stream, ids, wrong = Stream.load(args.data), _ids(Path(model)), ""
    needed, own = stream.vocab_size + gpt2.UNK + 1, _ids(stream.directory)
    if (ids and ids != own) or (flags["--end-token"] >= 0 and not own):
        wrong = f"its token ids are not those of {model}"
    elif rows != needed:
        wrong = (
            f"it has {needed:,} token ids, and {model} {rows:,} (its resize_token_embeddings changes that)"
        )
    if wrong:
        raise UserError(f"{args.data}: {wrong}: make a stream by `alma data --tokenizer {model}`")


def _ids(folder: Path) -> dict[str, int] | None:
    """The ids of the tokens of a Hugging Face tokenizer; None without."""
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).is_file():
            made = json.loads((folder / name).read_bytes())
            return made if name == "vocab.json" else made["model"]["vocab"]
    return None


def load(module: nn.Module, model: str) -> None:
    """Give `module`, a language model of fairseq, the weights of `model`.

    Experts begin as copies of a dense layer. The router is then a tree (see `Router`): its output weights are
    1, so that the function is that of `model` whatever the gates are. UserError: as `read`, or no such model.
    """
    state = module.state_dict() | {PREFIX + name: value for name, value in read(model)[1].items()}
    for name, layer in module.named_modules():
        if isinstance(layer, SwitchFFN) and f"{name}.weight" in state:
            for ours, theirs in zip(STACKED, ("1.weight", "1.bias", "2.weight", "2.bias"), strict=True):
                dense = state.pop(name.removesuffix("1") + theirs)
                state[f"{name}.{ours}"] = dense.expand(layer.experts, *dense.shape)
            for expert in range(1, layer.experts):  # each split halves the tokens of its parent
                state[f"{name}.router.parent"][expert] = expert - (1 << expert.bit_length() - 1)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{model}: {' '.join(str(error).split())[:300]}") from error
