"""The Switch Transformer language model: archs switch_gmoe (= base), _base, _large and _tiny.

fairseq's pre-LN decoder with a Switch layer in every `--moe-freq`-th block (paper, section 5).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
)
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from alma.errors import UserError
from alma.flops import ARCHS, Arch
from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.layer import SwitchFFN

_NOT_SUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "character_embeddings",
    "decoder_layerdrop",
    "quant_noise_pq",
    "scale_fc",
)


@dataclass
class SwitchLMConfig(TransformerLanguageModelConfig):
    """fairseq's transformer_lm and the Switch layer; the --moe-* names are those of fairseq's moe branch."""

    moe_expert_count: int = field(default=4, metadata={"help": "experts in each Switch layer"})
    moe_freq: int = field(default=2, metadata={"help": "a Switch layer in every N-th block"})
    moe_capacity_factor: float = field(
        default=1.0,
        metadata={"help": "in training an expert takes at most FACTOR * tokens / experts; 0: no limit"},
    )
    moe_eval_capacity_token_fraction: float = field(
        default=-1.0,
        metadata={"help": "the same in evaluation, as a fraction of the batch's tokens; negative: no limit"},
    )
    moe_expert_parallel: bool = field(
        default=False,
        metadata={"help": "each process holds a part of the experts, not all, and tokens go to them"},
    )
    compile: bool = field(
        default=False,
        metadata={
            "help": "train with torch.compile'd blocks on a GPU (slower on a CPU, where it does nothing)"
        },
    )
    members: int = field(
        default=1, metadata={"help": "UMix: train this many models as one, their logits averaged"}
    )


class CausalSelfAttention(MultiheadAttention):
    """fairseq's, told to scaled_dot_product_attention as causal where nothing but the future is masked.

    fairseq gives it the future as a tensor, with which the fastest kernels of a GPU cannot be used.
    """

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None, **kwargs):
        """As fairseq's, `query` (T, B, D); an `attn_mask` is taken to be that of the future."""
        options = {name for name, given in kwargs.items() if given is not None and given is not False}
        if options != {"attn_mask"} or self.use_xformers:
            return super().forward(query, key, value, **kwargs)
        length, batch, dim = query.shape
        heads = (length, batch, self.num_heads, self.head_dim)
        q, k, v = (
            project(query).view(heads).permute(1, 2, 0, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropping = self.training or self.dropout_module.apply_during_inference
        dropout = self.dropout_module.p if dropping else 0.0
        attention = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out_proj(attention.permute(2, 0, 1, 3).reshape(length, batch, dim)), None


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's, with causal self-attention."""

    def build_self_attention(self, embed_dim: int, cfg, **_) -> CausalSelfAttention:
        """As fairseq's; the options it has for other models are False in this one."""
        return CausalSelfAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )


class SwitchDecoderLayer(DecoderLayer):
    """fairseq's decoder layer with a SwitchFFN where its dense FFN would be.

    fairseq's layer computes fc2(act(fc1(x))); here fc1 is the whole Switch layer and the rest the identity,
    so that everything else (norms, attention, incremental decoding) stays fairseq's. The load-balancing loss
    leaves as third output, not through an attribute: under activation checkpointing only outputs carry a
    gradient.
    """

    def __init__(self, cfg: TransformerConfig, args: SwitchLMConfig):
        self.moe = args
        super().__init__(cfg, no_encoder_attn=True)
        self.activation_fn = nn.Identity()
        self.activation_dropout_module = nn.Identity()
        self.balance_loss: Tensor
        self.register_forward_hook(_keep_balance_loss)

    def build_fc1(self, input_dim: int, output_dim: int, q_noise: float, qn_block_size: int) -> SwitchFFN:
        return SwitchFFN(
            input_dim,
            output_dim,
            self.moe.moe_expert_count,
            self.moe.moe_capacity_factor,
            self.moe.moe_eval_capacity_token_fraction,
            self.activation_fn,
            self.activation_dropout_module,
        )

    def build_fc2(self, input_dim: int, output_dim: int, q_noise: float, qn_block_size: int) -> nn.Module:
        return nn.Identity()

    def __getstate__(self) -> dict[str, Any]:
        """Without the last pass's loss: deepcopy refuses tensors that have a graph."""
        return {name: value for name, value in super().__getstate__().items() if name != "balance_loss"}

    def forward(self, x: Tensor, *args, self_attn_padding_mask: Tensor | None = None, **kwargs):
        """As fairseq's, `x` (T, B, D), but returns (x, attention, load-balancing loss)."""
        self.fc1.padding_mask = self_attn_padding_mask
        x, attention, _ = super().forward(x, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs)
        balance_loss = self.fc1.balance_loss
        self.fc1.balance_loss = balance_loss.detach()  # recomputation sets it, too: no graph is left behind
        return x, attention, balance_loss


def _keep_balance_loss(layer: SwitchDecoderLayer, inputs, outputs) -> None:
    layer.balance_loss = outputs[2]


def compile_training(layer: nn.Module) -> None:
    """Have torch.compile'd what `layer` does in training.

    Evaluation has batches of many shapes, and Switch layers that drop no token read sizes off the device.
    """
    eager, compiled = layer.forward, torch.compile(layer.forward)
    layer.forward = lambda *args, **kwargs: (compiled if layer.training else eager)(*args, **kwargs)


class SwitchDecoder(TransformerDecoder):
    """fairseq's decoder with a Switch layer in every `moe_freq`-th block: (i + 1) % moe_freq == 0."""

    def __init__(self, args, dictionary, embed_tokens):
        self.blocks_built = 0
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)

    def build_decoder_layer(self, args, no_encoder_attn: bool = True) -> nn.Module:
        self.blocks_built += 1
        cfg = TransformerConfig.from_namespace(args)
        layer: nn.Module
        if self.blocks_built % self.args.moe_freq:
            layer = DecoderLayer(cfg, no_encoder_attn)
        else:
            layer = SwitchDecoderLayer(cfg, self.args)
        if getattr(self.args, "compile", False) and torch.cuda.is_available():
            compile_training(layer)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)

    def extract_features_scriptable(self, prev_output_tokens: Tensor, *args, **kwargs):
        """As fairseq's; processes that share out the experts agree on the size of their batches."""
        shards = next((module.shards for module in self.modules() if isinstance(module, SwitchFFN)), None)
        if shards:
            shards.agree(prev_output_tokens.numel(), prev_output_tokens.device)
        return super().extract_features_scriptable(prev_output_tokens, *args, **kwargs)

    def load_balancing_loss(self) -> Tensor | float:
        """Sum of the Switch layers' load-balancing losses of the last forward pass; call it once for each.

        It has the graph, the layers keep the values: what keeps a graph cannot be copied.
        """
        layers = [layer for layer in self.modules() if isinstance(layer, SwitchDecoderLayer)]
        losses = [layer.balance_loss for layer in layers]
        for layer in layers:
            layer.balance_loss = layer.balance_loss.detach()
        return sum(losses, 0.0)


