"""GPT-2's byte-level BPE, with fairseq's ids."""

import json
from pathlib import Path

import regex

from alma.errors import UserError, require_package
from alma.stream import SPECIALS
from data_prep.tokenizer import END, Encoder

# The pattern of OpenAI and fairseq. Only the first character of a match can be a space, so no token
# crosses two words: the pattern's white space is that of str.split, and normalised text keeps
# single spaces only.
_TOKENS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


class GPT2(Encoder):
    """GPT-2's tokenizer, with the ids of fairseq's dict.txt for GPT-2.

    That dictionary spells GPT-2's token i as the number i; its fairseq id is i + 4.
    """

    files = ("encoder.json", "vocab.bpe")

    def __init__(self, encoder_json: str | Path, vocab_bpe: str | Path) -> None:
        """Load encoder.json, {token: id}, and vocab.bpe, which has a merge of two tokens per line.

        The first line of vocab.bpe is its version. Raises UserError if a file is damaged or not in
        GPT-2's format, or if the two belong to different vocabularies.
        """
        require_package("tokenizers", "--bpe gpt2")
        from tokenizers import Tokenizer, models, pre_tokenizers

        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ids = _read_ids(encoder_json, set(byte_level.alphabet()))
        merges = _read_merges(vocab_bpe, ids)
        self._engine = Tokenizer(models.BPE(ids, merges, cache_capacity=0))
        self._engine.pre_tokenizer = byte_level
        tokens = [str(i) for i in range(len(ids))]
        super().__init__(tokens, range(SPECIALS, len(ids) + SPECIALS))

    def _cut(self, text: str) -> list[str]:
        # A word keeps the space before it. Line breaks are first replaced by END, so that "\n" is
        # free to mark the cuts.
        marked = text.replace("\n", END).replace(" ", "\n ").replace(END, f"\n{END}\n")
        return marked.split("\n")

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.encode(_TOKENS.findall(text), is_pretokenized=True).ids


def _read_ids(path: str | Path, alphabet: set[str]) -> dict[str, int]:
    """The ids of an encoder.json. UserError: not JSON, or without ids from 0 on or all bytes."""
    try:
        ids = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); copy encoder.json again") from error
    is_table = isinstance(ids, dict) and all(type(i) is int for i in ids.values())
    if is_table and sorted(ids.values()) == [*range(len(ids))] and ids.keys() >= alphabet:
        return ids
    raise UserError(f"{path}: not GPT-2's encoder.json: all bytes and more, ids from 0 on")


def _read_merges(path: str | Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a vocab.bpe. UserError: another format, or not of the tokens in `ids`."""
    try:
        first, *lines, last = Path(path).read_text("utf-8").split("\n")
    except ValueError as error:
        problem = "not GPT-2's vocab.bpe, not lines of text; copy it"
        raise UserError(f"{path}: {problem}") from error
    # Without the version line or the final newline, fairseq would silently drop a merge.
    if not first.startswith("#version") or last:
        problem = "does not begin with a line #version or not end with a newline"
        raise UserError(f"{path}: {problem}; copy it again")
    merges = []
    for number, line in enumerate(lines, 2):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            problem = f"{line!r} does not merge two tokens of encoder.json"
            raise UserError(f"{path}:{number}: {problem}; give the two files of one vocabulary")
        merges.append((left, right))
    return merges
