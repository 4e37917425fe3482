"""SentencePiece: training, and text -> ids exactly as SentencePiece and fairseq-preprocess give."""

import io
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import sentencepiece

from alma.errors import UserError
from alma.stream import DTYPES, dtype_code

TRAINING_BYTES = 200_000_000
"""Text of the first mega-batch that the tokenizer is trained on."""

MODEL = "tokenizer.model"
"""The model's name in a stream."""

_THREADS = 4  # 1, 2 and 4 give the same units; fixed, for the .model keeps it
SPECIALS = 3  # SentencePiece's <unk> <s> </s>
EOS = 2
_SPACE = "\u2581"  # SentencePiece's mark for a space, which text may hold too
_CACHE_BYTES = 160 << 20  # of words and ids: 0.3 to 1.8 million; with the dictionary 260 MB
_CACHED_LENGTH = 64


def train(texts: Iterable[bytes], units: int) -> bytes:
    """Train a model of `units` BPE units and 3 specials; returns the .model file's bytes.

    Deterministic: the same bytes on any machine. UserError: the text has too few different words for
    so many units, or too many different characters for so few.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=units + SPECIALS,
            character_coverage=0.9999,  # 0.9995 leaves 1 in 2000 characters unknown; 1 spends units on noise
            normalization_rule_name="identity",
            max_sentence_length=1 << 30,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), units) from error
    return model.getvalue()


def _lines(texts: Iterable[bytes]) -> Iterator[str]:
    left = TRAINING_BYTES
    for text in texts:
        yield from text[: max(left, 0)].decode(errors="ignore").split("\n")
        left -= len(text)
        if left <= 0:
            return


def _training_error(message: str, units: int) -> UserError:
    if most := re.search(r"value <= (\d+)", message):
        return UserError(
            f"--vocab-size {units:,} is too large for the first mega-batch, which gives at most "
            f"{int(most[1]) - SPECIALS:,} units; ask for fewer units or more words"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UserError(
            f"--vocab-size {units:,} is too small for the characters of the first mega-batch; ask for more "
            f"than {int(least[1]) - SPECIALS:,}"
        )
    return UserError(f"SentencePiece could not train: {message}")


class Encoder(ABC):
    """Lines of normalised text -> bytes of fairseq ids, without eos.

    A kind of encoder is made of the paths of its files, in the order of `files`.
    """

    files: ClassVar[tuple[str, ...]]
    """Their names in a stream."""

    def __init__(self, pieces: list[str], ids: Iterable[int]) -> None:
        """`pieces`: the units by fairseq id, from 4 on; `ids`: the fairseq id of each of the tokenizer's."""
        self.pieces = pieces
        self.dictionary_size = len(pieces) + 4
        self.dtype_code = dtype_code(self.dictionary_size)
        self.dtype = np.dtype(DTYPES[self.dtype_code])
        self._ids = [self.dtype.type(i).tobytes() for i in ids]
        self._words = _Words(self._encode)

    @abstractmethod
    def line(self, line: str) -> bytes:
        """The ids of a line, which is normalised and not empty."""

    @abstractmethod
    def _tokenize(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text."""

    def _encode(self, text: str) -> bytes:
        return b"".join(map(self._ids.__getitem__, self._tokenize(text)))

    def dictionary(self, counts: np.ndarray) -> str:
        """dict.txt: units with their counts, by fairseq id (dictionary_size,); at least 1 each."""
        fixed = {"<s>", "<pad>", "</s>", "<unk>"}
        return "".join(
            f"{piece} {max(int(count), 1)}{' #fairseq:overwrite' if piece in fixed else ''}\n"
            for piece, count in zip(self.pieces, counts[4:], strict=True)
        )


class SentencePiece(Encoder):
    """A .model of SentencePiece, of any kind."""

    files = (MODEL,)

    def __init__(self, model: str | Path) -> None:
        """Load a .model. UserError: not a model, or one whose ids do not map to fairseq's."""
        try:
            self._processor = processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{model}: not a SentencePiece model") from error
        if (processor.unk_id(), processor.bos_id(), processor.eos_id()) != (0, 1, 2):
            raise UserError(f"{model}: needs <unk>, <s>, </s> as ids 0, 1, 2 (SentencePiece's default)")
        pieces = [processor.id_to_piece(i) for i in range(SPECIALS, processor.get_piece_size())]
        for piece in pieces:
            if piece.split() != [piece]:
                raise UserError(
                    f"{model}: the unit {piece!r} holds whitespace, which fairseq's dict.txt cannot"
                )
        super().__init__(pieces, [3, 0, EOS, *range(4, len(pieces) + 4)])
        self._by_word = self._words_are_independent()

    def line(self, line: str) -> bytes:
        """The ids of a line, which is normalised and not empty."""
        if self._by_word and _SPACE not in line:
            return b"".join(map(self._words.__getitem__, line.split(" ")))
        return self._encode(line)

    def _tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _words_are_independent(self) -> bool:
        """Whether a sentence's ids are those of its words: always so for models trained here."""
        crossing = any(_SPACE in piece[1:] for piece in self.pieces)
        return not crossing and _SPACE in self.pieces and self._encode("a a") == 2 * self._encode("a")


class _Words(dict[str, bytes]):
    """Ids by word, computed on first sight; holds short words, and a bounded number of bytes."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode = encode
        self._left = _CACHE_BYTES

    def __missing__(self, word: str) -> bytes:
        ids = self._encode(word)
        if self._left > 0 and len(word) <= _CACHED_LENGTH:
            self[word] = ids
            self._left -= sys.getsizeof(word) + sys.getsizeof(ids)
        return ids
