"""GPT-2 of Hugging Face and fairseq's transformer_lm: the same model, stored in two ways.

Both are pre-LN decoders with learned positions. In fairseq, position p is row p + 2 of its table, and token i
row i + 4 of the embeddings: the rows before are special. Row 2, eos, is the model's end of text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_alma.checkpoint import PREFIX

BOS, PAD, EOS, UNK = range(4)
"""Ids of fairseq's special tokens."""
ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "tanh": "tanh", "linear": "linear"},
    **{"gelu_fast": "gelu_new", "gelu_accurate": "gelu_new"},
}
"""transformers' names by fairseq's."""
_OURS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_accurate"}
_FIXED = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "add_cross_attention": False}
_FIXED |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
"""Settings of config.json that fairseq's model has, too."""
_DEFAULTS: dict[str, Any] = {"activation_function": "gelu_new", "tie_word_embeddings": True, "n_inner": None}
_BLOCK = {  # names in a block; transformers stacks what fairseq has apart
    "ln_1": ["self_attn_layer_norm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.out_proj"],
    "ln_2": ["final_layer_norm"],
    "mlp.c_fc": ["fc1"],
    "mlp.c_proj": ["fc2"],
}


def unused(end: int) -> list[int]:
    """The ids that no text has where eos is the model's end of text, its id `end`; none for -1.

    The loss is that of the model if they have no probability.
    """
    return [BOS, PAD, UNK, UNK + 1 + end] if end >= 0 else []


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of fairseq-train for a config.json. ValueError: a model that fairseq would compute otherwise.
    KeyError: it lacks a setting."""
    config = _DEFAULTS | _FIXED | {"model_type": None} | dict(config)
    for name, value in _FIXED.items():
        if config[name] != value:
            raise ValueError(f"its {name} is {config[name]}: --init takes {value}")
    if (activation := config["activation_function"]) not in _OURS:
        raise ValueError(f"its activation_function is {activation}: --init takes {', '.join(_OURS)}")
    width, on = config["n_embd"], ("decoder-learned-pos", "decoder-normalize-before", "no-scale-embedding")
    return {
        "--arch": "transformer_lm",
        "--decoder-layers": config["n_layer"],
        "--decoder-attention-heads": config["n_head"],
        **{f"--decoder-{name}-dim": width for name in ("embed", "input", "output")},
        "--decoder-ffn-embed-dim": config["n_inner"] or 4 * width,
        **{f"--{name}": True for name in on},
        "--share-decoder-input-output-embed": config["tie_word_embeddings"],
        "--activation-fn": _OURS[config["activation_function"]],
        "--max-target-positions": config["n_positions"],
        "--end-token": config["eos_token_id"],
    }


def from_gpt2(weights: Mapping[str, Tensor], flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """fairseq's state dict of a GPT2LMHeadModel, with its `flags_of`. LookupError: a weight is missing."""
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}

    def rows(name: str) -> Tensor:
        table = torch.cat([torch.zeros_like(weights[name][: UNK + 1]), weights[name]])
        table[EOS] = weights[name][flags["--end-token"]]
        return table

    embeddings, positions = rows("wte.weight"), weights["wpe.weight"]
    tied = flags["--share-decoder-input-output-embed"]
    state = {
        "version": torch.Tensor([3]),  # else fairseq would leave out the last norm
        "embed_tokens.weight": embeddings,
        "embed_positions.weight": torch.cat([torch.zeros_like(positions[: PAD + 1]), positions]),
        "output_projection.weight": embeddings if tied else rows("lm_head.weight"),
    }
    for theirs, ours in _names(flags["--decoder-layers"]):
        whole = weights[theirs].t() if weights[theirs].dim() == 2 else weights[theirs]
        state |= zip(ours, whole.chunk(len(ours)), strict=True)
    return {PREFIX + name: value for name, value in state.items()}


def to_gpt2(state: Mapping[str, Tensor], layers: int, scale: float) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel of fairseq's `state`, whose embeddings are multiplied by `scale`.

    KeyError: a weight is missing.
    """
    weights = {"wte.weight": scale * state["embed_tokens.weight"]}
    weights["wpe.weight"] = state["embed_positions.weight"][PAD + 1 :]
    for theirs, ours in _names(layers):
        whole = torch.cat([state[name] for name in ours])
        weights[theirs] = whole.t().contiguous() if whole.dim() == 2 else whole
    named = {f"transformer.{name}": value for name, value in weights.items()}
    return named | {"lm_head.weight": state["output_projection.weight"]}


def model_rows(table: Tensor, end: int) -> Tensor:
    """The rows (V, D) of a model's own ids; `end`: as in `unused`, the same rows for -1."""
    if end < 0:
        return table
    rows = table[UNK + 1 :].clone()
    rows[end] = table[EOS]
    return rows


def _names(layers: int) -> Iterator[tuple[str, list[str]]]:
    """transformers' name of each weight outside the embeddings, and fairseq's names of its parts."""
    for kind in ("weight", "bias"):
        yield f"ln_f.{kind}", [f"layer_norm.{kind}"]
        for i in range(layers):
            for theirs, ours in _BLOCK.items():
                yield f"h.{i}.{theirs}.{kind}", [f"layers.{i}.{name}.{kind}" for name in ours]
