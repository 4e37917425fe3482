"""Several language models as one: the mean of their probabilities, or of their logits (section 4.1).

Shapes: B sequences, T tokens, V the dictionary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from torch import Tensor, nn

from alma.errors import UserError
from fairseq_alma.defaults import AVERAGES


@dataclass
class EnsembleLMConfig(FairseqDataclass):
    """What `fairseq_alma.combine` writes."""

    members: Any = field(default=None, metadata={"help": "the model config of each member"})
    average: ChoiceEnum(list(AVERAGES)) = field(  # type: ignore[valid-type]
        default="probs", metadata={"help": "what is averaged over the members: probabilities or logits"}
    )


class EnsembleDecoder(FairseqIncrementalDecoder):
    """Decoders of one dictionary, computed one after the other: two (B, T, V) tensors at most are kept."""

    def __init__(self, decoders: Sequence[nn.Module], average: str):
        super().__init__(decoders[0].dictionary)
        self.members = nn.ModuleList(decoders)
        self.average = average

    def forward(
        self, prev_output_tokens: Tensor, incremental_state=None, features_only: bool = False, **kwargs
    ):
        """Tokens (B, T) -> (B, T, V) in fp32, whose softmax is what the ensemble predicts; no attention.

        `features_only`: the members' features side by side, divided by their number. Each part times its
        member's output weights, summed, is the mean of the logits.
        """
        if features_only:
            kwargs.update(incremental_state=incremental_state, features_only=True)
            features = [member(prev_output_tokens, **kwargs)[0] for member in self.members]
            return torch.cat(features, dim=-1) / len(features), {"attn": [None]}
        total: Any = None
        for member in self.members:
            logits = member(prev_output_tokens, incremental_state=incremental_state, **kwargs)[0].float()
            if self.average == "logits":
                total = logits if total is None else total + logits
            else:
                logs = F.log_softmax(logits, dim=-1)
                total = logs if total is None else torch.logaddexp(total, logs)
        n = len(self.members)
        return (total / n if self.average == "logits" else total - math.log(n)), {"attn": [None]}

    def load_balancing_loss(self) -> Tensor | float:
        """Sum over the members that have one, each as if it were trained alone."""
        losses = [getattr(member, "load_balancing_loss", None) for member in self.members]
        return sum((loss() for loss in losses if loss), 0.0)

    def max_positions(self) -> int:
        """Of the member with the shortest context."""
        return min(member.max_positions() for member in self.members)  # type: ignore[operator]


@register_model("alma_ensemble", dataclass=EnsembleLMConfig)
class EnsembleLanguageModel(FairseqLanguageModel):
    """One model to all of fairseq's tools; members may differ in size and in experts."""

    @classmethod
    def build_model(cls, cfg, task) -> "EnsembleLanguageModel":
        """Build the members, each as its own config says."""
        if not cfg.members:
            raise UserError("alma_ensemble is made by `python -m fairseq_alma.combine`, not trained")
        return cls.of([task.build_model(member, from_checkpoint=True) for member in cfg.members], cfg.average)

    @classmethod
    def of(cls, models: Sequence[nn.Module], average: str = "probs") -> "EnsembleLanguageModel":
        """An ensemble of language models that are there already."""
        return cls(EnsembleDecoder([model.decoder for model in models], average))  # type: ignore[misc, arg-type]
