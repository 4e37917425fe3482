"""Stage tokenizer, and the encoders of text: same ids as SentencePiece and fairseq-preprocess."""

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
from alma.files import atomic_write
from alma.stream import DTYPES, SPECIALS, dtype_code
from data_prep.dictionary import EOS, UNKNOWN
from data_prep.shuffle import bucket_texts
from data_prep.work import Workspace

TRAINING_BYTES = 200_000_000  # text of the first mega-batch to train the tokenizer on, at most
MODEL = "tokenizer.model"  # the model's name in a stream
END = "\v"  # marks the end of a line in a list of words; normalised text never contains it
_THREADS = 4  # fixed, because the .model records it; 1, 2 and 4 give the same tokens
_OWN_SPECIALS = 3  # SentencePiece's ids <unk> 0, <s> 1, </s> 2
_SPACE = "\u2581"  # SentencePiece's mark for a space; it may also occur in text
# Bytes of the cached words and ids: 0.3 to 1.8 million words; 260 MB including the dict itself.
_CACHE_BYTES = 160 << 20
_CACHED_LENGTH = 64  # characters of the longest word that is cached
_BLOCK = 1 << 15
"""Words per look-up. In larger blocks, a new word occurs several times before it is cached."""
_ROW = 32  # words per sentence given to SentencePiece, which is fastest around this length


def train_tokenizer(space: Workspace, buckets: list[int], shards: int, vocab_size: int) -> None:
    """Train on the documents of the buckets, in their order, and write tokenizer.model."""
    documents = (bucket_texts(space, bucket, shards) for bucket in buckets)
    texts = (text for _, text, _ in itertools.chain.from_iterable(documents))
    model = train(texts, vocab_size)
    with atomic_write(space.directory / MODEL, "wb") as file:
        file.write(model)


def train(texts: Iterable[bytes], vocab_size: int) -> bytes:
    """Train a BPE model of `vocab_size` tokens and 3 specials.

    Returns the bytes of the .model file, which are the same on any machine. UserError: the text has
    too few different words for `vocab_size`, or too many different characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size + _OWN_SPECIALS,
            # 0.9995 would make 1 in 2,000 characters unknown; 1 would spend tokens on noise.
            character_coverage=0.9999,
            normalization_rule_name="identity",
            max_sentence_length=1 << 30,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while SentencePiece reads `_lines`
            raise KeyboardInterrupt from None
        raise UserError(_why_not_trained(str(error), vocab_size)) from error
    return model.getvalue()


def _why_not_trained(error: str, vocab_size: int) -> str:
    """A message for the error that SentencePiece raised in training."""
    too_large = re.search(r"value <= (\d+)", error)
    if too_large:
        most = int(too_large[1]) - _OWN_SPECIALS
        problem = "is too large for the words of the first mega-batch"
        remedy = f"ask for more words, or for at most {most:,}"
        return f"--vocab-size {vocab_size:,} {problem}; {remedy}"
    too_small = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_small:
        least = int(too_small[1]) - _OWN_SPECIALS
        problem = "is too small for the characters of the first mega-batch"
        return f"--vocab-size {vocab_size:,} {problem}; ask for more than {least:,}"
    return f"SentencePiece could not train: {error}"


def _lines(texts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of the first TRAINING_BYTES of the texts."""
    missing = TRAINING_BYTES
    for text in texts:
        yield from text[: max(missing, 0)].decode(errors="ignore").split("\n")
        missing -= len(text)
        if missing <= 0:
            return


