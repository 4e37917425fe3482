"""The ids of a Hugging Face folder are those of the library tokenizers,
and give back every document."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import DTYPES, Stream, read_index
from data_prep import contamination
from data_prep.documents import normalise
from data_prep.hugging_face import HuggingFace, HuggingFacePair, end_of_text
from data_prep.similarity import open_part
from data_prep.words import read_spelling

tokenizers = pytest.importorskip("tokenizers")

from .tokenizer_folders import (  # noqa: E402
    LINES,
    LLAMA_3,
    byte_level,
    changed,
    sentencepiece_like,
    unigram,
)

PATTERNS = ["", LLAMA_3, LLAMA_3.replace("{1,3}", ""), LLAMA_3.replace(r"[\r\n]*", r"[\r\n/]*")]
"""Of GPT-2, Llama 3, Qwen 2, and as of o200k, where a line break ends no token."""


def save(path, pattern="", form=None, **changes):
    """A tokenizer.json of 400 tokens with a pattern; `changes`: of its JSON."""
    state = json.loads(changed(byte_level(pattern), normalizer=form))
    for name, change in changes.items():
        state[name] = change(state[name])
    path.write_text(json.dumps(state), "utf-8")
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Our encoder and the library's, of each pattern; that of Qwen with NFC."""
    folder = tmp_path_factory.mktemp("tokenizers")
    folders = []
    for number, pattern in enumerate(PATTERNS):
        form = {"type": "NFC"} if number == 2 else None
        path = save(folder / f"{number}.json", pattern, form)
        library = tokenizers.Tokenizer.from_file(str(path))
        library.encode_special_tokens = True
        folders.append((HuggingFace(path), library))
    return folders


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.text(
            st.sampled_from("abST 'ls1 2\n\n/.,;\u00e9\u0301\u6f22\u200b\U0001f600<|>")
            | st.characters(codec="utf-8")
        ),
        max_size=3,
    )
)
def test_ids_are_the_librarys(pairs, texts):
    documents = [text for text in map(normalise, [*texts, LINES]) if text]
    for encoder, library in pairs:
        tokens = encoder.encode(documents)
        ids = [library.encode(text, add_special_tokens=False).ids for text in documents]
        expected = []
        for line in ids:
            expected += [*(i + 4 for i in line), 2]
        assert tokens.tolist() == expected
        if encoder is not pairs[2][0]:  # NFC changes text
            assert [library.decode(line, skip_special_tokens=False) for line in ids] == documents


