"""Byte-level BPE encoders: GPT-2 with fairseq's ids, and the tokenizer of a Hugging Face folder."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import regex

from alma.errors import UserError, require_package
from alma.schema import parse_json, require
from alma.stream import SPECIALS
from data_prep.dictionary import EOS
from data_prep.tokenizer import END, Encoder

_TRIAL = "It's  1234 A1\u00e9: \u6f22\u5b57\n\U0001f600 <|x|>\u200b\n"
# The pattern of OpenAI and fairseq. Only the first character of a match can be a space, so no token
# crosses two words: the pattern's white space is that of str.split, and normalised text keeps
# single spaces only.
_TOKENS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


class GPT2(Encoder):
    """GPT-2's tokenizer, with the ids of fairseq's dict.txt for GPT-2.

    That dictionary spells GPT-2's token i as the number i; its fairseq id is i + 4.
    """

    files = ("encoder.json", "vocab.bpe")

    def __init__(self, encoder_json: str | Path, vocab_bpe: str | Path) -> None:
        """Load encoder.json, {token: id}, and vocab.bpe, which has a merge of two tokens per line.

        The first line of vocab.bpe is its version. Raises UserError if a file is damaged or not in
        GPT-2's format, or if the two belong to different vocabularies.
        """
        require_package("tokenizers", "--bpe gpt2")
        from tokenizers import Tokenizer, models, pre_tokenizers

        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ids = _read_ids(encoder_json, set(byte_level.alphabet()))
        merges = _read_merges(vocab_bpe, ids)
        self._engine = Tokenizer(models.BPE(ids, merges, cache_capacity=0))
        self._engine.pre_tokenizer = byte_level
        tokens = [str(i) for i in range(len(ids))]
        super().__init__(tokens, range(SPECIALS, len(ids) + SPECIALS))

    def _cut(self, text: str) -> list[str]:
        # A word keeps the space before it. Line breaks are first replaced by END, so that "\n" is
        # free to mark the cuts.
        marked = text.replace("\n", END).replace(" ", "\n ").replace(END, f"\n{END}\n")
        return marked.split("\n")

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(_TOKENS.findall(text), is_pretokenized=True).ids


def _read_ids(path: str | Path, alphabet: set[str]) -> dict[str, int]:
    """The ids of an encoder.json. UserError: not JSON, or without ids from 0 on or all bytes."""
    try:
        ids = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); copy encoder.json again") from error
    is_table = isinstance(ids, dict) and all(type(i) is int for i in ids.values())
    if is_table and sorted(ids.values()) == [*range(len(ids))] and ids.keys() >= alphabet:
        return ids
    raise UserError(f"{path}: not GPT-2's encoder.json: all bytes and more, ids from 0 on")


def _read_merges(path: str | Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a vocab.bpe. UserError: another format, or not of the tokens in `ids`."""
    try:
        first, *lines, last = Path(path).read_text("utf-8").split("\n")
    except ValueError as error:
        problem = "not GPT-2's vocab.bpe, not lines of text; copy it"
        raise UserError(f"{path}: {problem}") from error
    # Without the version line or the final newline, fairseq would silently drop a merge.
    if not first.startswith("#version") or last:
        problem = "does not begin with a line #version or not end with a newline"
        raise UserError(f"{path}: {problem}; copy it again")
    merges = []
    for number, line in enumerate(lines, 2):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            problem = f"{line!r} does not merge two tokens of encoder.json"
            raise UserError(f"{path}:{number}: {problem}; give the two files of one vocabulary")
        merges.append((left, right))
    return merges


class HuggingFace(Encoder):
    """The tokenizer in a tokenizer.json. A document with its line breaks is one item, ended by eos.

    dict.txt spells the token i of the original model as the number i; its fairseq id is i + 4.
    fairseq's eos (id 2) replaces the original end of text, `eos_token_id` of config.json. So if a
    model is trained on the stream, row i + 4 of its embeddings corresponds to row i of the original
    model, row 2 to row `eos_token_id`, and rows 0, 1 and 3 are never used. dict.txt has only the
    tokenizer's ids, though the original table may have more rows. If a text spells a special token,
    it is encoded as plain text, so that no text can end a document.
    """

    files: ClassVar[tuple[str, ...]] = ("tokenizer.json",)
    companions: ClassVar[tuple[str, ...]] = (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    )
    """Files beside them that the stream keeps, if they are there, for `alma export`."""

    def __init__(self, *paths: str | Path) -> None:
        """Load the files. UserError: damaged, no byte-level BPE, or tokenizers is not installed."""
        require_package("tokenizers", "--tokenizer FOLDER")
        import tokenizers

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes are the parallelism
        name = paths[0]
        try:
            if len(paths) == 1:
                engine = tokenizers.Tokenizer.from_file(str(name))
            else:
                engine = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*map(str, paths)))
                engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{name}: tokenizers cannot read it ({error}); copy it again"
            ) from error
        self._engine = engine
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        engine.decoder = tokenizers.decoders.ByteLevel()
        ids = engine.get_vocab(with_added_tokens=True)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        is_bpe = isinstance(engine.model, tokenizers.models.BPE)
        has_bytes = ids.keys() >= set(alphabet)
        if not is_bpe or not has_bytes or engine.decode(self._tokenize(_TRIAL)) != _TRIAL:
            problem = "no byte-level BPE that keeps every byte, as those of GPT-2 and Llama 3"
            raise UserError(f"{name}: {problem}")
        self.ids = ids
        size = max(ids.values()) + 1
        super().__init__([str(i) for i in range(size)], range(SPECIALS, size + SPECIALS))

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """(tokens,) the ids of all documents, each with eos."""
        encodings = self._engine.encode_batch_fast(list(documents), add_special_tokens=False)
        pieces = [np.zeros(0, self.dtype)]
        for encoding in encodings:
            pieces.append(np.append(self._ids[encoding.ids], self.dtype.type(EOS)))
        return np.concatenate(pieces)

    def _cut(self, text: str) -> list[str]:
        return [text]

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids


class HuggingFacePair(HuggingFace):
    """The tokenizer in a vocab.json and a merges.txt, which splits words by GPT-2's pattern."""

    files = ("vocab.json", "merges.txt")


def end_of_text(folder: Path, ids: Mapping[str, int]) -> int:
    """The id that ends a text, of the tokenizer in the folder of a model, with these `ids`.

    It is that of `eos_token` in tokenizer_config.json or special_tokens_map.json, else
    `eos_token_id` in config.json or generation_config.json, the first one of several. UserError:
    none of them names it, or the tokenizer has no such token.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json_of(folder / name).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if token not in ids:
            problem = f"eos_token {token!r} is no token of the tokenizer"
            raise UserError(f"{folder / name}: {problem}; save both by its save_pretrained")
        return ids[token]
    for name in ("config.json", "generation_config.json"):
        number = _json_of(folder / name).get("eos_token_id")
        if isinstance(number, list) and number:
            number = number[0]
        if number is None:
            continue
        if not isinstance(number, int) or number not in ids.values():
            problem = f"eos_token_id {number} is no id of the tokenizer"
            raise UserError(f"{folder / name}: {problem}; save both by its save_pretrained")
        return number
    problem = "no file names the token that ends a text"
    remedy = 'write {"eos_token": "..."} into tokenizer_config.json'
    raise UserError(f"--tokenizer {folder}: {problem}; {remedy}")


def _json_of(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file. UserError: damaged."""
    if not path.is_file():
        return {}
    try:
        record = parse_json(path.read_bytes())
        require(record, {})
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); copy it again") from None
    return record
