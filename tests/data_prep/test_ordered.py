"""`--ordered`: sources in a given order are the mega-batches."""

import json
from collections import Counter
from pathlib import Path

import pytest

from alma.stream import Stream
from alma.workers import Workers
from data_prep import similarity, words

from .conftest import make_documents
from .small_streams import bless, write_stream
from .test_pipeline import digests, texts

SIZES = {
    "mega_batches": None,
    "words": 700,
    "eval_words": 200,
    "valid_words": 100,
    "vocab_size": 80,
}
APPEND = dict.fromkeys(SIZES)


@pytest.fixture
def years(tmp_path) -> Path:
    """2023.txt, 2024.txt, books.txt and 2025.txt;
    each repeats documents of those before and its own."""
    folder = tmp_path / "years"
    folder.mkdir()
    old: list[str] = []
    for number, name in enumerate(("2023", "2024", "books", "2025")):
        new = make_documents(20 + number, 90)
        (folder / f"{name}.txt").write_text("\n\n".join([*new, *old[:20], *new[:5]]), "utf-8")
        old = new + old[:20]
    return folder


@pytest.fixture
def four(years) -> list[str]:
    """The CORPUS arguments of three mega-batches."""
    return [f"{name}={years / name.strip('+')}.txt" for name in ("2023", "2024", "books+", "2025")]


@pytest.fixture
def ordered(prepare):
    """Run the command with --ordered."""
    return lambda *arguments, out, **flags: prepare(
        *arguments, "--ordered", out=out, **SIZES | flags
    )


def test_the_parts_and_what_is_in_them(years, four, ordered, tmp_path):
    out = ordered(*four, out=tmp_path / "out", words=None, max_document_words=20)
    stream = Stream.load(out)
    assert stream.ordered
    names = [part.name for part in stream.parts]
    assert names == (
        "megabatch_00 megabatch_01 megabatch_02 valid test "
        "test_00 test_01 test_02 valid_00 valid_01 valid_02".split()
    )
    assert [list(filter(part.sources.get, part.sources)) for part in stream.megabatches] == (
        [["2023"], ["2024", "books"], ["2025"]]
    )
    for part in stream.parts:
        assert len(texts(out, part.prefix)) == part.documents
        target = {"t": 200, "v": 100}.get(part.name[0])
        if target and part.name not in ("test", "valid"):
            assert abs(part.words - target) <= 15
    for mixed, held_out in ((stream.test, stream.held_out), (stream.valid, stream.held_out_valid)):
        drawn = texts(out, mixed.prefix)
        assert abs(mixed.words - held_out[0].words) < 40
        for part in held_out:
            part_texts = texts(out, part.prefix)
            shared = [text for text in drawn if text in part_texts]
            assert shared == part_texts[: len(shared)]
            words = sum(len(text.split()) for text in shared)
            assert abs(words - part.words / 3) <= 20, "an equal share of each"
    record = json.loads((out / "stream.json").read_bytes())
    assert [part["name"] for part in record["held_out"]] == ["test_00", "test_01", "test_02"]
    assert [part["name"] for part in record["held_out_valid"]] == [
        "valid_00",
        "valid_01",
        "valid_02",
    ]
    assert record["settings"]["order"] == [["2023"], ["2024", "books"], ["2025"]]
    assert record["settings"]["words"] == 0
    assert "spread" not in record["corpus"]


def test_the_tokenizer_sees_the_first_megabatch_only(ordered, tmp_path):
    paths = []
    for number in range(2):
        blocks = [
            f"{chr(0x4E00 + 100 * number + n) * 9} {t}"
            for n, t in enumerate(make_documents(7 + number, 90))
        ]
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text("\n\n".join(blocks), "utf-8")
    out = ordered(*paths, out=tmp_path / "out", vocab_size=200)
    tokens = (out / "dict.txt").read_text("utf-8")
    first = "".join(texts(out, "megabatch_00/train"))
    assert {c for c in tokens if c >= "\u4e00"} == {c for c in first if c >= "\u4e00"} != set()
    stream = ordered(
        *paths, out=tmp_path / "given", vocab_size=None, tokenizer=out / "tokenizer.model"
    )
    assert digests(stream) == digests(out)


# inspect


def test_inspect_shows_the_drift(four, ordered, tmp_path, inspected, monkeypatch):
    out = ordered(*four, out=tmp_path / "out")
    stream = Stream.load(out)
    seen: set[str] = set()
    shares = []
    for part in stream.megabatches:
        counts = Counter(word for text in texts(out, part.prefix) for word in text.split())
        shares.append(sum(n for word, n in counts.items() if word not in seen) / counts.total())
        seen |= counts.keys()
    monkeypatch.setattr(similarity, "_BLOCK", 97)  # words cross the borders of blocks
    code, text, _ = inspected(out)
    assert code == 0
    assert "i.i.d.?" not in text
    rows = [
        line.split() for line in text[text.index("Drift.") : text.index("\n\nContam")].splitlines()
    ]
    header = next(row for row in rows if row[:2] == ["new", "tokens"])
    assert header == "new tokens new words 00 01 02".split()
    table = {row[0]: row[1:] for row in rows if row[0].startswith("megabatch_")}
    assert [len(row) for row in table.values()] == [2, 4, 4]
    assert [row[1] for row in list(table.values())[1:]] == [f"{share:.2%}" for share in shares[1:]]
    ratios = [row[-2:] for row in table.values()]
    assert ratios[0] == [ratios[1][0], ratios[2][0]], "symmetric"
    assert inspected(out, "--workers", 2)[1] == text


def test_words_of_gpt2_tokens(tmp_path):
    """A word begins with a line or with a token that holds a space."""
    ids = {"a": 0, "\u0120b": 1, "c": 2}  # 4, 5 and 6 in the stream
    files = {"dict.txt": "0 1\n1 1\n2 1\n", "encoder.json": json.dumps(ids)}
    parts = [[[[4, 5, 6], [5]]], [[[4, 5, 6, 5, 4, 5, 4]]], [[[4]]], [[[4]]]]  # a_bc _b; a_bc_ba_ba
    with Workers(1) as workers:
        stream = Stream.load(write_stream(tmp_path / "gpt2", parts, files=files))
        assert words.new_shares(stream, workers) == [1, 0.5]


def test_verify_finds_a_leak(four, ordered, tmp_path, inspected):
    out = ordered(*four, out=tmp_path / "out")
    assert inspected(out, "--verify")[0] == 0
    held_out = out / "test_01.keys"
    held_out.write_bytes(
        (out / "megabatch_02/train.keys").read_bytes()[:16] + held_out.read_bytes()[16:]
    )
    bless(out)
    code, text, _ = inspected(out, "--verify")
    assert code == 2
    assert "1 documents are in megabatch_02 and in test_01" in text
