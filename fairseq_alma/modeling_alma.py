"""A language model of ALMA's fairseq plug-in, for Hugging Face transformers.

Self-contained (torch and transformers only): `fairseq_alma.export` copies this file beside the
weights.

BioGPT, which transformers has from fairseq, is fairseq's pre-LN decoder with learned positions.
Here a Switch layer (Fedus et al., 2021) replaces the FFN of every `decoder_sparse_step`-th block.

Shapes: B sequences, T tokens, S = B * T, D model, F hidden, E experts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BioGptConfig, BioGptForCausalLM, BioGptModel
from transformers.activations import ACT2FN


class AlmaConfig(BioGptConfig):
    """Settings of a decoder; a dense one has num_experts 0."""

    model_type = "alma"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    num_experts: int = 0
    decoder_sparse_step: int = 2


class AlmaRouter(nn.Module):
    """Top-1 router in fp32.

    `copies` (E,) counts the copies of an expert after function-preserving splits, 1 if it was never
    split. `parent` (E,) is -1, or the expert that this one was split from in a tree. The expert's
    row of `weight` is then the gate of the split: tokens of the parent with a negative logit move
    to it and keep their weight.
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
        experts = config.num_experts
        dim = config.hidden_size
        hidden = config.intermediate_size
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


class AlmaModel(BioGptModel):
    """The decoder without the output layer."""

    config_class = AlmaConfig
    _can_compile_fullgraph = False  # Switch layers read their loads

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        if config.num_experts:
            for layer in self.layers[config.decoder_sparse_step - 1 :: config.decoder_sparse_step]:
                layer.fc1 = AlmaSwitchFFN(config)
                layer.activation_fn = layer.fc2 = nn.Identity()
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        """As BioGPT's; padding, where `attention_mask` is 0, takes up no position on either
        side."""
        if position_ids is None and attention_mask is not None and input_ids is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[
                :, -input_ids.size(1) :
            ]
        return super().forward(input_ids, attention_mask, position_ids=position_ids, **kwargs)


class AlmaForCausalLM(BioGptForCausalLM):
    """The decoder with its output layer."""

    config_class = AlmaConfig
    _can_compile_fullgraph = False

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.biogpt = AlmaModel(config)
        self.post_init()
