"""SentencePiece: training, and text -> ids exactly as SentencePiece and fairseq-preprocess give."""

import io
import itertools
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
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
END = "\v"
"""The end of a line, among words, none of which has white space."""
_SPACE = "\u2581"  # SentencePiece's mark for a space, which text may hold too
_CACHE_BYTES = 160 << 20  # of words and ids: 0.3 to 1.8 million; with the dictionary 260 MB
_CACHED_LENGTH = 64
_BLOCK = 1 << 15  # words that are looked up together: of more, many new ones occur several times
_ROW = 32  # words in a sentence for SentencePiece: it is fastest with about so many


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
    """Normalised text -> fairseq ids, as the tokenizer and fairseq-preprocess give them.

    Words are encoded by heart: known ones are looked up, the others of many documents encoded together. A
    kind of encoder is made of the paths of its files, in the order of `files`.
    """

    files: ClassVar[tuple[str, ...]]
    """Their names in a stream."""

    def __init__(self, pieces: list[str], ids: Sequence[int]) -> None:
        """`pieces`: the units by fairseq id, from 4 on; `ids`: the fairseq id of each of the tokenizer's."""
        self.pieces = pieces
        self.dictionary_size = len(pieces) + 4
        self.dtype_code = dtype_code(self.dictionary_size)
        self.dtype = np.dtype(DTYPES[self.dtype_code])
        self._ids = np.array(ids, self.dtype)
        self._hole = 256**self.dtype.itemsize - 1  # no id: dictionaries that large have the next dtype
        self._known = _Known(np.array(self._hole, self.dtype).tobytes())
        self._known[END] = np.array(EOS, self.dtype).tobytes()

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """The ids of all documents (tokens,): each line and eos, and one more eos after each document."""
        words: list[str] = []
        for text in documents:
            words += self._cut(text)
            words += (END, END)
        blocks = (self._look_up(words[i : i + _BLOCK]) for i in range(0, len(words), _BLOCK))
        return np.concatenate([np.zeros(0, self.dtype), *blocks])

    @abstractmethod
    def _cut(self, text: str) -> list[str]:
        """The text in pieces that are encoded one by one, with END between lines."""

    @abstractmethod
    def _tokenize(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text."""

    def _encode_words(self, words: list[str]) -> list[bytes]:
        """The ids of each."""
        return [self._ids[self._tokenize(word)].tobytes() for word in words]

    def _look_up(self, words: list[str]) -> np.ndarray:
        """The ids of words."""
        ids = np.frombuffer(b"".join(map(self._known.__getitem__, words)), self.dtype)
        unknown = self._known.unknown
        if not unknown:
            return ids
        new = list(dict.fromkeys(unknown))
        learnt = dict(zip(new, self._encode_words(new), strict=True))
        data, width = ids.tobytes(), ids.itemsize
        parts: list[bytes] = []
        start = 0
        for hole, word in zip(np.flatnonzero(ids == self._hole).tolist(), unknown, strict=True):
            parts += (data[start : hole * width], learnt[word])
            start = (hole + 1) * width
        parts.append(data[start:])
        unknown.clear()
        self._known.keep(learnt)
        return np.frombuffer(b"".join(parts), self.dtype)

    def dictionary(self, counts: np.ndarray) -> str:
        """dict.txt: units with their counts, by fairseq id (dictionary_size,); at least 1 each."""
        fixed = {"<s>", "<pad>", "</s>", "<unk>"}
        return "".join(
            f"{piece} {max(int(count), 1)}{' #fairseq:overwrite' if piece in fixed else ''}\n"
            for piece, count in zip(self.pieces, counts[4:], strict=True)
        )


class _Known(dict[str, bytes]):
    """Ids by word: of short words, as many as fit. Others are collected, and stand as `hole`."""

    def __init__(self, hole: bytes) -> None:
        super().__init__()
        self.unknown: list[str] = []
        self._hole = hole
        self._left = _CACHE_BYTES

    def __missing__(self, word: str) -> bytes:
        self.unknown.append(word)
        return self._hole

    def keep(self, learnt: dict[str, bytes]) -> None:
        """Learn words, if there is still room."""
        if self._left > 0:
            short = {word: ids for word, ids in learnt.items() if len(word) <= _CACHED_LENGTH}
            self.update(short)
            self._left -= sum(map(sys.getsizeof, itertools.chain(short, short.values())))


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
        self._starts = np.array([False] * SPECIALS + [piece.startswith(_SPACE) for piece in pieces])
        # BPE's scores are the order of its merges. Ties of other models depend on where a word stands.
        order = [processor.get_score(i) for i in range(SPECIALS, len(self._starts))]
        self._is_bpe = order == [-i for i in range(len(pieces))]

    def _cut(self, text: str) -> list[str]:
        if self._by_word and _SPACE not in text:
            return text.replace("\n", f" {END} ").split(" ")
        return text.replace("\n", f"\n{END}\n").split("\n")

    def _tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        """The ids of each; of many in one call, twice as fast, unless the model may mix them up."""
        text = " ".join(words)
        marked = _SPACE + text.replace(" ", _SPACE)
        if not self._is_bpe or self._processor.normalize(text) != marked:
            return super()._encode_words(words)
        if marked.count(_SPACE) > len(words):  # lines, or words with the mark
            odd = [word for word in words if _SPACE in word or " " in word]
            ids = dict(zip(odd, super()._encode_words(odd), strict=True))
            even = [word for word in words if word not in ids]
            ids |= zip(even, self._encode_words(even) if even else (), strict=True)
            return [ids[word] for word in words]
        rows = [" ".join(words[i : i + _ROW]) for i in range(0, len(words), _ROW)]
        found = self._processor.encode(rows, num_threads=1)
        units = np.fromiter(itertools.chain.from_iterable(found), np.int64)
        data = self._ids[units].tobytes()
        starts = np.append(np.flatnonzero(self._starts[units]), len(units)) * self._ids.itemsize
        return [data[a:b] for a, b in itertools.pairwise(starts.tolist())]

    def _words_are_independent(self) -> bool:
        """Whether a sentence's ids are those of its words: always so for models trained here."""
        crossing = any(_SPACE in piece[1:] for piece in self.pieces)
        return not crossing and _SPACE in self.pieces and self._tokenize("a a") == 2 * self._tokenize("a")
