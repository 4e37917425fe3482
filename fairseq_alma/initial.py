"""The model that a run starts from (`--init`): a checkpoint, or a Hugging Face GPT-2 folder.

GPT-2 computes the same as fairseq's transformer_lm; only the layout of the weights differs.
fairseq's tables begin with rows for special tokens: position p is row p + 2, token i is row i + 4.
Row 2, eos, holds the embedding of GPT-2's end-of-text token.
"""

import functools
import hashlib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from alma.errors import UserError
from alma.files import sha256_file
from alma.hub_files import VOCABULARY
from alma.options import flag_of
from alma.schema import COUNT, NATURAL, require
from alma.stream import INSIDE, Stream, is_stream
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.defaults import attribute_of
from fairseq_alma.moe.layer import STACKED, SwitchFFN

BOS, PAD, EOS, UNK = range(4)  # ids of fairseq's special tokens
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "tanh": "tanh",
    "linear": "linear",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
}
"""transformers' names of activations, by fairseq's."""
_OURS = {name: activation for activation, name in ACTIVATIONS.items()}
_OURS["gelu_pytorch_tanh"] = "gelu_accurate"
_TAKEN: dict[str, Any] = {
    "model_type": ["gpt2"],
    "activation_function": _OURS,
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
}
"""Settings of config.json and the values that fairseq supports; others are refused."""
_KINDS: dict[str, Any] = {
    "n_layer": COUNT,
    "n_head": COUNT,
    "n_embd": COUNT,
    "n_positions": COUNT,
    "vocab_size": COUNT,
    "eos_token_id": NATURAL,
    "n_inner": COUNT | None,
    "tie_word_embeddings": bool,
}
_BLOCK = {
    "ln_1": ["self_attn_layer_norm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.out_proj"],
    "ln_2": ["final_layer_norm"],
    "mlp.c_fc": ["fc1"],
    "mlp.c_proj": ["fc2"],
}
"""transformers' names in a block, and fairseq's names of their parts."""
_OF_MODEL = (
    "decoder_layers",
    "decoder_attention_heads",
    "decoder_embed_dim",
    "decoder_input_dim",
    "decoder_output_dim",
    "decoder_ffn_embed_dim",
    "decoder_learned_pos",
    "decoder_normalize_before",
    "no_decoder_final_norm",
    "no_token_positional_embeddings",
    "layernorm_embedding",
    "no_scale_embedding",
    "moe_freq",
    "share_decoder_input_output_embed",
    "activation_fn",
    "moe_expert_count",
)
"""Options of fairseq that define a model's architecture."""


