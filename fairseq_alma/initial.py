"""The model that a run starts from (`--init`): a checkpoint, or GPT-2 in a folder of Hugging Face.

GPT-2 is fairseq's transformer_lm, stored in another way. fairseq's tables begin with special rows: position p
is row p + 2, and token i is row i + 4. Row 2, eos, is the model's end of text.
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
from alma.options import flag_of
from alma.schema import COUNT, NATURAL, require
from alma.stream import INSIDE, Stream, is_stream
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.moe.layer import STACKED, SwitchFFN

BOS, PAD, EOS, UNK = range(4)  # ids of fairseq's special tokens
ACTIVATIONS = {name: name for name in ("relu", "gelu", "tanh", "linear")}
ACTIVATIONS |= dict.fromkeys(("gelu_fast", "gelu_accurate"), "gelu_new")  # transformers' names by fairseq's
_OURS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_accurate"}
_TAKEN: dict[str, Any] = {"model_type": ["gpt2"], "activation_function": _OURS, "layer_norm_epsilon": [1e-5]}
_TAKEN |= {"scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False]}
"""Values of config.json with which fairseq computes the same."""
_KINDS: dict[str, Any] = dict.fromkeys(("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"), COUNT)
_KINDS |= {"eos_token_id": NATURAL, "n_inner": COUNT | None, "tie_word_embeddings": bool}
_QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
_BLOCK = {"ln_1": ["self_attn_layer_norm"], "attn.c_attn": _QKV, "attn.c_proj": ["self_attn.out_proj"]}
_BLOCK |= {"ln_2": ["final_layer_norm"], "mlp.c_fc": ["fc1"], "mlp.c_proj": ["fc2"]}
"""transformers' names in a block, and fairseq's names of their parts."""
_OF_DECODER = ("layers", "attention_heads", "embed_dim", "input_dim", "output_dim", "ffn_embed_dim")
_OF_MODEL = [f"decoder_{name}" for name in (*_OF_DECODER, "learned_pos", "normalize_before")]
_OF_MODEL += ["no_decoder_final_norm", "no_token_positional_embeddings", "layernorm_embedding"]
_OF_MODEL += ["no_scale_embedding", "moe_freq", "share_decoder_input_output_embed", "activation_fn"]
_OF_MODEL += ["moe_expert_count"]  # options of fairseq that make the model


@functools.lru_cache(maxsize=1)
def read(model: str) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """The flags of fairseq-train that `model` determines, with values; fairseq's weights, without PREFIX; the
    folder of its tokenizer or dict.txt. UserError: missing, damaged, or of another architecture."""
    folder = Path(model)
    if not folder.is_dir():
        return _of_checkpoint(model)
    try:
        config, names = json.loads((folder / "config.json").read_bytes()), ["model.safetensors"]
        if not (folder / names[0]).is_file():  # beside it an index is of an older model: as in transformers
            index = (folder / "model.safetensors.index.json").read_bytes()
            names = msgspec.convert(sorted(set(json.loads(index)["weight_map"].values())), list[INSIDE])
        flags = _flags(config)
        weights = {key: value for name in names for key, value in load_file(folder / name).items()}
        sums = "".join(sha256_file(folder / name) for name in names)
        flags["--init-sha256"] = hashlib.sha256(sums.encode()).hexdigest()
        return flags, _from_gpt2(weights, flags, config["vocab_size"]), folder
    except (AttributeError, OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        why = f"no whole GPT-2 ({type(error).__name__}: {error}): save one by its save_pretrained"
        raise UserError(f"{folder}: {why}") from error


def _of_checkpoint(path: str) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    (checkpoint,) = memory_map_members([path])
    with reading(path):
        options, task = checkpoint["cfg"]["model"], checkpoint["cfg"]["task"]
        state = {name.removeprefix(PREFIX): value for name, value in checkpoint["model"].items()}
        flags = {flag_of(name): options[name] for name in _OF_MODEL if options.get(name) is not None}
        longest = options.get("max_target_positions") or task["tokens_per_sample"]
        flags["--max-target-positions"] = len(state.get("embed_positions.weight", range(longest + EOS))) - EOS
        flags["--end-token"], flags["--init-sha256"] = task.get("end_token", -1), sha256_file(path)
        homes = [Path(path).parent, *map(Path, filter(None, (task.get("data") or "").split(":")))]
        home = next((home for home in homes if (home / "dict.txt").is_file()), homes[0])
        return {"--arch": "switch_gmoe" if "moe_freq" in options else "transformer_lm", **flags}, state, home


def _flags(config: dict[str, Any]) -> dict[str, Any]:
    """The flags for a config.json. ValueError: fairseq would compute something else."""
    require(config, _KINDS)
    for name, values in _TAKEN.items():
        if config.get(name, next(iter(values))) not in values:
            raise ValueError(f"{name} {config[name]} is none of {', '.join(map(str, values))}")
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"n_embd {config['n_embd']} is no multiple of n_head {config['n_head']}")
    width, activation = config["n_embd"], config.get("activation_function", "gelu_new")
    sizes = [config["n_layer"], config["n_head"], width, width, width, config.get("n_inner") or 4 * width]
    flags = dict(zip(map(flag_of, _OF_MODEL), [*sizes, True, True, False, False, False], strict=False))
    flags |= {"--arch": "transformer_lm", "--no-scale-embedding": True, "--activation-fn": _OURS[activation]}
    flags["--share-decoder-input-output-embed"] = config.get("tie_word_embeddings", True)
    return flags | {"--max-target-positions": config["n_positions"], "--end-token": config["eos_token_id"]}


def _from_gpt2(weights: dict[str, Tensor], flags: dict[str, Any], vocabulary: int) -> dict[str, Tensor]:
    """fairseq's weights, without PREFIX. LookupError, ValueError: `weights` are not those of config.json."""
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    wte, width, inner = weights["wte.weight"], flags["--decoder-embed-dim"], flags["--decoder-ffn-embed-dim"]
    tied = flags["--share-decoder-input-output-embed"]
    if tied and not torch.equal(weights.setdefault("lm_head.weight", wte), wte):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not wte.weight")
    rows = dict.fromkeys(("wte", "lm_head"), vocabulary) | {"wpe": flags["--max-target-positions"]}
    names = dict(_names(flags["--decoder-layers"])) | {f"{name}.weight": [] for name in rows}
    old = (".attn.bias", ".attn.masked_bias")  # constants, which old versions of transformers saved
    if more := [name for name in weights if name not in names and not name.endswith(old)]:
        raise ValueError(f"config.json has no {more[0]}")
    rows, columns = rows | {"mlp.c_proj": inner}, {"attn.c_attn": 3 * width, "mlp.c_fc": inner}
    state: dict[str, Tensor] = {}
    for theirs, ours in names.items():
        layer, value = re.sub(r"^h\.\d+\.|\.\w+$", "", theirs), weights[theirs]
        shape = (rows.get(layer, width), columns.get(layer, width))[-value.dim() :]
        if value.shape != shape or not value.is_floating_point() or not value.isfinite().all():
            raise ValueError(f"{theirs}: {value.dtype} {[*value.shape]}, not finite numbers {[*shape]}")
        state |= zip(ours, (value.t() if value.dim() == 2 else value).chunk(len(ours) or 1), strict=False)
    tables = {"embed_tokens": wte, "output_projection": weights["lm_head.weight"]}
    for name, table in tables.items():
        state[f"{name}.weight"] = torch.cat([torch.zeros_like(table[: UNK + 1]), table])
        state[f"{name}.weight"][EOS] = table[flags["--end-token"]]
    positions = weights["wpe.weight"]
    return state | {"embed_positions.weight": torch.cat([torch.zeros_like(positions[: PAD + 1]), positions])}


