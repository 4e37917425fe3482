"""dict.txt, fairseq's dictionary: a line `token count` for every token, in the order of the ids."""

from collections.abc import Iterable
from pathlib import Path

from alma.errors import UserError

DICTIONARY = "dict.txt"  # name of the dictionary in a stream
EOS = 2
UNKNOWN = 3

_NAMES = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = " #fairseq:overwrite"  # lets fairseq load a token that is spelt like a special


def dictionary_text(tokens: Iterable[str], counts: Iterable[int]) -> str:
    """The text of dict.txt; counts below 1 are written as 1."""
    lines = []
    for token, count in zip(tokens, counts, strict=True):
        flag = _OVERWRITE if token in _NAMES else ""
        lines.append(f"{token} {max(int(count), 1)}{flag}\n")
    return "".join(lines)


def read_tokens(directory: Path) -> list[str]:
    """The tokens of a stream's dict.txt. UserError: missing or damaged."""
    path = directory / DICTIONARY
    try:
        lines = path.read_text("utf-8").split("\n")[:-1]
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged ({error}); `--verify` lists all damage") from error
    return [line.removesuffix(_OVERWRITE).rpartition(" ")[0] for line in lines]
