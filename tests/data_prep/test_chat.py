"""Documents with chat turns have the ids of transformers' apply_chat_template."""

import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from alma.errors import UserError
from alma.stream import SPECIALS, Stream
from data_prep.as_transformers import check, read_chat
from data_prep.chat import BadChat, Chat
from data_prep.hugging_face import HuggingFace
from data_prep.similarity import open_part

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from .conftest import make_documents  # noqa: E402
from .tokenizer_folders import folders  # noqa: E402

CHATML = (
    "{#- as most templates,\n\ton several lines -#}"
    "{% for message in messages %}{{ '<|end|>' + message['role'] + '\\n' + message['content']"
    " + '<|end|>' + '\\n' }}{% endfor %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"
)
TEMPLATES = {"qwen2": CHATML, "llama3": CHATML, "mistral": INST, "gemma": INST, "unigram": INST}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with chat templates, some in their own file."""
    folder_of = folders(tmp_path_factory.mktemp("models"))
    for number, (name, template) in enumerate(TEMPLATES.items()):
        folder = folder_of[name]
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["bos_token"] = "<|end|>" if template == CHATML else "<s>"
        if number % 2:
            (folder / "chat_template.jinja").write_text(template)
        else:
            settings["chat_template"] = template
        path.write_text(json.dumps(settings))
    return folder_of


def chats(number):
    """Turns with indented code, blank lines, and texts that spell special tokens."""
    rng = random.Random(number)
    texts = make_documents(3, 2 * number, longest=3)
    rows = []
    for place in range(number):
        answer = rng.choice(
            ["def f(x):\n    return x\n\n", "<|end|> </s>", "\u6f22 \U0001f600", ""]
        )
        turns = [{"role": "user", "content": texts[2 * place]}]
        turns.append({"role": "assistant", "content": texts[2 * place + 1] + answer})
        rows.append(turns * rng.randint(1, 2))
    return rows


def of_share_gpt(turns):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


def documents_of(stream, part):
    """The tokenizer's ids of each document, as trainers read them."""
    ids, ends = open_part(stream.path(part))
    of_model = np.where(ids == 2, stream.end_token, ids.astype(np.int64) - SPECIALS)
    return [document.tolist() for document in np.split(of_model, ends[:-1])]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_ids_are_those_of_apply_chat_template(models, prepare, tmp_path, kind):
    rows = chats(120)
    if kind in ("qwen2", "gemma"):
        path = tmp_path / "chats.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), path)
        flags = {}
    else:
        path = tmp_path / "chats.jsonl"
        lines = [json.dumps({"conversations": of_share_gpt(turns)}) for turns in rows]
        path.write_text("\n".join(lines))
        flags = {"text_key": "conversations"}
    out = tmp_path / "out"
    flags |= {"words": 800, "valid_words": 100, "eval_words": 800, "vocab_size": None}
    prepare(path, "--chat-template", out=out, mega_batches=1, tokenizer=models[kind], **flags)
    stream = Stream.load(out)
    stream.check(stream.parts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[kind])
    expected = set()
    for turns in rows:
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        assert isinstance(ids[0], int)
        if ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        expected.add(tuple(ids))
    number = 0
    for part in (stream.test, stream.valid, *stream.megabatches):
        documents = documents_of(stream, part)
        assert len(documents) == part.documents == part.items
        assert {tuple(ids) for ids in documents} <= expected
        number += len(documents)
    assert number > 30
    assert json.loads(stream.settings["chat"]["template"]) == TEMPLATES[kind]


