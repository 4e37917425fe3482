"""The tokenizer in the folder of a model of Hugging Face: byte-level, or as SentencePiece's."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alma.errors import UserError, require_package
from alma.schema import parse_json, require
from alma.stream import SPECIALS
from data_prep import lossless
from data_prep.dictionary import EOS
from data_prep.tokenizer import MODEL, Encoder

_SAVE = (
    "from transformers import AutoTokenizer as A; A.from_pretrained({0!r}).save_pretrained({1!r})"
)


class HuggingFace(Encoder):
    """The tokenizer in a tokenizer.json. A document with its line breaks is one item, ended by eos.

    dict.txt spells the token i of the original model as the number i; its fairseq id is i + 4.
    fairseq's eos (id 2) replaces the original end of text, `eos_token_id` of config.json. So if a
    model is trained on the stream, row i + 4 of its embeddings corresponds to row i of the original
    model, row 2 to row `eos_token_id`, and rows 0, 1 and 3 are never used. dict.txt has only the
    tokenizer's ids, though the original table may have more rows. If a text spells a special token,
    it is encoded as plain text, so that no text can end a document; but the library's Unigram
    models take the spelling for the token.
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
        """Load the files. UserError: damaged, loses text, or tokenizers is not installed."""
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
        if lossless.is_byte_level(engine):
            engine.decoder = tokenizers.decoders.ByteLevel()
        lossless.check(name, engine)
        self.ids = engine.get_vocab(with_added_tokens=True)
        size = max(self.ids.values()) + 1
        super().__init__([str(i) for i in range(size)], range(SPECIALS, size + SPECIALS))

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """(tokens,) the ids of all documents, each with eos."""
        encodings = self._engine.encode_batch_fast(list(documents), add_special_tokens=False)
        pieces = [np.zeros(0, self.dtype)]
        for encoding in encodings:
            pieces.append(np.append(self._ids[encoding.ids], self.dtype.type(EOS)))
        return np.concatenate(pieces)

    def chat_items(self, chats: Iterable[str], end_token: int) -> tuple[np.ndarray, np.ndarray]:
        """As `items`, for chats, whose special tokens are encoded as such.

        The id `end_token` of the tokenizer, which ends a text, becomes eos within a chat, too. The
        end of a text follows a chat that does not end with it.
        """
        self._engine.encode_special_tokens = False
        try:
            encodings = self._engine.encode_batch_fast(list(chats), add_special_tokens=False)
        finally:
            self._engine.encode_special_tokens = True
        end = self.dtype.type(EOS)
        pieces = [np.zeros(0, self.dtype)]
        for encoding in encodings:
            ids = self._ids[encoding.ids]
            ids[ids == self._ids[end_token]] = end
            if not len(ids) or ids[-1] != end:
                ids = np.append(ids, end)
            pieces.append(ids)
        sizes = np.array([len(piece) for piece in pieces[1:]], np.int32)
        return np.concatenate(pieces), sizes

    def token_ids(self, text: str, special: bool = False) -> list[int]:
        """The tokenizer's own ids of a text, without its end.

        special: whether a text that spells a special token is encoded as that token.
        """
        self._engine.encode_special_tokens = not special
        try:
            return self._tokenize(text)
        finally:
            self._engine.encode_special_tokens = True

    def decode(self, ids: list[int]) -> str:
        """The text of the tokenizer's own ids."""
        return self._engine.decode(ids, skip_special_tokens=False)

    def _cut(self, text: str) -> list[str]:
        return [text]

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids


class HuggingFacePair(HuggingFace):
    """The tokenizer in a vocab.json and a merges.txt, which splits words by GPT-2's pattern."""

    files = ("vocab.json", "merges.txt")


def tokenizer_files(folder: Path) -> dict[str, str]:
    """The paths of the files of the tokenizer in a folder, by name. UserError: it has none."""
    for kind in (HuggingFace, HuggingFacePair):
        if all((folder / name).is_file() for name in kind.files):
            beside = [name for name in kind.companions if (folder / name).is_file()]
            return {name: str(folder / name) for name in (*kind.files, *beside)}
    problem = f"--tokenizer {folder}: no tokenizer.json, nor vocab.json and merges.txt"
    if (folder / MODEL).is_file():
        raise UserError(f"{problem}, only {MODEL}; run {save_command(folder, folder)}")
    raise UserError(f"{problem}; save them there by its save_pretrained")


def save_command(folder: Path, out: Path) -> str:
    """The command that writes the tokenizer.json of a folder as transformers loads it."""
    code = _SAVE.format(str(folder), str(out))
    return f'python -c "{code}"'


def end_of_text(folder: Path, ids: Mapping[str, int]) -> int:
    """The id that ends a text, of the tokenizer in the folder of a model, with these `ids`.

    It is that of `eos_token` in tokenizer_config.json or special_tokens_map.json, else
    `eos_token_id` in config.json or generation_config.json, the first one of several. UserError:
    none of them names it, or the tokenizer has no such token.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = json_of(folder / name).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if token not in ids:
            problem = f"eos_token {token!r} is no token of the tokenizer"
            raise UserError(f"{folder / name}: {problem}; save both by its save_pretrained")
        return ids[token]
    for name in ("config.json", "generation_config.json"):
        number = json_of(folder / name).get("eos_token_id")
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


def json_of(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file. UserError: damaged."""
    if not path.is_file():
        return {}
    try:
        record = parse_json(path.read_bytes())
        require(record, {})
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); copy it again") from None
    return record
