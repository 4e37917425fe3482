"""Analytic parameter and FLOP counts of language models: (Switch) Transformers and others.

A multiply-add counts as two FLOPs; docs/design.md says why these are formulas.
"""

from dataclasses import dataclass
from typing import NamedTuple

BACKWARD = 2  # the backward pass costs twice the forward pass


class Arch(NamedTuple):
    """Sizes of an --arch of the plug-in: layers, width D, attention heads; hidden width F = 4 D."""

    layers: int
    dim: int
    heads: int


ARCHS = {
    "switch_gmoe": Arch(layers=6, dim=512, heads=8),
    "switch_gmoe_base": Arch(layers=6, dim=512, heads=8),
    "switch_gmoe_large": Arch(layers=12, dim=768, heads=12),
    "switch_gmoe_tiny": Arch(layers=4, dim=128, heads=4),
}


@dataclass(frozen=True)
class Weights:
    """Counts of a model that is no Transformer, such as an LSTM.

    Each weight of a matrix costs a multiply-add per token. Not counted: embedding look-ups, and the
    convolution itself in dynamic convolutions (as the attention product in Transformers).
    """

    weights: int
    positions: int  # tokens of an example
    members = 1
    experts = switch_layers = 0

    def forward_flops(self, tokens: int, attention_over: int = 0) -> int:
        """FLOPs of a forward pass over `tokens`; it has no attention."""
        return 2 * tokens * self.weights

    def training_flops(self, tokens: int) -> int:
        """FLOPs of the forward and backward passes over `tokens`."""
        return (1 + BACKWARD) * self.forward_flops(tokens)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model.

    Layers L, width D, hidden width F, dictionary size V, positions P, experts E.

    A dense model has 0 experts. N members (UMix) multiply all counts by N. `input_dim` is the width
    of the embeddings, `output_dim` that of the output layer's input; if they differ from D, the
    model has a projection. 0 stands for D.
    """

    layers: int
    dim: int
    hidden: int
    vocabulary: int
    positions: int
    experts: int
    moe_freq: int
    members: int = 1
    input_dim: int = 0
    output_dim: int = 0
    tied: bool = True  # whether the output layer has the weights of the embedding
    learned_positions: bool = True
    final_norm: bool = True

    @classmethod
    def of(cls, args, vocabulary: int) -> "Shape":
        """From a fairseq model's arguments and the size of its dictionary, specials included."""
        return cls(
            args.decoder_layers,
            args.decoder_embed_dim,
            args.decoder_ffn_embed_dim,
            vocabulary,
            args.max_target_positions or args.tokens_per_sample,
            getattr(args, "moe_expert_count", None) or 0,
            getattr(args, "moe_freq", 1),
            getattr(args, "members", 1),
            args.decoder_input_dim,
            args.decoder_output_dim,
            bool(args.share_decoder_input_output_embed),
            bool(args.decoder_learned_pos),
            bool(args.decoder_normalize_before and not args.no_decoder_final_norm),
        )

    @property
    def switch_layers(self) -> int:
        """Number of blocks with a Switch layer."""
        return self.layers // self.moe_freq if self.experts else 0

    @property
    def _ffn(self) -> int:
        """Parameters of one FFN, which are those of one expert in a layer."""
        return 2 * self.dim * self.hidden + self.hidden + self.dim

    @property
    def per_expert(self) -> int:
        """Parameters of one expert in every Switch layer, router rows included."""
        return self.switch_layers * (self._ffn + self.dim)

    @property
    def shared(self) -> int:
        """Parameters outside experts and routers."""
        embeddings = self.vocabulary * (self.input_dim or self.dim)
        if self.learned_positions:
            embeddings += (self.positions + 2) * self.dim  # fairseq offsets positions by pad + 1
        if not self.tied:
            embeddings += self.vocabulary * (self.output_dim or self.dim)
        block = 4 * (self.dim**2 + self.dim) + 4 * self.dim  # attention and two layer norms
        blocks = self.layers * block + (self.layers - self.switch_layers) * self._ffn
        return embeddings + self._projections + blocks + 2 * self.dim * self.final_norm

    @property
    def _projections(self) -> int:
        """Weights of the projections between D and `input_dim`, D and `output_dim`."""
        widths = (self.input_dim, self.output_dim)
        return sum(self.dim * width for width in widths if width not in (0, self.dim))

    @property
    def parameters(self) -> int:
        """All parameters, |theta| of the paper's eq. 2."""
        return self.members * (self.shared + self.experts * self.per_expert)

    @property
    def parameter_sizes(self) -> list[int]:
        """Elements of each parameter tensor, in the order of the model."""
        dim = self.dim
        hidden = self.hidden
        sizes = [self.vocabulary * (self.input_dim or dim)]
        if self.input_dim not in (0, dim):
            sizes.append(dim * self.input_dim)
        if self.learned_positions:
            sizes.append((self.positions + 2) * dim)
        norm = [dim, dim]
        attention = 4 * [dim * dim, dim]
        dense = [hidden * dim, hidden, dim * hidden, dim]
        switch = [self.experts * size for size in (*dense, dim)]  # the router last
        for block in range(1, self.layers + 1):
            is_switch = bool(self.experts) and block % self.moe_freq == 0
            sizes += [*attention, *norm, *(switch if is_switch else dense), *norm]
        if self.final_norm:
            sizes += norm
        if self.output_dim not in (0, dim):
            sizes.append(dim * self.output_dim)
        if not self.tied:
            sizes.append(self.vocabulary * (self.output_dim or dim))
        return self.members * sizes

    def forward_flops(self, tokens: int, attention_over: int = 0) -> int:
        """FLOPs of a forward pass over `tokens`, with top-1 routing.

        The paper leaves the attention scores out. `attention_over`, the sequence length, adds them:
        2 GEMMs over all positions, as computed, although the causal mask hides half.
        """
        projections = 4 * self.dim**2 + 2 * self.dim * self.hidden
        router = self.switch_layers * self.dim * self.experts
        ends = self._projections + self.vocabulary * (self.output_dim or self.dim)
        per_token = 2 * (self.layers * projections + router + ends)
        scores = 2 * self.layers * 2 * attention_over * self.dim
        return self.members * tokens * (per_token + scores)

    def training_flops(self, tokens: int) -> int:
        """FLOPs of the forward and backward passes over `tokens`, without attention scores."""
        return (1 + BACKWARD) * self.forward_flops(tokens)
