"""A language model of ALMA's fairseq plug-in, for Hugging Face transformers.

Self-contained (torch and transformers only): `fairseq_alma.export` copies this file beside the weights.

A pre-LN decoder with learned positions and a Switch layer (Fedus et al., 2021) in place of the FFN of every
`decoder_sparse_step`-th block; or the average of several such decoders.

Shapes: B sequences, T new tokens, P all tokens (cached and new), S = B * T, D model, F hidden, E experts,
V vocabulary.
"""

import math
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

_SIZES: dict[str, Any] = {
    "vocab_size": 50004,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "num_experts": 0,
    "decoder_sparse_step": 2,
    "scale_embedding": True,
    "tie_word_embeddings": True,
}
"""Settings of a decoder, with their defaults."""


class AlmaConfig(PretrainedConfig):
    """Settings of a decoder; or of an ensemble: `members`, their configs, and `average`, "probs" or "logits".

    A dense model has num_experts 0. The num_hidden_layers of an ensemble is the sum over its members.
    """

    model_type = "alma"

    def __init__(self, members: list[dict] | None = None, average: str = "logits", **kwargs):
        self.members = members
        self.average = average
        super().__init__(**_SIZES | kwargs)


class AlmaAttention(nn.Module):
    """Causal self-attention; `layer` is the index of its keys and values in the cache."""

    def __init__(self, config: AlmaConfig, layer: int):
        super().__init__()
        self.heads = config.num_attention_heads
        self.layer = layer
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, allowed: Tensor, cache) -> Tensor:
        """`x` (B, T, D) -> (B, T, D); queries attend to keys where `allowed` (B or 1, 1, T, P) is true."""
        q, k, v = (
            projection(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class AlmaRouter(nn.Module):
    """Top-1 router in fp32.

    `copies` (E,) counts the copies of an expert after function-preserving splits, 1 if it was never split.
    `parent` (E,) is -1, or the expert that this one was split from in a tree. The expert's row of `weight` is
    then the gate of the split: tokens of the parent with a negative logit move to it and keep their weight.
    """

    copies: Tensor
    parent: Tensor

    def __init__(self, config: AlmaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("copies", torch.ones(config.num_experts, dtype=torch.int64))
        self.register_buffer("parent", torch.full((config.num_experts,), -1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (S, D) -> expert (S,) and the weight of its output (S,), fp32."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
        root = logits.masked_fill(self.parent >= 0, -math.inf)
        expert = root.argmax(dim=-1)
        probs = torch.softmax(root - self.copies.float().log(), dim=-1)
        gate = probs.gather(1, expert[:, None]).squeeze(1) * self.copies[expert]
        for child, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                moves = (expert == parent) & (logits[:, child] < 0)
                expert = expert.masked_fill(moves, child)
        return expert, gate


class AlmaSwitchFFN(nn.Module):
    """E expert FFNs; each token is processed by one, and none is dropped."""

    def __init__(self, config: AlmaConfig):
        super().__init__()
        experts, dim, hidden = config.num_experts, config.hidden_size, config.intermediate_size
        self.router = AlmaRouter(config)
        self.w1 = nn.Parameter(torch.zeros(experts, hidden, dim))
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.zeros(experts, dim, hidden))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, T, D) -> (B, T, D)."""
        tokens = x.flatten(0, 1)
        expert, gate = self.router(tokens)
        y = torch.zeros_like(tokens)
        for e in expert.unique().tolist():
            chosen = (expert == e).nonzero().squeeze(1)
            hidden = self.activation(F.linear(tokens[chosen], self.w1[e], self.b1[e]))
            output = F.linear(hidden, self.w2[e], self.b2[e])
            y[chosen] = output * gate[chosen, None].to(output.dtype)
        return y.view_as(x)


class AlmaFFN(nn.Module):
    """The dense FFN."""

    def __init__(self, config: AlmaConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, T, D) -> (B, T, D)."""
        return self.fc2(self.activation(self.fc1(x)))


class AlmaBlock(nn.Module):
    """Pre-LN attention and FFN, each with a residual connection."""

    def __init__(self, config: AlmaConfig, index: int, layer: int):
        super().__init__()
        switch = config.num_experts and (index + 1) % config.decoder_sparse_step == 0
        self.self_attn = AlmaAttention(config, layer)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.ffn = AlmaSwitchFFN(config) if switch else AlmaFFN(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, allowed: Tensor, cache) -> Tensor:
        """`x` (B, T, D) -> (B, T, D)."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), allowed, cache)
        return x + self.ffn(self.final_layer_norm(x))


class AlmaDecoder(nn.Module):
    """One language model; its layers use the cache from index `first_layer` on."""

    gradient_checkpointing = False
    """Set by `gradient_checkpointing_enable`, with `_gradient_checkpointing_func`."""

    def __init__(self, config: AlmaConfig, first_layer: int):
        super().__init__()
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            AlmaBlock(config, i, first_layer + i) for i in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.output_projection = None
        if not config.tie_word_embeddings:
            self.output_projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, allowed: Tensor, cache, keep) -> Tensor:
        """`tokens`, `positions` (B, T) -> features (B, keep, D) of the last `keep` tokens; 0: of all."""
        x = self.scale * self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, allowed, None)  # type: ignore[operator]
            else:
                x = layer(x, allowed, cache)
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        return self.layer_norm(x[:, keep])

    def logits(self, features: Tensor) -> Tensor:
        """Features (B, T, D) -> logits (B, T, V)."""
        return F.linear(features, (self.output_projection or self.embed_tokens).weight)


class AlmaModel(PreTrainedModel):
    """A decoder, or several, without the output layer."""

    config_class = AlmaConfig
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.members = nn.ModuleList()
        layers = 0
        for part in [AlmaConfig(**member) for member in config.members or ()] or [config]:
            self.members.append(AlmaDecoder(part, layers))
            layers += part.num_hidden_layers
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding (of the first member)."""
        return self.members[0].get_submodule("embed_tokens")

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.members[0].embed_tokens = value

    def get_output_embeddings(self):
        """The output layer; None if it has the weights of the embedding."""
        return self.members[0].output_projection

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the output layer."""
        self.members[0].output_projection = value

    def resize_token_embeddings(self, *args, **kwargs):  # type: ignore[override]
        """As transformers'. ValueError: an ensemble."""
        if len(self.members) > 1:
            raise ValueError("an ensemble's embeddings cannot be resized: export one of its members")
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(self, input_ids: Tensor, *args, **kwargs) -> BaseModelOutputWithPast:
        """Tokens (B, T) -> features (B, T, D) before the output layer; those of several members side by side.

        Arguments and errors as in `AlmaForCausalLM.forward`.
        """
        parts, cache = self._features(input_ids, *args, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=torch.cat(list(parts), -1), past_key_values=cache)

    def _features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **_,
    ):
        """The features (B, T, D) of each member, computed one by one, and the cache."""
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        if getattr(past_key_values, "is_compileable", False):
            raise ValueError("static caches are not supported: leave cache_implementation out")
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        total = past + input_ids.size(1)
        if total > self.config.max_position_embeddings:
            raise ValueError(f"{total} tokens are too many: at most {self.config.max_position_embeddings}")
        key = torch.arange(total, device=input_ids.device)
        query = key[past:, None]
        allowed = (key <= query)[None, None]
        if attention_mask is not None:
            # Padding attends to itself: a softmax over no keys would be NaN.
            allowed = allowed & (attention_mask[:, None, None].bool() | (key == query))
        if position_ids is None:
            position_ids = key[None]
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            position_ids = position_ids[:, past:]
        inputs = (input_ids, position_ids, allowed, past_key_values, logits_to_keep)
        return (member(*inputs) for member in self.members), past_key_values


class AlmaForCausalLM(AlmaModel, GenerationMixin):
    """Causal language model: a decoder, or the mean of several decoders' logits or probabilities."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Tokens `input_ids` (B, T) -> logits (B, T, V), or those of `logits_to_keep` tokens.

        `attention_mask` (B, P) is 0 for padding, on either side, which takes up no position. `labels` (B, T)
        are shifted here. Logits of an ensemble that averages probabilities are log-probabilities. ValueError:
        more tokens than the model has positions; a static cache.
        """
        parts, cache = self._features(
            input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep
        )
        logits = self._average(
            member.logits(features)  # type: ignore[operator]
            for member, features in zip(self.members, parts, strict=True)
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _average(self, outputs) -> Tensor:
        """The mean of the members' logits or probabilities, (B, T, V); consumes one member at a time."""
        n = len(self.members)
        if n == 1:
            return next(outputs)
        if self.config.average == "logits":
            return sum(logits.float() for logits in outputs) / n
        logs = (F.log_softmax(logits.float(), dim=-1) for logits in outputs)
        return reduce(torch.logaddexp, logs) - math.log(n)
