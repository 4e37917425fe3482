"""Flags that a command line of `alma data` gives, and the tokenizer among them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alma.errors import UserError
from data_prep import as_transformers, hugging_face
from data_prep.byte_level import GPT2
from data_prep.chat import Chat
from data_prep.encode import open_encoder
from data_prep.hugging_face import HuggingFace, end_of_text
from data_prep.tokenizer import SentencePiece

GPT2_FILES = ("--gpt2-encoder-json", "--gpt2-vocab-bpe")


def given(arguments: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """The flags among `flags` that were given, with their values."""
    values = {flag: vars(arguments)[flag[2:].replace("-", "_")] for flag in flags}
    return {
        flag: value for flag, value in values.items() if value is not None and value is not False
    }


def refuse(problems: list[str]) -> None:
    """If there are problems, raise one UserError that lists each of them once."""
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))


def noted(problems: list[str], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function and return its result; a UserError is added to `problems` instead."""
    try:
        return function(*arguments)
    except UserError as error:
        problems.append(str(error))


def tokenizer_files(arguments: argparse.Namespace) -> dict[str, str]:
    """`StreamSettings.tokenizer`. UserError: a missing file, or an incomplete set of flags."""
    if arguments.tokenizer:
        folder = Path(arguments.tokenizer)
        if folder.is_dir():
            return _hugging_face_files(arguments, folder)
    paths = given(arguments, "--tokenizer", *GPT2_FILES)
    problems = [
        f"{flag} {path}: no such file" for flag, path in paths.items() if not Path(path).is_file()
    ]
    needs_gpt2_files = bool(arguments.bpe)
    if any((flag in paths) != needs_gpt2_files for flag in GPT2_FILES):
        flags = f"--bpe gpt2, {' FILE and '.join(GPT2_FILES)} FILE"
        problems.append(f"{flags} go together: all three or none")
    refuse(problems)
    if not paths:
        return {}
    names = GPT2.files if arguments.bpe else SentencePiece.files
    return dict(zip(names, paths.values(), strict=True))


def end_token_of(
    arguments: argparse.Namespace, tokenizer: dict[str, str], chat: Chat | None
) -> int | None:
    """The id that ends a text, of a tokenizer from the folder of a model; None: of another.

    UserError: no file names it, the tokenizer loses text, or transformers gives other ids.
    """
    if not arguments.tokenizer or not Path(arguments.tokenizer).is_dir():
        return None
    encoder = open_encoder(tokenizer)
    assert isinstance(encoder, HuggingFace)
    folder = Path(arguments.tokenizer)
    end_token = end_of_text(folder, encoder.ids)
    as_transformers.check(folder, encoder, chat)
    return end_token


def _hugging_face_files(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The files of a tokenizer in a folder. UserError: missing, or other flags beside it."""
    if given(arguments, *GPT2_FILES):
        raise UserError(f"{', '.join(GPT2_FILES)}: only with --bpe gpt2; leave them out")
    return hugging_face.tokenizer_files(folder)
