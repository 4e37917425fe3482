"""Adapters (LoRA) merged into the weights of their model."""

from pathlib import Path
from typing import Any

from alma.errors import require_package
from transformers_alma import models
from transformers_alma.arguments import EngineArguments


def merged(checkpoint: Path, base: str, out: Path) -> None:
    """Write the model in `base` with the adapters of a checkpoint into the folder `out`.

    Weights have the type that they have in `base`. UserError: one of the folders is damaged.
    """
    require_package("peft", "a checkpoint with adapters", "lora")
    from peft import PeftModel

    kind: Any = PeftModel
    with models.reading(checkpoint):
        adapted = kind.from_pretrained(
            models.pretrained(base, EngineArguments(dtype="auto")), checkpoint
        )
        adapted.merge_and_unload().save_pretrained(out)