def to_gpt2(state: dict[str, Tensor], layers: int, scale: float) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel of fairseq's `state`, which multiplies the embeddings by `scale`."""
    weights = {"wte.weight": scale * state["embed_tokens.weight"]}
    weights["wpe.weight"] = state["embed_positions.weight"][PAD + 1 :]
    for theirs, ours in _names(layers):
        whole = torch.cat([state[name] for name in ours])
        weights[theirs] = whole.t().contiguous() if whole.dim() == 2 else whole
    weights = {f"transformer.{name}": value for name, value in weights.items()}
    return weights | {"lm_head.weight": state["output_projection.weight"]}


def _names(layers: int) -> list[tuple[str, list[str]]]:
    """transformers' name of each weight outside the tables, and fairseq's names of its parts."""
    pairs = [("ln_f", ["layer_norm"])]
    for i in range(layers):
        pairs += [(f"h.{i}.{name}", [f"layers.{i}.{part}" for part in _BLOCK[name]]) for name in _BLOCK]
    kinds = (".weight", ".bias")
    return [(theirs + kind, [part + kind for part in ours]) for theirs, ours in pairs for kind in kinds]


def model_rows(table: Tensor, end: int) -> Tensor:
    """The rows (V, D) of the ids of a model whose end of text is `end`; for -1, all rows."""
    return table if end < 0 else table[UNK + 1 :].index_copy(0, torch.tensor([end]), table[EOS : EOS + 1])


