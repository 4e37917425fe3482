"""Convert a checkpoint to a directory that Hugging Face transformers loads (see `fairseq_alma.export`).

Shapes: V vocabulary, D model, F hidden, E experts, P positions.
"""

import json
import re
from pathlib import Path
from typing import Any

import sentencepiece
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from safetensors.torch import save
from torch import Tensor

from alma.errors import UserError
from alma.files import atomic_write, make_directory, write_json_atomic
from alma.schema import require, whole
from alma.stream import Stream
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.moe.router import upgrade_router
from fairseq_alma.switch_lm import SwitchLanguageModel

BOS, PAD, EOS, UNK = range(4)  # ids of fairseq's special tokens
MODEL_CODE = Path(__file__).with_name("modeling_alma.py")
_ACTIVATIONS = {  # fairseq's name -> transformers' name
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}
_NEEDED = ("decoder_learned_pos", "decoder_normalize_before")
_NOT_SUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "character_embeddings",
    "decoder_layers_to_keep",
    "decoder_xformers_att_config",
    "layernorm_embedding",
    "no_decoder_final_norm",
    "no_token_positional_embeddings",
    "quant_noise_pq",
    "quant_noise_scalar",
    "scale_attn",
    "scale_fc",
    "scale_heads",
    "scale_resids",
)


def read_model(path: str, weights: str = "trained") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint; returns its config and weights under the names of modeling_alma.py.

    `weights`: as `checkpoint.with_weights`. UserError: missing, damaged, without a weight average, or a model
    that modeling_alma.py does not support.
    """
    (state,) = memory_map_members([path], weights)
    all_members = {name.removeprefix(PREFIX): value for name, value in state["model"].items()}
    parts, average = _parts(state["cfg"]["model"])
    members, tensors = [], {}
    for i, part in enumerate(parts):
        prefix = "" if average is None else f"members.{i}."
        own = {name.removeprefix(prefix): w for name, w in all_members.items() if name.startswith(prefix)}
        with reading(path):  # a KeyError: the config or the weights are incomplete
            config, own = _member(path, part, own)
        members.append(config)
        tensors.update({f"members.{i}.{name}": weight for name, weight in own.items()})
    config = members[0]
    if average is not None:
        config = {
            "vocab_size": members[0]["vocab_size"],
            "num_hidden_layers": sum(member["num_hidden_layers"] for member in members),
            "max_position_embeddings": min(member["max_position_embeddings"] for member in members),
            "tie_word_embeddings": all(member["tie_word_embeddings"] for member in members),
            "members": members,
            "average": average,
        }
    # Text starts as in training: with bos if --add-bos-token was given, else with eos, as a stream does.
    tokens = {"bos_token_id": BOS if state["cfg"]["task"].get("add_bos_token") else EOS, "pad_token_id": PAD}
    return config | tokens | {"eos_token_id": EOS}, tensors


def _parts(options: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The options of each member and what the ensemble averages; None for a single model."""
    members = options.get("members", 1)
    if options["_name"] == "alma_ensemble":
        return members, options["average"]
    if members > 1:  # UMix
        return [options | {"members": 1}] * members, "logits"
    return [options], None


