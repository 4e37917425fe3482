"""The Switch Transformer language model: archs switch_gmoe (= base), _base, _large and _tiny.

fairseq's pre-LN decoder with a Switch layer in every `--moe-freq`-th block (paper, section 5).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import register_model, register_model_architecture, transformer_lm
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from alma.errors import UserError
from alma.flops import ARCHS, Arch
from alma.options import flag_of
from fairseq_alma.defaults import flag
from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.layer import SwitchFFN
from fairseq_alma.moe.router import Routing


@dataclass
class SwitchLMConfig(transformer_lm.TransformerLanguageModelConfig):
    """Options of fairseq's transformer_lm and of the Switch layer, named as in fairseq's moe
    branch."""

    moe_expert_count: int = flag(4, "experts in each Switch layer")
    moe_freq: int = flag(2, "a Switch layer in every N-th block")
    moe_capacity_factor: float = flag(
        1.0, "capacity of an expert in training, times tokens / experts; 0: no limit"
    )
    moe_expert_parallel: bool = flag(
        False, "divide the experts among the processes, and send tokens to them"
    )
    compile: bool = flag(
        False, "train with torch.compile on a GPU; no effect on a CPU, where it would be slower"
    )
    members: int = flag(1, "UMix: train this many models as one and average their logits")


class CausalSelfAttention(MultiheadAttention):
    """fairseq's self-attention, with is_causal=True in scaled_dot_product_attention instead of a
    mask tensor.

    A mask tensor rules out the fastest GPU kernels. Padding and incremental decoding take fairseq's
    own path.
    """

    def forward(
        self,
        x_BTD: Tensor,
        mask_TT: Tensor | None,
        padding_BT: Tensor | None,
        incremental_state,
    ):
        """Attention output (B, T, D); `mask_TT` is the causal mask, None in incremental
        decoding."""
        if mask_TT is None or padding_BT is not None or self.use_xformers:
            x_TBD = x_BTD.transpose(0, 1)
            h_TBD, _ = super().forward(
                x_TBD,
                x_TBD,
                x_TBD,
                padding_BT,
                incremental_state,
                need_weights=False,
                attn_mask=mask_TT,
            )
            return h_TBD.transpose(0, 1)
        # One matrix product instead of three, faster for small models.
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections])
        # Slices of the last dimension: their gradients are joined by one copy.
        parts = F.linear(x_BTD, weight, bias).chunk(3, dim=-1)
        heads = (*x_BTD.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
        drops = self.training or self.dropout_module.apply_during_inference
        dropout = self.dropout_module.p if drops else 0.0
        attention = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out_proj(attention.transpose(1, 2).reshape(x_BTD.shape))


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's pre-LN decoder block with causal self-attention.

    With `moe`, a SwitchFFN, under fairseq's name `fc1`, replaces the dense FFN.
    """

    def __init__(self, cfg: TransformerConfig, moe: SwitchLMConfig | None):
        self.moe = moe
        super().__init__(cfg, no_encoder_attn=True)

    def build_fc1(self, input_dim: int, output_dim: int, *quantisation) -> nn.Module:
        if self.moe is None:
            return super().build_fc1(input_dim, output_dim, *quantisation)
        sizes = (input_dim, output_dim, self.moe.moe_expert_count, self.moe.moe_capacity_factor)
        return SwitchFFN(*sizes, self.activation_fn, self.activation_dropout_module)

    def build_fc2(self, *args) -> nn.Module | None:
        return super().build_fc2(*args) if self.moe is None else None

    def build_self_attention(self, embed_dim: int, cfg, **_) -> CausalSelfAttention:
        """As fairseq's, without its options for other models."""
        return CausalSelfAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            self_attention=True,
            dropout=cfg.attention_dropout,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )

    def forward(
        self,
        x_BTD: Tensor,
        mask_TT: Tensor | None,
        padding_BT: Tensor | None,
        incremental_state: dict[str, Any] | None,
        largest_batch: int,
    ) -> tuple[Tensor, ...]:
        """The block's output (B, T, D), followed by the fields of a `Routing` in a Switch block.

        One flat tuple: fairseq's activation checkpointing differentiates no nested outputs.
        """
        h_BTD = self.self_attn_layer_norm(x_BTD)
        h_BTD = self.self_attn(h_BTD, mask_TT, padding_BT, incremental_state)
        x_BTD = x_BTD + self.dropout_module(h_BTD)
        h_BTD = self.final_layer_norm(x_BTD)
        routing = ()
        if self.fc2 is None:
            h_BTD, routing = self.fc1(h_BTD, padding_BT, largest_batch)
        else:
            h_BTD = self.activation_dropout_module(self.activation_fn(self.fc1(h_BTD)))
            h_BTD = self.fc2(h_BTD)
        return x_BTD + self.dropout_module(h_BTD), *routing


def compile_training(layer: nn.Module) -> None:
    """Run the layer's forward pass by torch.compile in training.

    Not in evaluation: its batches have many shapes, and Switch layers without a capacity sync with
    the host.
    """
    eager = layer.forward
    compiled = torch.compile(layer.forward)

    def forward(*args, **kwargs):
        if layer.training:
            return compiled(*args, **kwargs)
        return eager(*args, **kwargs)

    layer.forward = forward


