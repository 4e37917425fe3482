"""The flags of `alma data` that say what is read: files, fields, and chat turns."""

import argparse
import glob
import itertools
import os
from pathlib import Path
from typing import Any

from alma.dates import Dates
from alma.errors import UserError, hint
from alma.stream import Stream
from data_prep import columns
from data_prep.arrow import open_arrow
from data_prep.as_transformers import read_chat
from data_prep.chat import Chat
from data_prep.documents import Reader, find_files
from data_prep.formats import kind, stem
from data_prep.given import noted, refuse


def named_path(argument: str) -> tuple[str, str]:
    """(source, path) of a CORPUS argument, which is NAME=PATH or PATH.

    It is a path if it exists, such as year=2021/part-0.parquet. UserError: it has no name or path.
    """
    name, equals, path = argument.partition("=")
    if not equals or "/" in name or any(glob.iglob(argument)):
        path = argument
        fixed = Path(path)
        if glob.has_magic(path) and not fixed.exists():
            # The last directory before the pattern.
            fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), fixed.parts))
        name = stem(Path(os.path.abspath(fixed)).name)
    if not name or not path:
        raise UserError(f"{argument!r}: expected PATH or NAME=PATH")
    return name, path


def named_files(corpus: list[str], split: str | None = None) -> list[tuple[str, str]]:
    """(source, path) of the files of the CORPUS arguments, each file once.

    `split`: that of --split. UserError: all arguments without files, and all files of two sources.
    """
    files: dict[str, tuple[str, str]] = {}
    problems: list[str] = []

    def add(argument: str) -> None:
        name, path = named_path(argument)
        for file in find_files(path, split):
            source, _ = files.setdefault(os.path.realpath(file), (name, file))
            if source != name:
                remedy = "name it in one CORPUS argument"
                raise UserError(f"{file}: is in both {source} and {name}; {remedy}")

    for argument in corpus:
        noted(problems, add, argument)
    refuse(problems)
    return list(files.values())


def input_of(
    problems: list[str], arguments: argparse.Namespace, stream: Stream | None, dates: Dates | None
) -> tuple[list[tuple[str, str]], Reader]:
    """The files, as (source, path), and how they are read; adds what is wrong to `problems`."""
    files = noted(problems, named_files, arguments.corpus, arguments.split)
    chat = noted(problems, _chat_of, arguments, stream, files)
    reader = noted(problems, _reader_of, arguments, dates, chat)
    if files and reader and bool(chat) == arguments.chat_template:
        noted(problems, _check_columns, files, reader)
    return files, reader


def _reader_of(arguments: argparse.Namespace, dates: Dates | None, chat: Chat | None) -> Reader:
    """The reader for the flags. UserError: --documents for an unknown source."""
    modes = dict(sorted(arguments.documents))
    default = modes.pop("", Reader.documents)
    for name in modes:
        require_source(arguments, f"--documents {name}=", name)
    return Reader(
        documents=default,
        max_document_words=arguments.max_document_words,
        documents_of=modes,
        text_key=arguments.text_key or ("messages" if chat else "text"),
        on_bad_input=arguments.on_bad_input,
        dates=dates,
        chat=chat,
    )


def _chat_of(
    arguments: argparse.Namespace, stream: Stream | None, files: list[tuple[str, str]]
) -> Chat | None:
    """The chat template of the tokenizer; None: documents are text.

    That of an addition is that of the stream. UserError: no template, or other flags or files that
    chats cannot have.
    """
    if not arguments.chat_template:
        return None
    if arguments.max_document_words:
        remedy = "leave one out: a chat is not cut"
        raise UserError(f"--chat-template, --max-document-words: {remedy}")
    for _, path in files or ():
        if kind(path) not in (".jsonl", ".json", *columns.SUFFIXES):
            problem = "has no field with chat turns, as .jsonl, .parquet and .arrow have"
            raise UserError(f"--chat-template: {path}: {problem}; leave it out")
    if stream:
        return Chat(**stream.settings["chat"])
    if arguments.tokenizer and not Path(arguments.tokenizer).exists():
        return None  # the flags of the tokenizer are refused for that
    if not arguments.tokenizer or not Path(arguments.tokenizer).is_dir():
        remedy = "give --tokenizer FOLDER, that of the model whose template it is"
        raise UserError(f"--chat-template: {remedy}")
    return read_chat(Path(arguments.tokenizer))


def _check_columns(files: list[tuple[str, str]], reader: Reader) -> None:
    """Raise a UserError if the first file of a source lacks the columns of text and date."""
    if reader.on_bad_input == "skip":
        return
    needs_date = reader.dates is not None and reader.dates.undated == "error"
    firsts: dict[str, str] = {}
    for source, path in files:
        if path.endswith(columns.SUFFIXES):
            firsts.setdefault(source, path)
    for path in firsts.values():
        schema = _schema_of(path)
        if schema is not None:
            problem = columns.problem_of(schema, reader.keys, needs_date)
            if problem:
                raise UserError(f"{path}: {problem}")


def _schema_of(path: str) -> Any:
    """The schema of a Parquet or Arrow file; None: damaged, which is reported as it is read."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.endswith(".parquet"):
            return pyarrow.parquet.read_schema(path)
        with open_arrow(path) as file:
            return file.schema
    except (OSError, pyarrow.ArrowException):
        return None


def require_source(arguments: argparse.Namespace, flag: str, name: str) -> None:
    """Raise a UserError if no CORPUS argument has this name."""
    names = sorted({name for name, _ in map(named_path, arguments.corpus)})
    if name not in names:
        raise UserError(f"{flag}: no such source; {hint(name, names)}")
