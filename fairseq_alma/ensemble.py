"""Several language models as one: the mean of their probabilities or of their logits (paper,
section 4.1).

Shapes: B batch, T time, V vocabulary, N members.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from torch import Tensor, nn

from fairseq_alma.moe.layer import routings_of


class EnsembleDecoder(FairseqIncrementalDecoder):
    """Decoders with one dictionary, run one after the other: at most two (B, T, V) tensors at a
    time."""

    def __init__(self, decoders: Sequence[nn.Module], average: str):
        """`average`: "probs" (an ensemble) or "logits" (UMix)."""
        super().__init__(decoders[0].dictionary)
        self.members = nn.ModuleList(decoders)
        self.average = average

    def forward(
        self,
        prev_output_tokens: Tensor,
        incremental_state=None,
        features_only: bool = False,
        **kwargs,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Tokens (B, T) to the averaged prediction as logits (B, T, V), fp32.

        With `features_only`, returns the members' features concatenated and divided by N instead,
        (B, T, N * D): their product with the members' concatenated output weights is the mean of
        the logits. The second result has no attention weights; its "routings" holds the routing of
        every Switch layer by "member.block".
        """
        kwargs["incremental_state"] = incremental_state
        if features_only:
            kwargs["features_only"] = True
        extra: dict[str, Any] = {"attn": [None], "routings": {}}
        features: list[Tensor] = []
        total: Any = None
        for i, member in enumerate(self.members):
            output = member(prev_output_tokens, **kwargs)
            for block, routing in routings_of(output).items():
                extra["routings"][f"{i}.{block}"] = routing
            if features_only:
                features.append(output[0])
            elif self.average == "logits":
                logits = output[0].float()
                total = logits if total is None else total + logits
            else:
                logs = F.log_softmax(output[0].float(), dim=-1)
                total = logs if total is None else torch.logaddexp(total, logs)
        members = len(self.members)
        if features_only:
            return torch.cat(features, dim=-1) / members, extra
        if self.average == "logits":
            return total / members, extra
        return total - math.log(members), extra

    def max_positions(self) -> int:
        """The shortest context of any member."""
        return min(member.max_positions() for member in self.members)  # type: ignore[operator]


def ensemble_of(models: Sequence[Any]) -> FairseqLanguageModel:
    """An ensemble that averages the probabilities of `models`, which may differ in size.

    A single model is returned unchanged.
    """
    if len(models) == 1:
        return models[0]
    return FairseqLanguageModel(EnsembleDecoder([model.decoder for model in models], "probs"))
