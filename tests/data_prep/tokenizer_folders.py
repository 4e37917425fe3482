"""Small tokenizers in folders as models of Hugging Face have them, and texts to encode."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.lossless import BYTES

from .conftest import make_documents

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINES = (
    "it's THEY'LL 12345\na\u00e9\u0301 \u6f22\u5b57 x\u00b2.\n/path\n\n'\U0001f600!!\n"
    "<|end|> \u200b$5.0"
)
_ALPHABET = "abST 'ls1 2\n\n/.,;\u00e9\u0301\u6f22\u05e2\u0e44\u200b\U0001f600<|>end/s"


def random_texts(number: int) -> list[str]:
    """Texts of several scripts with emoji, line breaks, leading spaces, and special tokens."""
    rng = random.Random(number)
    texts = ["<|end|>", "</s> a <s>b", " lead", "  two\n three", "a\n\n\nb ", LINES]
    for _ in range(number):
        texts.append("".join(rng.choices(_ALPHABET, k=rng.randint(1, 40))))
    return texts


@functools.cache
def byte_level(pattern: str = "") -> str:
    """A tokenizer.json of 400 tokens with a pattern, that of GPT-2 by default."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = bytes_
    if pattern:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=bytes_.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    engine.train_from_iterator([*make_documents(5, 60), *5 * [LINES]], trainer)
    return engine.to_str()


@functools.cache
def sentencepiece_like(prefix: bool = True) -> str:
    """A tokenizer.json as of Llama 2, or, without a mark of space before the text, of Gemma."""
    engine = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    parts: list[decoders.Decoder] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.insert(0, normalizers.Prepend("\u2581"))
        parts.append(decoders.Strip(" ", 1, 0))
    engine.normalizer = normalizers.Sequence(steps)
    engine.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    # Words are cut in training only, so that no token crosses two of them.
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*special, *BYTES], show_progress=False
    )
    lines = "\n".join(make_documents(5, 60)).split("\n")  # a line break is a byte
    engine.train_from_iterator(lines, trainer)
    state = json.loads(engine.to_str())
    state["pre_tokenizer"] = None
    added = state["added_tokens"]
    state["added_tokens"] = [token for token in added if token["content"] in special]
    return json.dumps(state)


@functools.cache
def unigram() -> str:
    """A tokenizer.json of a Unigram model with byte_fallback."""
    special = ["<unk>", "<s>", "</s>"]
    letters = "\u2581abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [(token, 0.0) for token in (*special, *BYTES)]
    pieces += [(letter, -6.0) for letter in letters]
    pieces += [(f"\u2581{a}{b}", -4.0 - ord(b) / 100) for a in "bdfgkl" for b in "aeiou"]
    engine = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    engine.add_special_tokens(special)
    return engine.to_str()


def changed(state: str, **changes: Any) -> str:
    """A tokenizer.json with other values at its first level."""
    return json.dumps(json.loads(state) | changes)


def save(folder: Path, state: str, kind: str, model_type: str, **settings: Any) -> Path:
    """A folder with a tokenizer.json, the class of its tokenizer and the type of its model."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(state, "utf-8")
    end = "<|end|>" if "<|end|>" in state else "</s>"
    record = {"tokenizer_class": kind, "eos_token": end, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(record), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), "utf-8")
    return folder


def folders(root: Path) -> dict[str, Path]:
    """A folder for each kind of tokenizer that models have."""
    qwen = r"\p{N}".join(LLAMA_3.split(r"\p{N}{1,3}"))
    llama_3 = json.loads(byte_level(LLAMA_3))
    llama_3["model"]["ignore_merges"] = True
    spaces = {"id": 400, "content": "  ", "special": False, "normalized": True}
    spaces |= {"single_word": False, "lstrip": False, "rstrip": False}
    neox = json.loads(byte_level())
    neox["added_tokens"].append(spaces)
    form = {"type": "NFC"}
    kinds = {
        "gpt2": (byte_level(), "GPT2Tokenizer"),
        "gpt_neox": (changed(json.dumps(neox), normalizer=form), "GPTNeoXTokenizer"),
        "qwen2": (changed(byte_level(qwen), normalizer=form), "Qwen2Tokenizer"),
        "llama3": (json.dumps(llama_3), "PreTrainedTokenizerFast"),
        "llama2": (sentencepiece_like(), "LlamaTokenizer"),
        "mistral": (sentencepiece_like(), "LlamaTokenizer"),
        "gemma": (sentencepiece_like(prefix=False), "GemmaTokenizer"),
        "unigram": (unigram(), "PreTrainedTokenizerFast"),
    }
    types = {"llama3": "llama", "llama2": "llama", "unigram": "xglm"}
    folder_of = {}
    for name, (state, kind) in kinds.items():
        folder_of[name] = save(root / name, state, kind, types.get(name, name))
    return folder_of
