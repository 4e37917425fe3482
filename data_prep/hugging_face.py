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

_SAVE = "from transformers import AutoTokenizer as A; A.from_pretrained({0!r}).save_pretrained({1!r})"
_LOADED_AS_IT_IS = ("", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a tokenizer.json as it is; "": none is named."""


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

    def token_ids(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text, without its end."""
        return self._tokenize(text)

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
        raise UserError(f"{problem}, only {MODEL}; {_save(folder, folder)}")
    raise UserError(f"{problem}; save them there by its save_pretrained")


def _save(folder: Path, out: Path) -> str:
    """The remedy that writes the tokenizer.json of a folder as transformers loads it."""
    code = _SAVE.format(str(folder), str(out))
    return f'run python -c "{code}"'


def check_as_transformers(folder: Path, encoder: HuggingFace) -> None:
    """Raise a UserError if transformers would give the tokenizer in `folder` other ids.

    Some of its classes take the vocabulary of tokenizer.json alone and split words in their own
    way. Checks nothing if the folder names no such class, or transformers is not installed or
    cannot load the folder.
    """
    settings = [_json_of(folder / name) for name in ("tokenizer_config.json", "config.json")]
    names = [str(record.get("tokenizer_class") or "") for record in settings]
    names.append(str(settings[1].get("model_type") or ""))
    if all(name in _LOADED_AS_IT_IS for name in names):
        return
    tokenizer = load_with_transformers(folder)
    if tokenizer is None:
        return
    added = []
    for token in tokenizer.added_tokens_decoder.values():
        if not token.special:
            added.append(f"a {token.content} b")
    for text in (*lossless.TRIALS, *added):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if ids != encoder.token_ids(text):
            files = " and ".join(encoder.files)
            problem = f"{type(tokenizer).__name__} of transformers gives other ids than {files}"
            remedy = f"{_save(folder, Path(f'{folder}_saved'))} and give --tokenizer {folder}_saved"
            raise UserError(f"--tokenizer {folder}: {problem}, as for {text[:20]!r}; {remedy}")


def load_with_transformers(folder: Path) -> Any:
    """The tokenizer of `folder` as transformers loads it; None: it cannot, or is not installed.

    No code of the folder runs.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        return None
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception:  # whatever the files in the folder lead to
        return None
    finally:
        logging.set_verbosity(verbosity)


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
