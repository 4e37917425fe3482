"""Names of files in a folder of Hugging Face, as transformers writes them."""

from collections.abc import Collection
from pathlib import Path

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
INDEX = ("*.index.json",)  # of weights in several files
TRAINING_STATE = (
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "alma_*.json",
)
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
"""Patterns of the names of files, as transformers writes them."""
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
"""Those that determine the ids of texts."""


def matching(folder: Path, patterns: Collection[str]) -> set[str]:
    """Names of the files in `folder` that match one of the patterns."""
    return {file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()}


def remove_others(out: Path, place: Path) -> None:
    """Remove what another model left in `out`, which gets the files of `place`."""
    written = {file.name for file in place.iterdir()}
    for name in matching(out, WEIGHTS + INDEX + TOKENIZER) - written:
        (out / name).unlink()
