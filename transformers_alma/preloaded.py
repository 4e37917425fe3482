"""What all commands of the engine import, once: then each is a fork (`slurm.engine.forks`).

transformers loads its modules at their first use, so the import of the package alone is not enough.
"""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from transformers_alma import check, evaluation, training

__all__ = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PreTrainedModel",
    "Trainer",
    "TrainingArguments",
    "check",
    "evaluation",
    "training",
)
