"""A language model of ALMA's fairseq plug-in, for Hugging Face transformers.

Self-contained (torch and transformers only): `fairseq_alma.export` copies this file beside the weights.

A pre-LN decoder with learned positions and a Switch layer (Fedus et al., 2021) in place of the FFN of every
`decoder_sparse_step`-th block.

Shapes: B sequences, T new tokens, P all tokens (cached and new), S = B * T, D model, F hidden, E experts,
V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple


class AlmaConfig(PretrainedConfig):
    """Settings of a decoder; a dense one has num_experts 0."""

    model_type = "alma"
    vocab_size: int = 50004
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    num_experts: int = 0
    decoder_sparse_step: int = 2
    scale_embedding: bool = True
    tie_word_embeddings: bool = True


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


class AlmaBlock(GradientCheckpointingLayer):
    """Pre-LN attention and FFN, each with a residual connection."""

    def __init__(self, config: AlmaConfig, layer: int):
        super().__init__()
        switch = config.num_experts and (layer + 1) % config.decoder_sparse_step == 0
        self.self_attn = AlmaAttention(config, layer)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.ffn = AlmaSwitchFFN(config) if switch else AlmaFFN(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, allowed: Tensor, past_key_values=None) -> Tensor:
        """`x` (B, T, D) -> (B, T, D)."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), allowed, past_key_values)
        return x + self.ffn(self.final_layer_norm(x))


class AlmaPreTrainedModel(PreTrainedModel):
    """What both models share."""

    config_class = AlmaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True


class AlmaModel(AlmaPreTrainedModel):
    """The decoder without the output layer."""

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(AlmaBlock(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = None,
        **_,
    ) -> BaseModelOutputWithPast:
        """Tokens (B, T) -> features (B, T, D).

        `attention_mask` (B, P) is 0 for padding, on either side, which takes up no position. ValueError: more
        tokens than the model has positions; a static cache.
        """
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
        x = self.scale * self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            x = layer(x, allowed, past_key_values=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.layer_norm(x), past_key_values=past_key_values)


class AlmaForCausalLM(AlmaPreTrainedModel, GenerationMixin):
    """The decoder with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.model = AlmaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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

        `labels` (B, T) are shifted here. Other arguments and errors as in `AlmaModel.forward`.
        """
        output = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)
