"""Ids equal SentencePiece's, and files equal those of fairseq-preprocess."""

import itertools
import random
import sys

import numpy as np
import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli.preprocess import cli_main
from hypothesis import given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import Stream, read_index
from data_prep.dictionary import dictionary_text
from data_prep.encode import load_encoder
from data_prep.tokenizer import SentencePiece, train

from .conftest import make_documents, run
from .corpus_files import read

ODD = [
    "a\u00a0b\u2009c\u0085d\tx \x0b y\x1cz\u3000end",
    "  leading and trailing  \r\nsecond line\r\n\ttabs\tinside ",
    "\u2581mark \u2581 x\u2581 y\u2581z \u2581\u2581 end\u2581",
    "unknown 漢字 \U0001f600 mixed漢bada <s> <pad> </s> <unk> x<unk>",
    "zero\u200bwidth \ufeff nul\x00byte \u00ad",
    "w" * 70000,
    "▅ reserved",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A trained .model, to which most odd characters are unknown."""
    text = [text.encode() for text in [*make_documents(3, 300), "<pad> a<pad> <s> > < / p"] * 2]
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(train(text, 150))
    return path


def own_ids(processor, line):
    """A line without tokens is <unk>, because eos alone ends a document."""
    return [3 if i == 0 else i + 1 for i in processor.encode(line)] or [3]


def check_line(encoder, processor, line):
    line = " ".join(line.split())
    if line:
        assert encoder.encode([line]).tolist() == [*own_ids(processor, line), 2, 2]


def check_documents(encoder, processor, texts):
    """Encode all documents in one call, first with new words, then from the cache."""
    documents = []
    for text in texts:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        documents.append("\n".join(filter(None, lines)))
    expected = []
    for document in documents:
        for line in document.split("\n"):
            expected += [*own_ids(processor, line), 2]
        expected.append(2)
    assert encoder.encode(documents).tolist() == expected
    assert encoder.encode(documents).tolist() == expected


@pytest.fixture(scope="module")
def pair(model):
    """Our encoder and SentencePiece's."""
    return SentencePiece(model), processor_of(model)


def processor_of(model):
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def trained(path, lines, **options):
    """A tiny model trained on the lines."""
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            minloglevel=2,
            **{"model_type": "bpe", "vocab_size": 150} | options,
        )
    return path


@settings(max_examples=200, deadline=None)
@given(
    line=st.text(
        st.sampled_from("ab d\u2581\u2581<s>漢\x00\u200b\u00a8é\u0301  ")
        | st.characters(codec="utf-8")
    )
)
def test_ids_are_sentencepieces(pair, line):
    check_line(*pair, line)


def test_odd_text(pair):
    """U+2581 is SentencePiece's mark for a space, which it strips at the end of a sentence."""
    short = [
        "".join(letters)
        for length in range(1, 6)
        for letters in itertools.product("b \u2581", repeat=length)
    ]
    for line in [*short, *(line for text in ODD for line in text.split("\n"))]:
        check_line(*pair, line)


def test_a_line_without_tokens_ends_no_document(prepare, tmp_path, inspected):
    """Marks of SentencePiece for a space, and what its default normalisation takes for space."""
    lines = [line for text in make_documents(4, 200) for line in text.split("\n")]
    model = trained(tmp_path / "m.model", lines, normalization_rule_name="nmt_nfkc")
    odd = [
        f"{text}\n\u2581\n{n}\n\u200b\u200b \u200b" for n, text in enumerate(make_documents(5, 150))
    ]
    (tmp_path / "a.txt").write_text("\n\n".join([*odd, "\u2581", "\u2581 \u2581\n\u200b"]), "utf-8")
    sizes = {"words": 700, "valid_words": 100, "vocab_size": None, "mega_batches": 2}
    out = prepare(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=model, **sizes)
    for part in Stream.load(out).parts:
        items = [item.tolist() for item in MMapIndexedDataset(str(out / part.prefix))]
        assert items.count([2]) == part.documents
        assert [3, 2] in items
    assert inspected(out, "--verify")[0] == 0
    assert inspected(out)[0] == 0


