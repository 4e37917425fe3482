"""Folders of Hugging Face as far as a test needs them."""

from pathlib import Path


def make_qwen(folder: Path) -> None:
    """The folder of a model as far as a launch without a stream reads it."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1).save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
