"""Ids equal those of fairseq's GPT-2 encoder, and files equal those of fairseq-preprocess."""

import json

import pytest
import regex
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.files import sha256_file
from alma.stream import Stream
from data_prep import byte_level
from data_prep.byte_level import GPT2

from .conftest import make_documents

ODD = [
    "it's they'll we'd I've 'sx x's' '' 's 't'll \u2019s don't! 'S",
    "a\u00a0b\u2009c\u0085d\tx \x0b y\x1cz\u3000end \x1d\x1e \x1f",
    "  leading and trailing  \r\nsecond line\r\n\ttabs\tinside ",
    "zero\u200bwidth \ufeff nul\x00byte \x00 \u180e x\u180e \u00ad \u2060 \u200d",
    "12345 1a2b 3.14 ½ ² ٣٤ 十 Ⅷ x² $5.00 100% a1b2 -7",
    "漢字 \U0001f600 mixed漢bada e\u0301 \u0301alone n\u0303 \U0001f468\u200d\U0001f469 "
    "\U0001f1e9\U0001f1ea",
    "Ġmark Ċ <|endoftext|> <s> <pad> </s> <unk> \u2581 #version",
    "the the" * 2000,
]


@pytest.fixture(scope="module")
def pair(gpt2_files):
    """Our encoder and fairseq's."""
    return GPT2(*gpt2_files), get_encoder(*map(str, gpt2_files))


def flags_of(files):
    return {
        "vocab_size": None,
        "bpe": "gpt2",
        "gpt2_encoder_json": files[0],
        "gpt2_vocab_bpe": files[1],
    }


def check_line(pair, line):
    line = " ".join(line.split())
    if line:
        encoder, peer = pair
        ids = encoder.encode([line])
        assert ids[-2:].tolist() == [2, 2]
        assert (ids[:-2] - 4).tolist() == peer.encode(line)
        assert encoder._tokenize(line) == peer.encode(line), "words are not independent"


@settings(max_examples=200, deadline=None)
@given(
    line=st.text(
        st.sampled_from("abt s'  d12\x00\x1c\u180e\u200b\ufeff漢é\u0301\u00ad\U0001f600½.,-")
        | st.characters(codec="utf-8")
    )
)
@example("a's 's ' s \x00 \x00\x00 1's")
@example("a \u180e\u200b \ufeff b\ufeff")
def test_ids_are_fairseqs(pair, line):
    check_line(pair, line)


def test_odd_text(pair):
    for line in "\n".join([*make_documents(3, 50), *ODD]).split("\n"):
        check_line(pair, line)


def test_white_space_of_the_pattern_never_occurs_in_a_normalised_line(pair):
    """So no token crosses two words. The pattern is fairseq's."""
    assert pair[1].pat.pattern == byte_level._TOKENS.pattern
    spaces = regex.findall(r"\s", "".join(map(chr, range(0x110000))))
    assert len(spaces) > 20
    assert not "".join(spaces).split()


def test_the_stream_keeps_the_files(corpus, prepare, gpt2_files, tmp_path, capsys):
    out = prepare(corpus, out=tmp_path / "out", **flags_of(gpt2_files))
    stream = Stream.load(out)
    stream.check(stream.parts)
    digests = {file.name: sha256_file(file) for file in gpt2_files}
    assert stream.settings["tokenizer"] == digests
    assert {
        name: info.sha256 for name, info in stream.files.items() if name != "dict.txt"
    } == digests
    assert not (out / "tokenizer.model").exists()
    assert stream.vocab_size == 1000
    assert Dictionary.load(str(out / "dict.txt")).symbols[4:] == list(map(str, range(1000)))
    prepare(corpus, out=out, **flags_of(gpt2_files))
    assert "nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: json.dumps(ids)[:-50], "not JSON"),
        (lambda ids: json.dumps(list(ids)), "not GPT-2's encoder.json"),
        (lambda ids: json.dumps(ids | {"A": "1"}), "not GPT-2's encoder.json"),
        (lambda ids: json.dumps(ids | {"extra": 7}), "not GPT-2's encoder.json"),
        (
            lambda ids: json.dumps({f"{token}!": i for token, i in ids.items()}),
            "not GPT-2's encoder.json",
        ),
        (lambda ids: "\xff", "not JSON"),
    ],
)
def test_a_bad_encoder_json(gpt2_files, tmp_path, change, message):
    path = tmp_path / "encoder.json"
    path.write_text(change(json.loads(gpt2_files[0].read_text("utf-8"))), "latin-1")
    with pytest.raises(UserError, match=regex.escape(message)):
        GPT2(path, gpt2_files[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.removeprefix("#version: 0.2\n"), "does not begin with a line #version"),
        (lambda text: text[:-3], "or not end with a newline"),
        (lambda text: "", "not lines of text"),
        (lambda text: text + "a\n", "'a' does not merge two tokens"),
        (lambda text: text + "a b c\n", "'a b c' does not merge two tokens"),
        (lambda text: text.replace("\n", "\n\n", 1), "vocab.bpe:2: '' does not merge"),
    ],
)
def test_a_bad_vocab_bpe(gpt2_files, tmp_path, change, message):
    path = tmp_path / "vocab.bpe"
    path.write_text(change(gpt2_files[1].read_text("utf-8")), "utf-8")
    with pytest.raises(UserError, match=regex.escape(message)):
        GPT2(gpt2_files[0], path)
