"""GPT-2 of Hugging Face and fairseq's transformer_lm: one model, stored in two ways.

Both are pre-LN decoders with learned positions. fairseq's tables begin with special rows: position p is row
p + 2, and token i is row i + 4. Row 2, eos, is the model's end of text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

BOS, PAD, EOS, UNK = range(4)
"""Ids of fairseq's special tokens."""
ACTIVATIONS = {name: name for name in ("relu", "gelu", "tanh", "linear")}
ACTIVATIONS |= dict.fromkeys(("gelu_fast", "gelu_accurate"), "gelu_new")
"""transformers' names by fairseq's."""
_OURS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_accurate"}
_FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "add_cross_attention": False}
_FIXED |= {"scale_attn_by_inverse_layer_idx": False}
_FLAGS_ON = ("--decoder-learned-pos", "--decoder-normalize-before", "--no-scale-embedding")
_QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
_BLOCK = {"ln_1": ["self_attn_layer_norm"], "attn.c_attn": _QKV, "attn.c_proj": ["self_attn.out_proj"]}
_BLOCK |= {"ln_2": ["final_layer_norm"], "mlp.c_fc": ["fc1"], "mlp.c_proj": ["fc2"]}
"""transformers' names in a block, and fairseq's names of their parts."""


def unused(end: int) -> list[int]:
    """The ids that no text has where eos is a model's end of text, its id `end`; none for -1.

    The loss is the model's if they have no probability.
    """
    return [BOS, PAD, UNK, UNK + 1 + end] if end >= 0 else []


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of fairseq-train for a config.json. ValueError: fairseq would compute something else.
    KeyError: it lacks a setting."""
    config = {"activation_function": "gelu_new", "tie_word_embeddings": True, **_FIXED, **config}
    takes: dict[str, list[Any]] = {"model_type": ["gpt2"], "activation_function": list(_OURS)}
    for name, values in (takes | {name: [value] for name, value in _FIXED.items()}).items():
        if config.get(name) not in values:
            raise ValueError(f"its {name} is {config.get(name)}: --init takes {', '.join(map(str, values))}")
    sizes = {f"{name}-dim": config["n_embd"] for name in ("embed", "input", "output")}
    sizes |= {"layers": config["n_layer"], "attention-heads": config["n_head"]}
    sizes["ffn-embed-dim"] = config.get("n_inner") or 4 * config["n_embd"]
    return {
        **{f"--decoder-{name}": size for name, size in sizes.items()},
        **dict.fromkeys(_FLAGS_ON, True),
        "--arch": "transformer_lm",
        "--share-decoder-input-output-embed": config["tie_word_embeddings"],
        "--activation-fn": _OURS[config["activation_function"]],
        "--max-target-positions": config["n_positions"],
        "--end-token": config["eos_token_id"],
    }


def from_gpt2(weights: Mapping[str, Tensor], flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """fairseq's weights of those of a GPT2LMHeadModel, with its `flags_of`. LookupError: one is missing."""
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    tied, positions = flags["--share-decoder-input-output-embed"], weights["wpe.weight"]

    def rows(table: Tensor) -> Tensor:
        special = torch.zeros_like(table[: UNK + 1])
        special[EOS] = table[flags["--end-token"]]
        return torch.cat([special, table])

    embeddings = rows(weights["wte.weight"])
    state = {
        "embed_tokens.weight": embeddings,
        "output_projection.weight": embeddings if tied else rows(weights["lm_head.weight"]),
        "embed_positions.weight": torch.cat([torch.zeros_like(positions[: PAD + 1]), positions]),
    }
    for theirs, ours in _names(flags["--decoder-layers"]):
        whole = weights[theirs].t() if weights[theirs].dim() == 2 else weights[theirs]
        state |= zip(ours, whole.chunk(len(ours)), strict=True)
    return state


def to_gpt2(state: Mapping[str, Tensor], layers: int, scale: float) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel of fairseq's `state`, which multiplies the embeddings by `scale`."""
    positions = state["embed_positions.weight"][PAD + 1 :]
    weights = {"wte.weight": scale * state["embed_tokens.weight"], "wpe.weight": positions}
    for theirs, ours in _names(layers):
        whole = torch.cat([state[name] for name in ours])
        weights[theirs] = whole.t().contiguous() if whole.dim() == 2 else whole
    weights = {f"transformer.{name}": value for name, value in weights.items()}
    return weights | {"lm_head.weight": state["output_projection.weight"]}


def model_rows(table: Tensor, end: int) -> Tensor:
    """The rows (V, D) of the model's own ids; `end`: as in `unused`, all rows for -1."""
    return table if end < 0 else table[UNK + 1 :].index_copy(0, torch.tensor([end]), table[EOS : EOS + 1])


def _names(layers: int) -> Iterator[tuple[str, list[str]]]:
    """transformers' name of each weight outside the tables, and fairseq's names of its parts."""
    for kind in ("weight", "bias"):
        yield f"ln_f.{kind}", [f"layer_norm.{kind}"]
        for i in range(layers):
            for theirs, ours in _BLOCK.items():
                yield f"h.{i}.{theirs}.{kind}", [f"layers.{i}.{name}.{kind}" for name in ours]
