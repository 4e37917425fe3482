"""The tokenizer of an existing model: the byte-level BPE of a Hugging Face folder."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alma.errors import UserError, require_package
from data_prep.dictionary import SPECIALS
from data_prep.tokenizer import END, Encoder

_SPACES = " \n"  # all white space that normalised text has
# Patterns that look at nothing before a token, in which a space only begins one and a line break only ends
# one: the tokens of a text are then those of its words. Of GPT-2 (as in data_prep.gpt2), Llama 3 and Qwen 2.
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_WORD = ("", rf"{_CASES}\p{{N}}{{1,3}}{_REST}", rf"{_CASES}\p{{N}}{_REST}")
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
        state, ids = json.loads(engine.to_str()), engine.get_vocab(with_added_tokens=True)
        bytes_ = ids.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        if not bytes_ or state["model"]["type"] != "BPE" or engine.decode(self._tokenize(_TRIAL)) != _TRIAL:
            raise UserError(f"{name}: no byte-level BPE that keeps every byte, as those of GPT-2 and Llama 3")
        size = max(ids.values()) + 1
        super().__init__([str(i) for i in range(size)], range(SPECIALS, size + SPECIALS))
        self._by_word = _pattern(state) in _BY_WORD

    @staticmethod
    def _load(library: Any, *paths: str) -> Any:
        return library.Tokenizer.from_file(*paths)

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """(tokens,) the ids of all documents, each with eos."""
        return self._ids_of([word for text in documents for word in (*self._cut(text), END)])

    def _cut(self, text: str) -> list[str]:
        return text.replace(" ", "\t ").replace("\n", "\n\t").split("\t") if self._by_word else [text]

    def _encode_words(self, words: list[str]) -> list[bytes]:
        found = self._engine.encode_batch_fast(words, add_special_tokens=False)
        return [self._ids[word.ids].tobytes() for word in found]

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


def _pattern(state: dict[str, Any]) -> str | None:
    """The pattern of a tokenizer.json; "": GPT-2's; None: cutting at white space may change its ids."""
    added = [token for token in state["added_tokens"] if not token["special"]]
    if any(token["lstrip"] or token["rstrip"] or set(token["content"]) & set(_SPACES) for token in added):
        return None
    if (state["normalizer"] or {"type": "NFC"})["type"] != "NFC":  # which composes nothing with white space
        return None
    match state["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return ""
        case {
            "pretokenizers": [
                {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]
        }:
            return pattern
    return None
