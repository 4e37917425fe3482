"""A byte-level tokenizer as GPT-2's, trained on a few texts."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def byte_level(texts: Iterable[str], tokens: int, special_tokens: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` of so many tokens, the special ones first."""
    tokenizers = pytest.importorskip("tokenizers")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = bytes_
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=tokens,
        initial_alphabet=bytes_.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return engine
