"""The tokenizer of an existing model: the byte-level BPE of a Hugging Face folder."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alma.errors import UserError, require_package
from data_prep.dictionary import EOS, SPECIALS
from data_prep.tokenizer import Encoder

_TRIAL = "It's  1234 A1\u00e9: \u6f22\u5b57\n\U0001f600 <|x|>\u200b\n"


class HuggingFace(Encoder):
    """A tokenizer.json. The text of a document, line breaks too, is one item, which ends with eos.

    The model's id i is the token spelt as the number i in dict.txt, and has fairseq id i + 4; fairseq's eos
    (id 2) stands for the model's end of text, `eos_token_id` of its config.json. So row i + 4 of a model
    trained on the stream is row i of the existing one, row 2 is its row `eos_token_id`, and rows 0, 1 and 3
    occur in no text. dict.txt has the ids of the tokenizer: a model's table of embeddings may have more rows.
    The spelling of a special token in a text is encoded as text, so that no text can end a document.
    """

    files: ClassVar[tuple[str, ...]] = ("tokenizer.json",)

    def __init__(self, *paths: str | Path) -> None:
        """Load the files. UserError: damaged, no byte-level BPE, or tokenizers is not installed."""
        require_package("tokenizers", "--tokenizer FOLDER")
        import tokenizers

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one process already
        name = paths[0]
        try:
            self._engine = engine = self._load(tokenizers, *map(str, paths))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{name}: tokenizers cannot read it ({error}); copy it again") from error
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        engine.decoder = tokenizers.decoders.ByteLevel()
        ids, alphabet = (
            engine.get_vocab(with_added_tokens=True),
            tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        known = isinstance(engine.model, tokenizers.models.BPE) and ids.keys() >= set(alphabet)
        if not known or engine.decode(self._tokenize(_TRIAL)) != _TRIAL:
            raise UserError(f"{name}: no byte-level BPE that keeps every byte, as those of GPT-2 and Llama 3")
        size = max(ids.values()) + 1
        super().__init__([str(i) for i in range(size)], range(SPECIALS, size + SPECIALS))

    @staticmethod
    def _load(library: Any, *paths: str) -> Any:
        return library.Tokenizer.from_file(*paths)

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """(tokens,) the ids of all documents, each with eos."""
        found = self._engine.encode_batch_fast(list(documents), add_special_tokens=False)
        ids = (np.append(self._ids[text.ids], self.dtype.type(EOS)) for text in found)
        return np.concatenate([np.zeros(0, self.dtype), *ids])

    def _cut(self, text: str) -> list[str]:
        return [text]

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids


class HuggingFacePair(HuggingFace):
    """A vocab.json and a merges.txt, which have GPT-2's pattern."""

    files = ("vocab.json", "merges.txt")

    @staticmethod
    def _load(library: Any, *paths: str) -> Any:
        engine = library.Tokenizer(library.models.BPE.from_file(*paths))
        engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return engine