def test_an_addition_keeps_the_template(models, prepare, tmp_path):
    for name, rows in (("old", chats(60)), ("new", chats(90)[60:])):
        lines = [json.dumps({"messages": turns}) for turns in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    flags = {"words": 300, "valid_words": 100, "eval_words": 100, "vocab_size": None}
    prepare(
        tmp_path / "old.jsonl", "--chat-template", "--near-duplicates=drop", out=out,
        mega_batches=1, tokenizer=models["qwen2"], **flags,
    )  # fmt: skip
    none = dict.fromkeys(("mega_batches", "words", "valid_words", "vocab_size"))
    prepare(tmp_path / "new.jsonl", "--append", out=out, **none)
    stream = Stream.load(out)
    assert len(stream.megabatches) == 2
    assert stream.appended[0]["chat"] == stream.settings["chat"]
    assert all(ids[-1] == stream.end_token for ids in documents_of(stream, stream.megabatches[1]))


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("llama2", ["--chat-template"], "its tokenizer has no chat template; write one to chat_"),
        ("", ["--chat-template", "--vocab-size=100"], "--chat-template: give --tokenizer FOLDER"),
        ("qwen2", ["--chat-template", "--max-document-words=9"], "leave one out: a chat is not"),
        ("qwen2", ["--chat-template", "--text-key=chat"], "no list of chat turns .--text-key"),
    ],
)
def test_what_is_missing_is_named(models, prepare, tmp_path, capsys, kind, words, message):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns}) for turns in chats(30)))
    tokenizer = models[kind] if kind else None
    with pytest.raises(SystemExit, match="2"):
        prepare(path, *words, out=tmp_path / "out", tokenizer=tokenizer, vocab_size=None)
    error = capsys.readouterr().err
    assert message.replace(".--", "(--") in error
    assert error.count("error:") == 1


def test_text_files_have_no_turns(models, prepare, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    columns = pyarrow.table({"chat": ["a"], "id": [1]})
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    problems = {
        "a.txt": "a.txt: has no field with chat turns",
        "a.parquet": "no column `messages`; the columns are `chat`, `id`",
    }
    for name, problem in problems.items():
        flags = {"tokenizer": models["qwen2"], "vocab_size": None}
        with pytest.raises(SystemExit, match="2"):
            prepare(tmp_path / name, "--chat-template", out=tmp_path / "out", **flags)
        assert problem in capsys.readouterr().err


def test_chats_of_a_class_that_adds_marks_are_refused(models):
    """LlamaTokenizer of transformers adds no mark after a special token, tokenizer.json does."""
    encoder = HuggingFace(models["llama2"] / "tokenizer.json")
    check(models["llama2"], encoder)
    with pytest.raises(UserError, match="LlamaTokenizer of transformers gives other ids"):
        check(models["llama2"], encoder, Chat.of(INST, {}))


def test_the_template_knows_no_day(models):
    """A stream must not depend on the day on which it is folder_of."""
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}never{% endif %}"
    assert Chat.of(dated, {}).text([{"role": "user", "content": ""}]) == "never"
    with pytest.raises(BadChat, match="'date_of_today' is undefined"):
        Chat.of("{{ strftime_now('%d') }}", {}).text([{"role": "user", "content": ""}])
    assert read_chat(models["qwen2"]).tokens["bos_token"] == "<|end|>"


def test_an_absent_key_of_a_column_is_no_key():
    """Parquet and Arrow give null for it, which transformers leaves out."""
    template = "{% for turn in messages %}{{ turn.role }}{{ turn.tools is defined }}{% endfor %}"
    turns = [{"role": "user", "content": "", "tools": None}, {"role": "assistant", "tools": "x"}]
    assert Chat.of(template, {}).text(turns) == "userFalseassistantTrue"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "no list of chat turns"),
        ("text", "no list of chat turns"),
        ([1], "a turn that is no object"),
        ([{"from": ["a"], "value": "x"}], "a turn without role and content"),
        ([{"role": "tool", "content": "x"}], "refuses the turns .Only user and assistant"),
    ],
)
def test_bad_turns_are_named(turns, message):
    with pytest.raises(BadChat, match=message):
        Chat.of(INST, {"bos_token": "<s>", "eos_token": "</s>"}).text(turns)