def unused(end: int) -> list[int]:
    """The ids that no text has where eos is a model's id `end`: the loss is the model's without them."""
    return [BOS, PAD, UNK, UNK + 1 + end] if end >= 0 else []


def check(args: Namespace) -> None:
    """UserError: a command line or its stream contradicts its --init."""
    flags, weights, home = read(model := args.init)
    positions, rows = flags["--max-target-positions"], len(weights["embed_tokens.weight"]) - UNK - 1
    for flag, value in flags.items():
        given = getattr(args, flag[2:].replace("-", "_"), None)
        grown = flag == "--moe-expert-count" and args.finetune_from_model
        if given != value and (given or value) and flag != "--arch" and not grown:  # None: off
            raise UserError(f"{flag} {given}: {model} has {value}: leave the flag out, or give its model")
    if args.arch.startswith("switch") and not flags.get("--decoder-normalize-before"):
        what = f"{model} normalises after each layer, a mixture before it"
        raise UserError(f"--init: {what}: train the model with --decoder-normalize-before")
    if args.tokens_per_sample > positions:
        less = f"{model} has {positions} positions: give --tokens-per-sample {positions} or less"
        raise UserError(f"--tokens-per-sample {args.tokens_per_sample}: {less}")
    if args.criterion == "label_smoothed_cross_entropy":
        raise UserError("--init: not with --criterion label_smoothed_cross_entropy")
    remedy = f"make a stream by `alma data --tokenizer {next(home.glob('tokenizer.model'), home)}`"
    if is_stream(args.data):  # else of fairseq-preprocess, or only planned
        stream = Stream.load(args.data)
        own = {name for name in ("tokenizer.json", "vocab.json", "merges.txt") if name in stream.files}
        there = {path.name for path in home.glob("*")} & own
        other = any(stream.files[name].problem(home / name) for name in there)
        if other or stream.vocab_size != rows or (flags["--end-token"] >= 0 and not own):
            resizable = Path(model) == home and stream.vocab_size != rows
            remedy += ", and let it have as many by its resize_token_embeddings" * resizable
            other_ids = f"its {stream.vocab_size:,} tokens are not the {rows:,} of {model}"
            raise UserError(f"{args.data}: {other_ids}: {remedy}")
    known = [path for path in (Path(args.data.split(":")[0]), home) if (path / "dict.txt").is_file()]
    lines = ((path / "dict.txt").read_bytes().splitlines() for path in known)
    if len({tuple(line.split(b" ")[0] for line in of_one) for of_one in lines}) > 1:
        raise UserError(f"{args.data}: its tokens are not those of {model}, which {home} has: {remedy}")


def load(module: nn.Module, model: str) -> None:
    """Give `module`, a language model of fairseq, the weights of `model`.

    Experts begin as copies of a dense layer. The router is then a tree (see `Router`): its output weights are
    1, so that the function is that of `model` whatever the gates are. UserError: as `read`, or no such model.
    """
    own = {name: value for name, value in module.state_dict().items() if ".router." in name}
    state = own | {f"{PREFIX}version": torch.Tensor([3])}  # else fairseq would leave out the last norm
    state |= {PREFIX + name: value for name, value in read(model)[1].items()}
    for name, layer in module.named_modules():
        if isinstance(layer, SwitchFFN) and f"{name}.weight" in state:
            for ours, theirs in zip(STACKED, ("1.weight", "1.bias", "2.weight", "2.bias"), strict=True):
                dense = state.pop(name.removesuffix("1") + theirs)
                state[f"{name}.{ours}"] = dense.expand(layer.experts, *dense.shape)
            for expert in range(1, layer.experts):  # each split halves the tokens of its parent
                state[f"{name}.router.parent"][expert] = expert - (1 << expert.bit_length() - 1)
    with reading(model):
        module.load_state_dict(state)
    read.cache_clear()