def test_the_word_cache_is_used_and_bounded(model, monkeypatch):
    import data_prep.tokenizer as module

    monkeypatch.setattr(module, "_CACHE_BYTES", 5000)
    encoder = SentencePiece(model)
    processor = processor_of(model)
    for text in make_documents(3, 30) * 2:
        for line in text.split("\n"):
            check_line(encoder, processor, line)
    held = sum(map(sys.getsizeof, [*encoder._cache, *encoder._cache.values()]))
    assert 5000 <= held < 7000, "the words of one line may be too much"


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False},
        {"treat_whitespace_as_suffix": True},
        {"model_type": "unigram"},
        {"user_defined_symbols": ["ba\u2581da"]},
        {"byte_fallback": True, "vocab_size": 400},
        {"pad_id": 3, "pad_piece": "<pad>"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_given_models_of_any_kind(tmp_path, options):
    lines = [line for text in make_documents(4, 200) for line in text.split("\n")]
    trained(tmp_path / "m.model", lines, **options)
    encoder = SentencePiece(tmp_path / "m.model")
    processor = processor_of(tmp_path / "m.model")
    for line in [*lines[:300], "ba da ba", *(line for text in ODD for line in text.split("\n"))]:
        check_line(encoder, processor, line)
    check_documents(SentencePiece(tmp_path / "m.model"), processor, make_documents(5, 60))
    check_documents(SentencePiece(tmp_path / "m.model"), processor, make_documents(6, 30) + ODD)
    (tmp_path / "dict.txt").write_text(
        dictionary_text(encoder.tokens, [1] * len(encoder.tokens)), "utf-8"
    )
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    assert dictionary.symbols[4:] == encoder.tokens


def test_a_unigram_model_with_equally_probable_splits(tmp_path):
    """Rounding of the sum over the line decides between "11" + "1" and "1" + "11"."""
    rng = random.Random(0)

    def line(words):
        return " ".join("".join(rng.choices("01", k=rng.randint(1, 12))) for _ in range(words))

    model = trained(
        tmp_path / "m.model", [line(9) for _ in range(300)], model_type="unigram", vocab_size=16
    )
    encoder = SentencePiece(model)
    processor = processor_of(model)
    for text in [line(rng.randint(1, 60)) for _ in range(400)]:
        check_line(encoder, processor, text)


def test_models_that_do_not_fit_are_refused(tmp_path):
    specials = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
    trained(tmp_path / "m.model", make_documents(4, 50), vocab_size=60, **specials)
    with pytest.raises(UserError, match="needs <unk>, <s>, </s> as ids 0, 1, 2"):
        SentencePiece(tmp_path / "m.model")
    (tmp_path / "no.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        SentencePiece(tmp_path / "no.model")


def test_training_does_not_depend_on_chance_and_drops_no_line():
    texts = [
        ("x " * 5000 + "qqqzqqqz " * 50).encode(),
        *[text.encode() for text in make_documents(5, 100)],
    ] * 3
    assert train(texts, 120) == train(texts, 120)
    processor = sentencepiece.SentencePieceProcessor(model_proto=train(texts, 120))
    assert processor.get_piece_size() == 123
    assert "z" in [processor.id_to_piece(i) for i in range(123)], "a long line was dropped"


def test_ctrl_c_while_sentencepiece_reads_is_no_error_of_training():
    def interrupted():
        yield b"one line"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted(), 120)


def test_files_are_those_of_fairseq_preprocess(prepare, tmp_path):
    """fairseq-preprocess makes the same .bin and .idx from the documents of a part."""
    path = tmp_path / "text.txt"
    path.write_bytes(
        "\n\n".join([t.replace("\n", "\r\n") for t in make_documents(6, 150)] + ODD).encode()
    )
    out = prepare(path, out=tmp_path / "out", words=400, mega_batches=1, valid_words=50)
    processor = processor_of(out / "tokenizer.model")
    encoder = SentencePiece(out / "tokenizer.model")
    by_ids = {}
    for text in read(path)[0]:
        lines = [processor.encode(line, out_type=str) for line in [*text.split("\n"), ""]]
        by_ids[encoder.encode([text]).tobytes()] = lines
    flags: list[object] = []
    for split, prefix in (("train", "megabatch_00/train"), ("test", "test")):
        ids = b""
        tokens = []
        for item in MMapIndexedDataset(str(out / prefix)):
            ids += item.numpy().astype(np.uint16).tobytes()
            if len(item) == 1:
                tokens += by_ids[ids]
                ids = b""
        (tmp_path / split).write_text(
            "".join(f"{' '.join(line)}\n" for line in tokens), "utf-8", newline="\n"
        )
        flags += [f"--{split}pref", tmp_path / split]
    flags += [
        "--only-source",
        "--workers",
        1,
        "--srcdict",
        out / "dict.txt",
        "--destdir",
        tmp_path / "fairseq",
    ]
    run(cli_main, *flags)
    for name, stem in (("train", "megabatch_00/train"), ("test", "test")):
        for suffix in (".bin", ".idx"):
            peer_bytes = (tmp_path / f"fairseq/{name}{suffix}").read_bytes()
            assert peer_bytes == (out / f"{stem}{suffix}").read_bytes()


def test_a_large_dictionary_takes_four_bytes(corpus, prepare, tmp_path, monkeypatch):
    narrow = prepare(corpus, out=tmp_path / "narrow")
    monkeypatch.setattr("data_prep.tokenizer.dtype_code", lambda size: 9)
    load_encoder.cache_clear()
    wide = prepare(corpus, out=tmp_path / "wide")
    load_encoder.cache_clear()
    a, b = (MMapIndexedDataset(str(out / "test")) for out in (narrow, wide))
    assert [item.tolist() for item in a] == [item.tolist() for item in b]
    assert read_index(wide / "test.idx")[1] == 9


def test_dictionary_counts_are_those_of_the_first_megabatch(corpus, prepare, tmp_path):
    out = prepare(corpus, out=tmp_path / "out")
    dictionary = Dictionary.load(str(out / "dict.txt"))
    stream = Stream.load(out)
    assert len(dictionary) == stream.vocab_size + 4
    ids = np.concatenate(
        list(map(np.asarray, MMapIndexedDataset(stream.path(stream.megabatches[0]))))
    )
    counts = np.bincount(ids, minlength=len(dictionary))[4:]
    assert dictionary.count[4:] == np.maximum(counts, 1).tolist()
    assert counts.max() > 10