class SwitchDecoder(TransformerDecoder):
    """fairseq's decoder with a Switch layer in every `moe_freq`-th block: (i + 1) % moe_freq ==
    0."""

    padded: bool | None = (
        None  # whether the next batch has padding; None: unknown, found by a host sync
    )

    def __init__(self, args, dictionary, embed_tokens):
        self.blocks_built = 0
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)

    def build_decoder_layer(self, args, no_encoder_attn: bool = True) -> nn.Module:
        self.blocks_built += 1
        cfg = TransformerConfig.from_namespace(args)
        layer = DecoderLayer(cfg, None if self.blocks_built % self.args.moe_freq else self.args)
        if getattr(self.args, "compile", False) and torch.cuda.is_available():
            compile_training(layer)
        if cfg.checkpoint_activations:
            return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return layer

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        incremental_state=None,
        full_context_alignment: bool = False,
        **_,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features (B, T, D) of the tokens (B, T); extra["routings"]: the Routing of each Switch
        block."""
        x_BTD, padding_BT = self._embed(prev_output_tokens, incremental_state)
        padded = bool(padding_BT.any()) if self.padded is None else self.padded
        self.padded = None
        x_BTD = self.dropout_module(x_BTD)
        mask_TT = None
        if incremental_state is None and not full_context_alignment:
            mask_TT = self.buffered_future_mask(x_BTD.transpose(0, 1))
        largest_batch = self._largest_batch(prev_output_tokens)
        routings: dict[str, Routing] = {}
        for block, layer in enumerate(self.layers):
            padding = padding_BT if padded else None
            x_BTD, *routing = layer(x_BTD, mask_TT, padding, incremental_state, largest_batch)
            if routing:
                routings[str(block)] = Routing(*routing)
        if self.layer_norm is not None:
            x_BTD = self.layer_norm(x_BTD)
        if self.project_out_dim is not None:
            x_BTD = self.project_out_dim(x_BTD)
        return x_BTD, {"attn": [None], "routings": routings}

    def _embed(self, tokens_BT: Tensor, incremental_state) -> tuple[Tensor, Tensor]:
        """Embeddings with positions (B, T, D), and whether a token is padding (B, T).

        With an `incremental_state`, those of the last token alone: T is 1.
        """
        positions = None
        if self.embed_positions is not None:
            positions = self.embed_positions(tokens_BT, incremental_state)
        if incremental_state is not None:
            tokens_BT = tokens_BT[:, -1:]
            positions = None if positions is None else positions[:, -1:]
        x_BTD = self.embed_scale * self.embed_tokens(tokens_BT)
        if self.project_in_dim is not None:
            x_BTD = self.project_in_dim(x_BTD)
        if positions is not None:
            x_BTD += positions
        return x_BTD, tokens_BT.eq(self.padding_idx)

    def _largest_batch(self, tokens_BT: Tensor) -> int:
        """Tokens in the largest batch of any process; 0 without expert parallelism."""
        layers = (module for module in self.modules() if isinstance(module, SwitchFFN))
        group = next((layer.ep_group for layer in layers), None)
        if group is None:
            return 0
        return group.largest(torch.tensor(tokens_BT.numel(), device=tokens_BT.device))


def expect_padding(decoder: nn.Module, padded: bool | None) -> None:
    """Set `padded` of a decoder, or of those of an ensemble, for the next forward pass."""
    for member in getattr(decoder, "members", [decoder]):
        member.padded = padded


_UNSUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "character_embeddings",
    "decoder_layerdrop",
    "layernorm_embedding",
    "quant_noise_pq",
    "scale_attn",
    "scale_fc",
    "scale_heads",
    "scale_resids",
)
"""Options of transformer_lm that a Switch Transformer does not have."""


@register_model("switch_lm", dataclass=SwitchLMConfig)
class SwitchLanguageModel(transformer_lm.TransformerLanguageModel):
    """A decoder-only Switch Transformer (paper, section 5), or several as one UMix."""

    decoder: SwitchDecoder | EnsembleDecoder

    @classmethod
    def check(cls, args) -> None:
        """Raise a UserError for a count < 1 or an unsupported option in fairseq's arguments."""
        counts = ("moe_expert_count", "moe_freq", "members")
        if min(safe_getattr(args, name, 1) for name in counts) < 1:
            raise UserError("--moe-expert-count, --moe-freq and --members must be 1 or more")
        for name in _UNSUPPORTED:
            if safe_getattr(args, name):
                raise UserError(f"a Switch Transformer does not support {flag_of(name)}: drop it")
        shards = safe_getattr(args, "zero_sharding", "none") == "os"
        if safe_getattr(args, "moe_expert_parallel") and shards:
            problem = "each process already keeps the optimizer's state of its own experts"
            raise UserError(
                f"--moe-expert-parallel with --zero-sharding os: {problem}; drop one of them"
            )

    @classmethod
    def build_model(cls, args, task) -> "SwitchLanguageModel":
        """Build from fairseq's arguments, which `check` accepts."""
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        decoders = []
        for _ in range(args.members):
            embedding = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
            decoders.append(SwitchDecoder(args, task.target_dictionary, embedding))
        return cls(decoders[0] if args.members == 1 else EnsembleDecoder(decoders, "logits"))


def _fill(arch: Arch, args) -> None:
    for key, value in (
        ("decoder_layers", arch.layers),
        ("decoder_embed_dim", arch.dim),
        ("decoder_attention_heads", arch.heads),
        ("decoder_ffn_embed_dim", 4 * safe_getattr(args, "decoder_embed_dim", arch.dim)),
        ("activation_fn", "gelu"),
        ("decoder_learned_pos", True),
        ("share_decoder_input_output_embed", True),
    ):
        setattr(args, key, safe_getattr(args, key, value))
    transformer_lm.base_lm_architecture(args)


for _name, _arch in ARCHS.items():
    register_model_architecture("switch_lm", _name)(partial(_fill, _arch))