def _member(
    path: str, options: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the renamed weights of one decoder. UserError: unsupported."""
    _check_options(path, options)
    tied = bool(options["share_decoder_input_output_embed"])
    dim = options["decoder_embed_dim"]
    config = {
        "vocab_size": len(weights["embed_tokens.weight"]),
        "hidden_size": dim,
        "num_hidden_layers": options["decoder_layers"],
        "num_attention_heads": options["decoder_attention_heads"],
        "intermediate_size": options["decoder_ffn_embed_dim"],
        "hidden_act": _ACTIVATIONS[options["activation_fn"]],
        # fairseq numbers positions from PAD + 1; earlier rows are unused.
        "max_position_embeddings": len(weights["embed_positions.weight"]) - PAD - 1,
        "num_experts": options.get("moe_expert_count", 0),
        "decoder_sparse_step": options.get("moe_freq", 1),
        "scale_embedding": not options["no_scale_embedding"],
        "tie_word_embeddings": tied,
    }
    # Not all of them show in the shapes of weights.
    require(config, dict.fromkeys(["num_attention_heads", "num_experts", "decoder_sparse_step"], whole(0)))
    renamed = {}
    for name, value in weights.items():
        name = re.sub(r"^(layers\.\d+)\.fc1\.(router|w1|b1|w2|b2)\b", r"\1.ffn.\2", name)
        renamed[re.sub(r"^(layers\.\d+)\.(fc[12])\.", r"\1.ffn.\2.", name)] = value.contiguous()
    for name in [name for name in renamed if name.endswith(".router.weight")]:
        upgrade_router(renamed, name.removesuffix("weight"))
    renamed["embed_positions.weight"] = renamed["embed_positions.weight"][PAD + 1 :].clone()
    renamed.pop("version", None)
    if tied:
        renamed.pop("output_projection.weight", None)
    _check_shapes(path, config, renamed)
    return config, renamed


def _check_options(path: str, options: dict[str, Any]) -> None:
    """UserError: an option that modeling_alma.py does not implement."""
    name = options["_name"]
    known = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    if known not in (TransformerLanguageModel, SwitchLanguageModel):
        raise UserError(f"{path} is a {name}: export supports switch_gmoe* and transformer_lm")
    problems = [f"without --{flag}" for flag in _NEEDED if not options.get(flag)]
    problems += [f"with --{flag}" for flag in _NOT_SUPPORTED if options.get(flag)]
    for flag in ("decoder_input_dim", "decoder_output_dim"):
        if options[flag] != options["decoder_embed_dim"]:
            problems.append(f"with --{flag} other than --decoder-embed-dim")
    if options["activation_fn"] not in _ACTIVATIONS:
        problems.append(f"with --activation-fn {options['activation_fn']}")
    if 0 <= options.get("moe_eval_capacity_token_fraction", -1) < 1:
        problems.append("with --moe-eval-capacity-token-fraction (drops tokens depending on the batch)")
    if options.get("members", 1) > 1:
        problems.append("as a UMix and combined with others")
    if problems:
        raise UserError(f"{path} was trained {problems[0].replace('_', '-')}, which export does not support")


def _check_shapes(path: str, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """UserError: weights that differ from those of modeling_alma.py for this config; names the first."""
    expected = _shapes(config)
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "absent"
        if found != expected.get(name):
            raise UserError(
                f"{path}: {name} is {found}, expected {expected.get(name, 'no such weight')}: export "
                "supports the plug-in's own archs only"
            )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder's weights in modeling_alma.py."""
    v, d, f, e = (config[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_experts"))
    norm: dict[str, tuple[int, ...]] = {"weight": (d,), "bias": (d,)}
    square: dict[str, tuple[int, ...]] = {"weight": (d, d), "bias": (d,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (v, d),
        "embed_positions.weight": (config["max_position_embeddings"], d),
    }
    block = {f"self_attn.{name}_proj.{k}": s for name in ("q", "k", "v", "out") for k, s in square.items()}
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        block |= {f"{name}.{k}": s for k, s in norm.items()}
    dense = {"fc1.weight": (f, d), "fc1.bias": (f,), "fc2.weight": (d, f), "fc2.bias": (d,)}
    switch = {"router.weight": (e, d), "router.copies": (e,), "router.parent": (e,)}
    switch |= {"w1": (e, f, d), "b1": (e, f), "w2": (e, d, f), "b2": (e, d)}
    shapes |= {f"layer_norm.{k}": s for k, s in norm.items()}
    if not config["tie_word_embeddings"]:
        shapes["output_projection.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        ffn = switch if e and (i + 1) % config["decoder_sparse_step"] == 0 else dense
        shapes |= {f"layers.{i}.{k}": s for k, s in block.items()}
        shapes |= {f"layers.{i}.ffn.{k}": s for k, s in ffn.items()}
    return shapes


def tokenizer_files(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Convert a stream's tokenizer to the files of transformers' fast tokenizer, by file name.

    Ids are those of the stream, in which eos ends every line: a newline is eos. Text starts as in training
    (see `read_model`). UserError: not a stream, damaged, another vocabulary, not BPE.
    """
    stream = Stream.load(directory)
    stream.check([])
    tokens, steps = (_gpt2 if "vocab.bpe" in stream.files else _sentencepiece)(directory)
    if len(tokens) + 4 != config["vocab_size"]:
        raise UserError(
            f"{directory} has a dictionary of {len(tokens) + 4:,} entries, the checkpoint of "
            f"{config['vocab_size']:,}: give the stream that the model was trained on"
        )
    special = {"<s>": BOS, "<pad>": PAD, "\n": EOS, "<unk>": UNK}
    if clash := special.keys() & set(tokens):
        raise UserError(f"{directory}: the token {clash.pop()} has the name of a special token")
    vocabulary = special | {token: i + 4 for i, token in enumerate(tokens)}
    begin = "<s>" if config["bos_token_id"] == BOS else "\n"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": "\n",
        "pad_token": "<pad>",
        "padding_side": "left",  # so that a batch of prompts can be continued
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {"tokenizer.json": _tokenizer(vocabulary, steps, begin), "tokenizer_config.json": settings}


_SPACES = (
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Strip", "strip_left": True, "strip_right": True},
)


def _gpt2(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """GPT-2's tokens by id, and the tokenizer's steps in the format of Hugging Face tokenizers."""
    ids = json.loads((directory / "encoder.json").read_bytes())
    lines = (directory / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return sorted(ids, key=ids.__getitem__), {
        "normalizer": {"type": "Sequence", "normalizers": _SPACES},
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"merges": [line.split() for line in lines]},
    }


def _sentencepiece(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """SentencePiece's tokens by id, and the steps; BPE's merges follow from the order of the tokens."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    tokens = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    if any(pieces.get_score(i + 3) != -i for i in range(len(tokens))):  # BPE scores are ranks of merges
        raise UserError(f"{directory}/tokenizer.model is not a BPE model: only those can be exported")
    known = set(tokens)
    merges = [
        [token[:cut], token[cut:]]
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]

    def replace(old: str, new: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    encode = [*_SPACES, {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decode = [replace("\u2581", " "), {"type": "Fuse"}, replace("\n ", "\n"), strip]
    return tokens, {
        "normalizer": {"type": "Sequence", "normalizers": encode},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decode},
        "model": {"unk_token": "<unk>", "fuse_unk": True, "merges": merges},
    }


def _tokenizer(vocabulary: dict[str, int], steps: dict[str, Any], begin: str) -> dict[str, Any]:
    """The content of tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start = {"SpecialToken": {"id": begin, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[name], "content": name, **flags}
            for name in dict.fromkeys((begin, "<pad>", "\n"))
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, text[0]],
            "pair": [start, *text],
            "special_tokens": {begin: {"id": begin, "ids": [vocabulary[begin]], "tokens": [begin]}},
        },
        **steps,
        "model": {"type": "BPE", "vocab": vocabulary, **steps["model"]},
    }


def export(path: str, out: Path, tokenizer: Path | None = None, weights: str = "trained") -> None:
    """Write the model of the checkpoint `path`, and a stream's `tokenizer`, into the directory `out`.

    UserError: as `read_model` and `tokenizer_files`; the disk is full.
    """
    config, tensors = read_model(path, weights)
    files = tokenizer_files(tokenizer, config) if tokenizer else {}
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files["generation_config.json"] = special
    make_directory(out)
    (out / "config.json").unlink(missing_ok=True)  # written last: it marks a complete directory
    for name, content in files.items():
        write_json_atomic(out / name, content)
    with atomic_write(out / MODEL_CODE.name) as file:
        file.write(MODEL_CODE.read_text())
    weights_file = out / "model.safetensors"
    try:
        with atomic_write(weights_file, "wb") as file:
            file.write(save(tensors, metadata={"format": "pt"}))  # save_file would set mode 0600
    except OSError as error:
        raise UserError(
            f"{weights_file}: cannot be written ({type(error).__name__}: full disk, quota?); free some space "
            "and run the same command again"
        ) from error
    names = {"AutoConfig": "AlmaConfig", "AutoModel": "AlmaModel", "AutoModelForCausalLM": "AlmaForCausalLM"}
    header = {
        "model_type": "alma",
        "architectures": ["AlmaForCausalLM"],
        "auto_map": {auto: f"{MODEL_CODE.stem}.{name}" for auto, name in names.items()},
        "dtype": str(tensors["members.0.embed_tokens.weight"].dtype).removeprefix("torch."),
    }
    write_json_atomic(out / "config.json", header | config)
