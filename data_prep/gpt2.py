"""GPT-2's byte-level BPE, from given encoder.json and vocab.bpe, with the ids of fairseq."""

import json
from pathlib import Path

import regex

from alma.errors import UserError, require_package
from data_prep.dictionary import SPECIALS
from data_prep.tokenizer import END, Encoder

# The pattern of OpenAI and fairseq. Only the first character of a match can be a space, so no token crosses
# two words: the pattern's white space is that of str.split, and normalised text keeps single spaces only.
_TOKENS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class GPT2(Encoder):
    """As in fairseq's dict.txt, GPT-2's id i is the token spelt as the number i, and has fairseq id i + 4."""

    files = ("encoder.json", "vocab.bpe")

    def __init__(self, encoder_json: str | Path, vocab_bpe: str | Path) -> None:
        """Load the two files. UserError: damaged, not in GPT-2's format, or of two vocabularies."""
        require_package("tokenizers", "--bpe gpt2")
        from tokenizers import Tokenizer, models, pre_tokenizers

        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ids = _read_ids(encoder_json, bytes_.alphabet())
        self._engine = Tokenizer(models.BPE(ids, _read_merges(vocab_bpe, ids), cache_capacity=0))
        self._engine.pre_tokenizer = bytes_
        super().__init__([str(i) for i in range(len(ids))], range(SPECIALS, len(ids) + SPECIALS))

    def _cut(self, text: str) -> list[str]:
        # A word keeps the space before it. END replaces line breaks first, so that "\n" can mark the cuts.
        return text.replace("\n", END).replace(" ", "\n ").replace(END, f"\n{END}\n").split("\n")

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(_TOKENS.findall(text), is_pretokenized=True).ids


def _read_ids(path: str | Path, alphabet: list[str]) -> dict[str, int]:
    """encoder.json: {token: id}, tokens spelt in GPT-2's `alphabet` of bytes."""
    try:
        ids = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); copy encoder.json again") from error
    whole = isinstance(ids, dict) and all(type(i) is int for i in ids.values())
    if not whole or sorted(ids.values()) != list(range(len(ids))) or not ids.keys() >= set(alphabet):
        raise UserError(f"{path}: not GPT-2's encoder.json: all bytes and other tokens, with ids from 0 on")
    return ids


def _read_merges(path: str | Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    """vocab.bpe: a line `#version...`, then two tokens per line to merge, by falling priority."""
    try:
        first, *lines, last = Path(path).read_text("utf-8").split("\n")
    except ValueError as error:
        raise UserError(f"{path}: not GPT-2's vocab.bpe, not lines of text; copy it again") from error
    if not first.startswith("#version") or last:  # fairseq would silently drop a first or last merge
        raise UserError(f"{path}: does not begin with a line #version or not end with a newline; copy it")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 2):
        one, _, other = line.partition(" ")
        if not {one, other, one + other} <= ids.keys():
            what = f"{line!r} does not merge two tokens of encoder.json"
            raise UserError(f"{path}:{number}: {what}; give the two files of one vocabulary")
        merges.append((one, other))
    return merges