@functools.lru_cache(maxsize=1)
def read(model: str) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """Read the model of --init.

    Returns the flags of fairseq-train that `model` determines, with values; fairseq's weights,
    without PREFIX; and the folder of its tokenizer or dict.txt. UserError: missing, damaged, or of
    another architecture.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _of_checkpoint(model)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        require(config, {})
        _check_supported(folder, config)
        names = ["model.safetensors"]
        # As in transformers: if the single file exists, an index beside it is stale.
        if not (folder / names[0]).is_file():
            index = json.loads((folder / "model.safetensors.index.json").read_bytes())
            names = msgspec.convert(sorted(set(index["weight_map"].values())), list[INSIDE])
        flags = _flags(config)
        weights: dict[str, Tensor] = {}
        for name in names:
            weights |= load_file(folder / name)
        sums = "".join(sha256_file(folder / name) for name in names)
        flags["--init-sha256"] = hashlib.sha256(sums.encode()).hexdigest()
        return flags, _from_gpt2(weights, flags, config["vocab_size"]), folder
    except (
        AttributeError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
        SafetensorError,
    ) as error:
        problem = f"no whole GPT-2 ({type(error).__name__}: {error})"
        raise UserError(f"{folder}: {problem}: save one by its save_pretrained") from error


def _of_checkpoint(path: str) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """As `read`, for a checkpoint."""
    (checkpoint,) = memory_map_members([path])
    with reading(path):
        options = checkpoint["cfg"]["model"]
        task = checkpoint["cfg"]["task"]
        weights = {name.removeprefix(PREFIX): value for name, value in checkpoint["model"].items()}
        flags = {"--arch": "switch_gmoe" if "moe_freq" in options else "transformer_lm"}
        for name in _OF_MODEL:
            if options.get(name) is not None:
                flags[flag_of(name)] = options[name]
        positions = options.get("max_target_positions") or task["tokens_per_sample"]
        if "embed_positions.weight" in weights:
            positions = len(weights["embed_positions.weight"]) - EOS
        flags["--max-target-positions"] = positions
        flags["--end-token"] = task.get("end_token", -1)
        flags["--init-sha256"] = sha256_file(path)
        folders = [Path(path).parent]
        folders += [Path(data) for data in (task.get("data") or "").split(":") if data]
        with_dictionary = [folder for folder in folders if (folder / "dict.txt").is_file()]
        home = with_dictionary[0] if with_dictionary else folders[0]
        return flags, weights, home


def _check_supported(folder: Path, config: dict[str, Any]) -> None:
    """Raise a UserError for a model that fairseq does not compute."""
    for name, values in _TAKEN.items():
        if config.get(name, next(iter(values))) in values:
            continue
        problem = f"{name} is {config[name]}, and fairseq computes {', '.join(map(str, values))}"
        remedy = "`alma train --engine transformers` trains it"
        raise UserError(f"--init {folder}: {problem}: {remedy}")


def _flags(config: dict[str, Any]) -> dict[str, Any]:
    """The flags for a config.json. ValueError: fairseq would compute something else."""
    require(config, _KINDS)
    width = config["n_embd"]
    if width % config["n_head"]:
        raise ValueError(f"n_embd {width} is no multiple of n_head {config['n_head']}")
    return {
        "--decoder-layers": config["n_layer"],
        "--decoder-attention-heads": config["n_head"],
        "--decoder-embed-dim": width,
        "--decoder-input-dim": width,
        "--decoder-output-dim": width,
        "--decoder-ffn-embed-dim": config.get("n_inner") or 4 * width,
        "--decoder-learned-pos": True,
        "--decoder-normalize-before": True,
        "--no-decoder-final-norm": False,
        "--no-token-positional-embeddings": False,
        "--layernorm-embedding": False,
        "--arch": "transformer_lm",
        "--no-scale-embedding": True,
        "--activation-fn": _OURS[config.get("activation_function", "gelu_new")],
        "--share-decoder-input-output-embed": config.get("tie_word_embeddings", True),
        "--max-target-positions": config["n_positions"],
        "--end-token": config["eos_token_id"],
    }


def _from_gpt2(
    weights: dict[str, Tensor], flags: dict[str, Any], vocabulary: int
) -> dict[str, Tensor]:
    """fairseq's weights, without PREFIX.

    LookupError, ValueError: `weights` are not those of config.json.
    """
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    tokens = weights["wte.weight"]
    width = flags["--decoder-embed-dim"]
    inner = flags["--decoder-ffn-embed-dim"]
    tied = flags["--share-decoder-input-output-embed"]
    if tied and not torch.equal(weights.setdefault("lm_head.weight", tokens), tokens):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not wte.weight")
    # First dimension of the weights whose first dimension is not the model's width.
    rows = {"wte": vocabulary, "lm_head": vocabulary, "wpe": flags["--max-target-positions"]}
    names = dict(_names(flags["--decoder-layers"]))
    names |= {f"{table}.weight": [] for table in rows}
    old = (".attn.bias", ".attn.masked_bias")  # constants, which old versions of transformers saved
    unexpected = [name for name in weights if name not in names and not name.endswith(old)]
    if unexpected:
        raise ValueError(f"config.json has no {unexpected[0]}")
    rows["mlp.c_proj"] = inner
    columns = {"attn.c_attn": 3 * width, "mlp.c_fc": inner}
    state: dict[str, Tensor] = {}
    for gpt2_name, fairseq_names in names.items():
        layer = re.sub(r"^h\.\d+\.|\.\w+$", "", gpt2_name)
        value = weights[gpt2_name]
        shape = (rows.get(layer, width), columns.get(layer, width))[-value.dim() :]
        if value.shape != shape or not value.is_floating_point() or not value.isfinite().all():
            expected = f"not finite numbers {[*shape]}"
            raise ValueError(f"{gpt2_name}: {value.dtype} {[*value.shape]}, {expected}")
        if value.dim() == 2:
            value = value.t()
        if fairseq_names:
            state |= zip(fairseq_names, value.chunk(len(fairseq_names)), strict=False)
    tables = {"embed_tokens": tokens, "output_projection": weights["lm_head.weight"]}
    for name, table in tables.items():
        state[f"{name}.weight"] = torch.cat([torch.zeros_like(table[: UNK + 1]), table])
        state[f"{name}.weight"][EOS] = table[flags["--end-token"]]
    positions = weights["wpe.weight"]
    unused_rows = torch.zeros_like(positions[: PAD + 1])
    state["embed_positions.weight"] = torch.cat([unused_rows, positions])
    return state


def to_gpt2(state: dict[str, Tensor], layers: int, scale: float) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel of fairseq's `state`, which multiplies the embeddings by
    `scale`."""
    weights = {"wte.weight": scale * state["embed_tokens.weight"]}
    weights["wpe.weight"] = state["embed_positions.weight"][PAD + 1 :]
    for gpt2_name, fairseq_names in _names(layers):
        value = torch.cat([state[name] for name in fairseq_names])
        weights[gpt2_name] = value.t().contiguous() if value.dim() == 2 else value
    weights = {f"transformer.{name}": value for name, value in weights.items()}
    return weights | {"lm_head.weight": state["output_projection.weight"]}