@register_model("switch_lm", dataclass=SwitchLMConfig)
class SwitchLanguageModel(TransformerLanguageModel):
    """A decoder-only Switch Transformer (paper, section 5: SM on the language modeling task), or UMix."""

    decoder: SwitchDecoder | EnsembleDecoder

    @classmethod
    def build_model(cls, args, task) -> "SwitchLanguageModel":
        """Build from fairseq's arguments. UserError: experts or frequency < 1, options it cannot honour."""
        if args.moe_expert_count < 1 or args.moe_freq < 1 or args.members < 1:
            raise UserError("--moe-expert-count, --moe-freq and --members must be 1 or more")
        for flag in _NOT_SUPPORTED:
            if safe_getattr(args, flag):
                raise UserError(
                    f"--{flag.replace('_', '-')} does not go with a Switch Transformer: leave it out"
                )
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        decoders = [
            SwitchDecoder(
                args,
                task.target_dictionary,
                cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim),
            )
            for _ in range(args.members)
        ]
        return cls(decoders[0] if args.members == 1 else EnsembleDecoder(decoders, "logits"))


def _architecture(name: str, arch: Arch) -> None:
    def fill(args) -> None:
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
        base_lm_architecture(args)

    register_model_architecture("switch_lm", name)(fill)


for _name, _arch in ARCHS.items():
    _architecture(_name, _arch)