def test_a_token_may_have_a_space(tmp_path):
    space = {"id": 400, "content": "a b", "single_word": False, "lstrip": False, "rstrip": False}
    space |= {"normalized": False, "special": False}
    path = save(tmp_path / "t.json", added_tokens=lambda tokens: [*tokens, space])
    encoder = HuggingFace(path)
    assert encoder.encode(["xa bx"]).tolist().count(404) == 1
    assert encoder.dictionary_size == 405


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-like", "unigram"])
def test_the_stream_has_a_document_as_one_item(corpus, prepare, tmp_path, kind):
    folder = tmp_path / "model"
    folder.mkdir()
    states = {
        "byte-level": byte_level(LLAMA_3),
        "sentencepiece-like": sentencepiece_like(),
        "unigram": unigram(),
    }
    (folder / "tokenizer.json").write_text(states[kind], "utf-8")
    end, end_token = ("<|end|>", 0) if kind == "byte-level" else ("</s>", 2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    flags = {"vocab_size": None, "tokenizer": str(folder), "write": "megatron"}
    out = prepare(corpus, out=tmp_path / "out", **flags)
    stream = Stream.load(out)
    stream.check(stream.parts)
    assert stream.end_token == end_token  # an id as any other
    assert "tokenizer_config.json" in stream.files
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    dictionary = (out / "dict.txt").read_text().split("\n")
    ids, ends = open_part(stream.path(stream.test))
    assert len(ends) == stream.test.documents == stream.test.items
    assert (np.flatnonzero(ids == 2) + 1).tolist() == ends.tolist()
    sizes, code = read_index(f"{stream.path(stream.test)}.idx")
    assert np.cumsum(sizes).tolist() == ends.tolist()
    assert DTYPES[code] == ids.dtype
    megatron = (out / "test.megatron.idx").read_bytes()
    assert struct.unpack_from("<QQ", megatron, 18) == (len(ends), len(ends) + 1)
    assert np.cumsum(np.frombuffer(megatron, "<i4", len(ends), 34)).tolist() == ends.tolist()
    spelt = []
    for part in np.split(ids, ends[:-1]):
        spelt.append([int(dictionary[i - 4].split()[0]) for i in part[:-1]])
    texts = [library.decode(ids) for ids in spelt]
    assert sum(len(text.encode()) + 1 for text in texts) == stream.test.bytes
    assert sum(len(text.split()) for text in texts) == stream.test.words
    assert any("\n" in text for text in texts)
    grams, _ = contamination.held_out(
        stream.path(stream.test), read_spelling(stream), contamination.SAMPLE
    )
    whole = [max(len(text.split()) - contamination.N + 1, 0) for text in texts]
    assert len(grams) == sum(whole)


def test_a_pair_of_files_has_the_ids_of_gpt2(pairs, tmp_path):
    model = json.loads(pairs[0][1].to_str())["model"]
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    files[0].write_text(json.dumps(model["vocab"]), "utf-8")
    files[1].write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]), "utf-8"
    )
    assert (
        HuggingFacePair(*files).encode([normalise(LINES)]).tolist()
        == pairs[0][0].encode([normalise(LINES)]).tolist()
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("normalizer", lambda _: {"type": "Lowercase"}, 'normalizer Lowercase turns "It'),
        ("normalizer", lambda _: {"type": "NFKC"}, "normalizer NFKC turns"),
        ("normalizer", lambda _: {"type": "StripAccents"}, "normalizer StripAccents turns"),
        ("pre_tokenizer", lambda _: {"type": "Whitespace"}, "byte_fallback false has no tokens"),
        (
            "pre_tokenizer",
            lambda step: {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, step]},
            "pre_tokenizer Whitespace turns",
        ),
        (
            "pre_tokenizer",
            lambda step: step | {"add_prefix_space": True},
            "pre_tokenizer ByteLevel with add_prefix_space true turns",
        ),
        ("pre_tokenizer", lambda _: None, "byte_fallback false has no tokens"),
        (
            "model",
            lambda model: {"type": "WordLevel", "vocab": model["vocab"], "unk_token": "a"},
            "model WordLevel has no tokens for unknown words",
        ),
        ("model", lambda model: model | {"dropout": 0.5}, "dropout 0.5 gives a text other ids"),
        (
            "model",
            lambda model: model | {"vocab": {"a": 0, "<|end|>": 1}, "merges": []},
            "vocab lacks 255 of the 256 bytes",
        ),
        ("model", lambda model: model | {"vocab": {}}, "cannot read it"),
    ],
)
def test_what_loses_text_is_refused_by_its_setting(tmp_path, name, change, message):
    path = save(tmp_path / "tokenizer.json", **{name: change})
    with pytest.raises(UserError, match=message):
        HuggingFace(path)


def test_a_folder_without_a_tokenizer_is_refused(corpus, prepare, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare(corpus, out=tmp_path / "out", vocab_size=None, tokenizer=str(tmp_path))
    assert "no tokenizer.json, nor vocab.json and merges.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": '{"eos_token": "a"}', "config.json": '{"eos_token_id": 3}'}, 5),
        ({"special_tokens_map.json": '{"eos_token": {"content": "a"}}'}, 5),
        ({"tokenizer_config.json": '{"eos_token": null}', "config.json": '{"eos_token_id": 0}'}, 0),
        ({"generation_config.json": '{"eos_token_id": [5, 0]}'}, 5),
        ({"tokenizer_config.json": '{"eos_token": "b"}'}, "eos_token 'b' is no token"),
        ({"config.json": '{"eos_token_id": 7}'}, "eos_token_id 7 is no id"),
        ({"config.json": "[]"}, "damaged"),
        ({}, "no file names the token that ends a text; write"),
    ],
)
def test_the_end_of_text_is_the_tokenizers(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ids = {"<|end|>": 0, "a": 5}
    if isinstance(expected, int):
        assert end_of_text(tmp_path, ids) == expected
    else:
        with pytest.raises(UserError, match=expected):
            end_of_text(tmp_path, ids)
