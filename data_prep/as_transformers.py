"""Whether a folder's tokenizer has the ids that transformers gives.

Some classes of transformers take the vocabulary of tokenizer.json alone, and split words in their
own way.
"""

from pathlib import Path
from typing import Any

from alma.errors import UserError
from data_prep import lossless
from data_prep.hugging_face import HuggingFace, json_of, save_command

_AS_IT_IS = ("", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a tokenizer.json as it is; "": none is named."""


def load(folder: Path) -> Any:
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


def check(folder: Path, encoder: HuggingFace, of_chats: bool = False) -> None:
    """Raise a UserError if transformers gives other ids by the tokenizer in `folder`.

    of_chats: whether special tokens are encoded as such. Checks nothing if transformers is not
    installed or cannot load the folder, or, but for chats, if the folder names no class of its own.
    """
    settings = [json_of(folder / name) for name in ("tokenizer_config.json", "config.json")]
    names = [str(record.get("tokenizer_class") or "") for record in settings]
    names.append(str(settings[1].get("model_type") or ""))
    if not of_chats and all(name in _AS_IT_IS for name in names):
        return
    tokenizer = load(folder)
    if tokenizer is None:
        return
    texts = [*lossless.TRIALS]
    for token in tokenizer.added_tokens_decoder.values():
        if of_chats or not token.special:
            texts.append(f"a {token.content} b{token.content}\nc")
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=not of_chats).input_ids
        if ids != encoder.token_ids(text, of_chats):
            files = " and ".join(encoder.files)
            problem = f"{type(tokenizer).__name__} of transformers gives other ids than {files}"
            saved = Path(f"{folder}_saved")
            remedy = f"run {save_command(folder, saved)} and give --tokenizer {saved}"
            raise UserError(f"--tokenizer {folder}: {problem}, as for {text[:20]!r}; {remedy}")