class Encoder(ABC):
    """Encodes normalised text to fairseq ids, exactly as the tokenizer and fairseq-preprocess do.

    One exception: a line without tokens, such as a lone SentencePiece mark for a space, becomes
    <unk>, because a lone eos would end the document. The ids of words are cached (of whole lines,
    if the tokenizer's words depend on each other), and the new words of many documents are encoded
    in one call. The constructor of a subclass takes the paths of `files`.
    """

    files: ClassVar[tuple[str, ...]]  # names of the tokenizer's files in a stream
    companions: ClassVar[tuple[str, ...]] = ()  # those of files that may be beside them

    def __init__(self, tokens: list[str], ids: Sequence[int]) -> None:
        """`tokens`: those of dict.txt, in order; `ids`: the fairseq id of each tokenizer id."""
        self.tokens = tokens
        self.dictionary_size = len(tokens) + SPECIALS
        self.dtype_code = dtype_code(self.dictionary_size)
        self.dtype = np.dtype(DTYPES[self.dtype_code])
        self._ids = np.array(ids, self.dtype)
        # Placeholder for a word that is not cached: the largest value of the dtype, which is never
        # an id, because a dictionary of that size would have a larger dtype.
        self._hole = 256**self.dtype.itemsize - 1
        self._cache = _WordCache(np.array(self._hole, self.dtype).tobytes())
        self._cache[END] = np.array(EOS, self.dtype).tobytes()

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """(tokens,) the ids of all documents: each line with eos, and one more eos per document."""
        words: list[str] = []
        eos_counts: list[int] = []  # number of eos of each document
        for text in documents:
            words += self._cut(text)
            words += (END, END)
            eos_counts.append(text.count("\n") + 2)
        blocks = [np.zeros(0, self.dtype)]
        for start in range(0, len(words), _BLOCK):
            blocks.append(self._look_up(words[start : start + _BLOCK]))
        ids = np.concatenate(blocks)
        ends = np.flatnonzero(ids == EOS)
        empty = np.diff(ends, prepend=-1) == 1
        document_ends = np.cumsum(eos_counts, dtype=int) - 1
        empty[document_ends] = False
        return np.insert(ids, ends[empty], UNKNOWN) if empty.any() else ids

    def items(self, documents: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all documents, (tokens,), and the sizes of the items that eos ends, int32."""
        ids = self.encode(documents)
        return ids, np.diff(np.flatnonzero(ids == EOS), prepend=-1).astype(np.int32)

    @abstractmethod
    def _cut(self, text: str) -> list[str]:
        """Cut a text into words or lines that can be encoded independently, with END between
        lines."""

    @abstractmethod
    def _tokenize(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text."""

    def _encode_words(self, words: list[str]) -> list[bytes]:
        """The fairseq ids of each word."""
        return [self._ids[self._tokenize(word)].tobytes() for word in words]

    def _look_up(self, words: list[str]) -> np.ndarray:
        """The ids of words, from the cache; new words are first left as holes, then encoded."""
        ids = np.frombuffer(b"".join(map(self._cache.__getitem__, words)), self.dtype)
        unknown = self._cache.unknown
        if not unknown:
            return ids
        new_words = list(dict.fromkeys(unknown))
        encoded = dict(zip(new_words, self._encode_words(new_words), strict=True))
        data = ids.tobytes()
        width = ids.itemsize
        holes = np.flatnonzero(ids == self._hole).tolist()
        parts: list[bytes] = []
        start = 0
        for hole, word in zip(holes, unknown, strict=True):
            parts.append(data[start : hole * width])
            parts.append(encoded[word])
            start = (hole + 1) * width
        parts.append(data[start:])
        unknown.clear()
        self._cache.keep(encoded)
        return np.frombuffer(b"".join(parts), self.dtype)


class _WordCache(dict[str, bytes]):
    """A dict from words to their ids (bytes), of up to _CACHE_BYTES.

    Looking up a missing word returns `hole`, and adds the word to `unknown`.
    """

    def __init__(self, hole: bytes) -> None:
        super().__init__()
        self.unknown: list[str] = []
        self._hole = hole
        self._free = _CACHE_BYTES

    def __missing__(self, word: str) -> bytes:
        self.unknown.append(word)
        return self._hole

    def keep(self, encoded: dict[str, bytes]) -> None:
        """Add the short words while there is room."""
        if self._free > 0:
            short = {word: ids for word, ids in encoded.items() if len(word) <= _CACHED_LENGTH}
            self.update(short)
            self._free -= sum(map(sys.getsizeof, itertools.chain(short, short.values())))


class SentencePiece(Encoder):
    """A SentencePiece .model of any type."""

    files = (MODEL,)

    def __init__(self, model: str | Path) -> None:
        """Load a .model. UserError: not a model, or its ids do not map to fairseq's."""
        try:
            processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{model}: not a SentencePiece model") from error
        if (processor.unk_id(), processor.bos_id(), processor.eos_id()) != (0, 1, 2):
            needs = "needs <unk>, <s>, </s> as ids 0, 1, 2 (SentencePiece's default)"
            raise UserError(f"{model}: {needs}")
        model_ids = range(_OWN_SPECIALS, processor.get_piece_size())
        try:
            tokens = [processor.id_to_piece(i) for i in model_ids]
        except UnicodeDecodeError as error:
            raise UserError(f"{model}: damaged: a token is not UTF-8; copy it again") from error
        for token in tokens:
            if token.split() != [token]:
                problem = "has white space, which dict.txt cannot hold"
                raise UserError(f"{model}: the token {token!r} {problem}")
        super().__init__(tokens, [UNKNOWN, 0, EOS, *range(SPECIALS, len(tokens) + SPECIALS)])
        self._processor = processor
        starts = [token.startswith(_SPACE) for token in tokens]
        self._starts = np.concatenate([np.zeros(_OWN_SPECIALS, bool), np.array(starts, bool)])
        scores = [processor.get_score(i) for i in model_ids]
        # Whether the ids of a sentence are the ids of its words, as for every model trained here.
        # They need not be for a unigram model: its log-probabilities are added up along the
        # sentence, so rounding decides between equally probable splits of a word. BPE's scores are
        # the ranks of its merges, whole numbers, whose sums are exact.
        is_exact = all(score.is_integer() for score in scores)
        is_prefix = _SPACE in tokens and not any(_SPACE in token[1:] for token in tokens)
        repeats = self._tokenize("a a") == 2 * self._tokenize("a")
        self._by_word = is_exact and is_prefix and repeats
        # Whether the scores are the ranks that training gives to BPE: then many words can be
        # encoded in one call.
        self._in_rows = self._by_word and scores == [-rank for rank in range(len(tokens))]

    def _cut(self, text: str) -> list[str]:
        if self._by_word and _SPACE not in text:
            return text.replace("\n", f" {END} ").split(" ")
        return text.replace("\n", f"\n{END}\n").split("\n")

    def _tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        """The fairseq ids of each word.

        Where the ids of words can be separated, many words are encoded in one call: twice as fast.
        """
        text = " ".join(words)
        marked = _SPACE + text.replace(" ", _SPACE)
        if not self._in_rows or self._processor.normalize(text) != marked:
            return super()._encode_words(words)
        if marked.count(_SPACE) > len(words):  # some are whole lines, or contain the mark
            return self._encode_apart(words)
        rows = [" ".join(words[start : start + _ROW]) for start in range(0, len(words), _ROW)]
        row_ids = self._processor.encode(rows, num_threads=1)
        model_ids = np.fromiter(itertools.chain.from_iterable(row_ids), np.int64)
        data = self._ids[model_ids].tobytes()
        starts = np.append(np.flatnonzero(self._starts[model_ids]), len(model_ids))
        borders = (starts * self._ids.itemsize).tolist()
        return [data[start:end] for start, end in itertools.pairwise(borders)]

    def _encode_apart(self, words: list[str]) -> list[bytes]:
        """The fairseq ids of words; lines, and words that contain the mark, one call each."""
        lines = [word for word in words if _SPACE in word or " " in word]
        ids = dict(zip(lines, super()._encode_words(lines), strict=True))
        plain_words = [word for word in words if word not in ids]
        if plain_words:
            ids |= zip(plain_words, self._encode_words(plain_words), strict=True)
        return [ids[word] for word in words]
