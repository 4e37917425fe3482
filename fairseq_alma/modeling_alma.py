"""A language model trained with ALMA's fairseq plug-in, for Hugging Face transformers.

A pre-LN decoder with learned positions, in which every `decoder_sparse_step`-th block has a Switch layer
(Fedus et al., 2021) in place of its FFN; or several such decoders, averaged. `fairseq_alma.export` copies
this file beside the weights, so it imports nothing but torch and transformers.

Shapes: B sequences, T new tokens, P tokens so far (T of them new), S = B * T, D model, F hidden, E experts,
V vocabulary.
"""

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple


class AlmaConfig(PretrainedConfig):
    """Sizes of a decoder; or `members`, a list of such configs, and what is averaged over them.

    num_experts 0 is a dense model. Of an ensemble, num_hidden_layers counts the layers of all members.
    """

    model_type = "alma"

    def __init__(
        self,
        vocab_size: int = 50004,
        hidden_size: int = 512,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 8,
        intermediate_size: int = 2048,
        hidden_act: str = "gelu",
        max_position_embeddings: int = 512,
        num_experts: int = 0,
        decoder_sparse_step: int = 2,
        scale_embedding: bool = True,
        tie_word_embeddings: bool = True,
        members: list[dict] | None = None,
        average: str = "logits",
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.num_experts = num_experts
        self.decoder_sparse_step = decoder_sparse_step
        self.scale_embedding = scale_embedding
        self.members = members
        self.average = average
        super().__init__(**kwargs | {"tie_word_embeddings": tie_word_embeddings})


class AlmaAttention(nn.Module):
    """Causal self-attention; the cache keeps keys and values under the number `layer`."""

    def __init__(self, config: AlmaConfig, layer: int):
        super().__init__()
        self.heads = config.num_attention_heads
        self.layer = layer
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, allowed: Tensor, cache) -> Tensor:
        """`x` (B, T, D); `allowed` (B or 1, 1, T, P) is true where a query may look at a key."""
        q, k, v = (
            projection(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class AlmaRouter(nn.Module):
    """Top-1 router in fp32. An expert that was split in m without a change of function has m in `copies`.
    Where `parent` is not -1, the expert's row is the gate of a split instead: tokens of `parent` with a
    negative product go on to it, and keep the weight they have.
    """

    copies: Tensor
    parent: Tensor

    def __init__(self, config: AlmaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("copies", torch.ones(config.num_experts, dtype=torch.int64))
        self.register_buffer("parent", torch.full((config.num_experts,), -1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (S, D) -> expert (S,) and the weight of its output (S,) in fp32."""
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
    """E expert FFNs; each token goes through one, and none is dropped."""

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
    """Attention and FFN, each behind a layer norm and added to what comes in."""

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
    """One language model; its layers are `first_layer`, `first_layer` + 1, ... in the cache."""

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
        """`tokens` and `positions` (B, T) -> logits (B, keep, V) of the last `keep` tokens, of all for 0."""
        x = self.scale * self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, allowed, cache)
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        x = self.layer_norm(x[:, keep])
        return F.linear(x, (self.output_projection or self.embed_tokens).weight)


class AlmaForCausalLM(PreTrainedModel, GenerationMixin):
    """The mean of its members' logits, or probabilities; most models have one member."""

    config_class = AlmaConfig
    _supports_sdpa = True

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.members = nn.ModuleList()
        layers = 0
        for part in [AlmaConfig(**member) for member in config.members or ()] or [config]:
            self.members.append(AlmaDecoder(part, layers))
            layers += part.num_hidden_layers
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding of the first member."""
        return self.members[0].get_submodule("embed_tokens")

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
        """Tokens `input_ids` (B, T) -> logits (B, T, V), whose softmax is what the model predicts.

        `attention_mask` (B, P) is 0 for padding, on either side, which takes no position. The loss is of
        `labels` (B, T), shifted here. ValueError: more tokens than the model has positions.
        """
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        total = past + input_ids.size(1)
        if total > self.config.max_position_embeddings:
            raise ValueError(f"{total} tokens are too many: at most {self.config.max_position_embeddings}")
        key = torch.arange(total, device=input_ids.device)
        query = key[past:, None]
        allowed = (key <= query)[None, None]
        if attention_mask is not None:
            # Padding looks at itself: a softmax over nothing is not a number.
            allowed = allowed & (attention_mask[:, None, None].bool() | (key == query))
        if position_ids is None:
            position_ids = key[None]
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            position_ids = position_ids[:, past:]
        logits = self._average(
            member(input_ids, position_ids, allowed, past_key_values, logits_to_keep)
            for member in self.members
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _average(self, outputs) -> Tensor:
        """Of the members' logits, each (B, T, V), computed one after the other."""
        n = len(self.members)
        if n == 1:
            return next(outputs)
        if self.config.average == "logits":
            return sum(logits.float() for logits in outputs) / n
        logs = (F.log_softmax(logits.float(), dim=-1) for logits in outputs)
        return reduce(torch.logaddexp, logs) - math.log(n)