def _names(layers: int) -> list[tuple[str, list[str]]]:
    """transformers' name of each weight outside the tables, and fairseq's names of its parts."""
    pairs = [("ln_f", ["layer_norm"])]
    for i in range(layers):
        for name, parts in _BLOCK.items():
            pairs.append((f"h.{i}.{name}", [f"layers.{i}.{part}" for part in parts]))
    names = []
    for gpt2_name, fairseq_names in pairs:
        for kind in (".weight", ".bias"):
            names.append((gpt2_name + kind, [part + kind for part in fairseq_names]))
    return names


def model_rows(table: Tensor, end: int) -> Tensor:
    """Reorder fairseq's embedding `table` (V + 4, D) to the ids of the original model, (V, D).

    `end` is the original model's end-of-text id, whose embedding is fairseq's row eos. With -1
    there is no original model, and `table` is returned unchanged.
    """
    if end < 0:
        return table
    return table[UNK + 1 :].index_copy(0, torch.tensor([end]), table[EOS : EOS + 1])


def unused(end: int) -> list[int]:
    """fairseq's ids that never occur in text, if eos replaces the original model's id `end`.

    The softmax leaves them out: the loss is then that of the original model. None for -1.
    """
    return [BOS, PAD, UNK, UNK + 1 + end] if end >= 0 else []


def exclude(output_projection: nn.Module, ids: list[int]) -> None:
    """Give `ids` no probability: their logits (..., V) become -inf."""

    def fill(_, inputs, logits: Tensor) -> Tensor:
        return logits.index_fill_(-1, torch.tensor(ids, device=logits.device), -torch.inf)

    output_projection.register_forward_hook(fill)


