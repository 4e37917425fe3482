"""The tokenizer in a folder as transformers loads it: its chat template, and whether ids are equal.

Some classes of transformers take the vocabulary of tokenizer.json alone, and split words in their
own way.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from alma.errors import UserError, require_package
from data_prep import lossless
from data_prep.chat import BadChat, Chat
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


def read_chat(folder: Path) -> Chat:
    """The chat template of the tokenizer in a folder, as transformers loads it.

    UserError: it has none, or one for each of several uses; transformers is not installed, or
    cannot load the folder.
    """
    require_package("transformers", "--chat-template", "export")
    tokenizer = load(folder)
    if tokenizer is None:
        problem = "transformers cannot load its tokenizer"
        remedy = "copy the folder again, with its config.json"
        raise UserError(f"--chat-template: {folder}: {problem}; {remedy}")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        problem = "its tokenizer has no chat template"
        remedy = "write one to chat_template.jinja there, or leave out --chat-template"
        raise UserError(f"--chat-template: {folder}: {problem}; {remedy}")
    return Chat.of(template, tokenizer.special_tokens_map)


def check(folder: Path, encoder: HuggingFace, chat: Chat | None = None) -> None:
    """Raise a UserError if transformers gives other ids by the tokenizer in `folder`.

    chat: the template, by which special tokens are encoded as such; None: they are text. Checks
    nothing if transformers is not installed or cannot load the folder, or, but for chats, if the
    folder names no class of its own.
    """
    settings = [json_of(folder / name) for name in ("tokenizer_config.json", "config.json")]
    names = [str(record.get("tokenizer_class") or "") for record in settings]
    names.append(str(settings[1].get("model_type") or ""))
    if chat is None and all(name in _AS_IT_IS for name in names):
        return
    tokenizer = load(folder)
    if tokenizer is None:
        return
    of_chats = chat is not None
    for text in [*_texts(tokenizer, encoder, of_chats), *_rendered(chat)]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=not of_chats).input_ids
        if ids != encoder.token_ids(text, of_chats):
            files = " and ".join(encoder.files)
            problem = f"{type(tokenizer).__name__} of transformers gives other ids than {files}"
            saved = Path(f"{folder}_saved")
            remedy = f"run {save_command(folder, saved)} and give --tokenizer {saved}"
            raise UserError(f"--tokenizer {folder}: {problem}, as for {text[:20]!r}; {remedy}")


def _texts(tokenizer: Any, encoder: HuggingFace, of_chats: bool) -> list[str]:
    """The texts to compare: trials, and the added tokens that are not encoded as text."""
    texts = [*lossless.TRIALS]
    for token in tokenizer.added_tokens_decoder.values():
        # A class may add special tokens of its own, which no text has.
        is_token = token.content in encoder.ids if token.special else True
        if is_token and (of_chats or not token.special):
            texts.append(f"a {token.content} b{token.content}\nc")
    return texts


def _rendered(chat: Chat | None) -> list[str]:
    """A chat as its template writes it; empty if the template refuses it, or there is none."""
    if chat is None:
        return []
    user = {"role": "user", "content": lossless.TRIALS[0]}
    answer = {"role": "assistant", "content": lossless.TRIALS[1]}
    with suppress(BadChat):
        return [chat.text([user, answer])]
    return []
