"""The ids of a Hugging Face folder are those of transformers for every document."""

import json
import shlex
import subprocess
import sys

import pytest
import sentencepiece

from alma.errors import UserError
from data_prep.as_transformers import check
from data_prep.documents import normalise
from data_prep.hugging_face import HuggingFace, tokenizer_files

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from .conftest import make_documents  # noqa: E402
from .tokenizer_folders import (  # noqa: E402
    byte_level,
    changed,
    folders,
    random_texts,
    save,
    sentencepiece_like,
)

KINDS = ("gpt2", "gpt_neox", "qwen2", "llama3", "llama2", "mistral", "gemma", "unigram")
NFC = ("gpt_neox", "qwen2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("models"))


def open_tokenizer(folder):
    return HuggingFace(folder / "tokenizer.json")


def run_remedy(message):
    """Run the command that a message names."""
    words = shlex.split(message[message.index("python -c") :])
    subprocess.run([sys.executable, *words[1:3]], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(models, kind):
    encoder = open_tokenizer(models[kind])
    check(models[kind], encoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[kind])
    texts = random_texts(200)
    if kind == "llama2":  # its class adds no mark before a space, and no document begins with one
        texts = [normalise(text) for text in texts]
    for text in texts:
        expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert encoder.token_ids(text) == expected, text
    documents = [normalise(text) for text in texts]
    ends = encoder.encode(documents) == 2
    assert ends.sum() == len(documents)
    if kind not in NFC:
        for text in documents:
            ids = encoder.token_ids(text)
            assert encoder.decode(ids) == text, text
    if kind != "unigram":  # of which the library takes the spelling for the token
        special = set(tokenizer.all_special_ids)
        assert not special & set(encoder.token_ids("</s> a <s>b<|end|>"))


def test_another_class_than_the_files_is_refused_and_its_remedy_works(tmp_path):
    folder = save(tmp_path / "qwen", byte_level(), "Qwen2Tokenizer", "qwen2")
    with pytest.raises(UserError, match="Qwen2Tokenizer of transformers gives other ids") as error:
        check(folder, open_tokenizer(folder))
    run_remedy(str(error.value))
    saved = tmp_path / "qwen_saved"
    check(saved, open_tokenizer(saved))


def test_a_folder_with_a_sentencepiece_model_alone_names_a_remedy_that_works(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_documents(5, 60)),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match="no tokenizer.json, .*, only tokenizer.model; run"
    ) as error:
        tokenizer_files(tmp_path)
    run_remedy(str(error.value))
    files = tokenizer_files(tmp_path)
    encoder = HuggingFace(files["tokenizer.json"])
    check(tmp_path, encoder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in make_documents(6, 20):
        assert encoder.token_ids(text) == model.encode(text)


def test_a_space_lost_beside_an_added_token_is_refused_and_its_remedy_works(tmp_path):
    added = json.loads(sentencepiece_like())["added_tokens"]
    token = {"id": 600, "content": "[INST]", "special": False, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": True}
    path = tmp_path / "tokenizer.json"
    path.write_text(changed(sentencepiece_like(), added_tokens=[*added, token]), "utf-8")
    with pytest.raises(UserError, match='added token .* set "special": true for it'):
        HuggingFace(path)
    token["special"] = True
    path.write_text(changed(sentencepiece_like(), added_tokens=[*added, token]), "utf-8")
    encoder = HuggingFace(path)
    assert encoder.decode(encoder.token_ids("a [INST] b")) == "a [INST] b"
    assert encoder.dictionary_size == 605


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model", {"byte_fallback": False}, "model BPE with byte_fallback false has no tokens"),
        ("decoder", {"type": "Fuse"}, "decoder Fuse turns"),
        ("decoder", None, "decoder null turns"),
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}, "Strip turns"),
    ],
)
def test_settings_that_lose_text_are_named(tmp_path, name, change, message):
    state = json.loads(sentencepiece_like())
    if name == "model":
        change = state["model"] | change
    path = tmp_path / "tokenizer.json"
    path.write_text(changed(json.dumps(state), **{name: change}), "utf-8")
    with pytest.raises(UserError, match=f"loses text: .*{message}"):
        HuggingFace(path)