def check(args: Namespace) -> None:
    """Raise a UserError if flags of the command line, or its stream, contradict --init."""
    model = args.init
    flags, weights, home = read(model)
    _check_flags(args, flags)
    if args.arch.startswith("switch") and not flags.get("--decoder-normalize-before"):
        problem = f"{model} normalises after each layer, a mixture before it"
        raise UserError(f"--init: {problem}: train the model with --decoder-normalize-before")
    positions = flags["--max-target-positions"]
    if args.tokens_per_sample > positions:
        remedy = f"give --tokens-per-sample {positions} or less"
        problem = f"{model} has {positions} positions"
        raise UserError(f"--tokens-per-sample {args.tokens_per_sample}: {problem}: {remedy}")
    if args.criterion == "label_smoothed_cross_entropy":
        raise UserError("--init: not with --criterion label_smoothed_cross_entropy")
    tokenizer = next(home.glob("tokenizer.model"), home)
    remedy = f"make a stream by `alma data --tokenizer {tokenizer}`"
    if is_stream(args.data):  # else fairseq-preprocess's output, or a stream not built yet
        rows = len(weights["embed_tokens.weight"]) - UNK - 1
        _check_stream(Stream.load(args.data), args, rows, flags["--end-token"] >= 0, home, remedy)
    folders = [Path(args.data.split(":")[0]), home]
    tokens = {_tokens(folder) for folder in folders if (folder / "dict.txt").is_file()}
    if len(tokens) > 1:
        problem = f"its tokens are not those of {model}, which {home} has"
        raise UserError(f"{args.data}: {problem}: {remedy}")


def _check_flags(args: Namespace, flags: dict[str, Any]) -> None:
    """Raise a UserError if a flag in `args` contradicts `flags`, which the model determines."""
    for flag, value in flags.items():
        actual = getattr(args, attribute_of(flag), None)
        is_grown = flag == "--moe-expert-count" and args.finetune_from_model
        both_off = not actual and not value  # both None or False
        if flag == "--arch" or is_grown or both_off or actual == value:
            continue
        remedy = "leave the flag out, or give its model"
        raise UserError(f"{flag} {actual}: {args.init} has {value}: {remedy}")


def _check_stream(
    stream: Stream, args: Namespace, rows: int, is_gpt2: bool, home: Path, remedy: str
) -> None:
    """Raise a UserError if the stream has another tokenizer than the model of --init.

    The model has `rows` tokens, and its tokenizer or dict.txt is in the folder `home`.
    """
    of_stream = [name for name in VOCABULARY if name in stream.files]
    in_home = [name for name in of_stream if (home / name).exists()]
    differs = any(stream.files[name].problem(home / name) for name in in_home)
    has_other_size = stream.vocab_size != rows
    if differs or has_other_size or (is_gpt2 and not of_stream):
        if Path(args.init) == home and has_other_size:
            remedy += ", and let it have as many by its resize_token_embeddings"
        problem = f"its {stream.vocab_size:,} tokens are not the {rows:,} of {args.init}"
        raise UserError(f"{args.data}: {problem}: {remedy}")


def _tokens(folder: Path) -> tuple[bytes, ...]:
    """The tokens of a dict.txt, without their counts."""
    lines = (folder / "dict.txt").read_bytes().splitlines()
    return tuple(line.split(b" ")[0] for line in lines)


def load(module: nn.Module, model: str) -> None:
    """Give `module`, a language model of fairseq, the weights of `model`.

    If `module` has Switch layers and `model` is dense, every expert starts as a copy of the dense
    FFN. The router is then a tree (see `Router`), whose output weights are 1, so `module` computes
    the function of `model` whatever its gates are. Raises UserError as `read`.
    """
    state = {name: value for name, value in module.state_dict().items() if ".router." in name}
    state[f"{PREFIX}version"] = torch.Tensor([3])  # else fairseq would leave out the last norm
    state |= {PREFIX + name: value for name, value in read(model)[1].items()}
    for name, layer in module.named_modules():
        if isinstance(layer, SwitchFFN) and f"{name}.weight" in state:
            dense_names = ("1.weight", "1.bias", "2.weight", "2.bias")
            for stacked, dense_name in zip(STACKED, dense_names, strict=True):
                dense = state.pop(name.removesuffix("1") + dense_name)
                state[f"{name}.{stacked}"] = dense.expand(layer.experts, *dense.shape)
            for expert in range(1, layer.experts):  # each split halves the tokens of its parent
                largest_power_of_2 = 1 << (expert.bit_length() - 1)
                state[f"{name}.router.parent"][expert] = expert - largest_power_of_2
    with reading(model):
        module.load_state_dict(state)
    read.cache_clear()
