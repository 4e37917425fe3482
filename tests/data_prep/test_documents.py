"""Readers: cuts do not change the documents; text is normalised as fairseq splits it."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep.documents import Reader, find_files, make_shards

LINES = st.lists(
    st.sampled_from(["", " \t", "\r", "a", "b c\r", "\u00a0", "d\u2009e \u0085f", "é" * 9]), max_size=30
)


def read(path, reader, shard_bytes):
    shards = make_shards([("s", str(path))], reader, shard_bytes)
    assert sum(segment.end - segment.start for shard in shards for segment in shard) == path.stat().st_size
    return [
        piece
        for shard in shards
        for _, text, words in reader.read(shard)
        for piece in reader.split(text, words)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, shard_bytes=st.integers(1, 60), last=st.sampled_from(["", "\n"]))
def test_shards_do_not_change_the_documents(tmp_path, lines, shard_bytes, last):
    text = "\n".join(lines) + last
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    expected = []
    for block in re.split(r"(?:^|\n)(?:[ \t\r]*(?:\n|$))+", text):
        own = [re.sub(r"\s+", " ", line).strip() for line in block.split("\n")]
        if any(own):
            expected.append("\n".join(filter(None, own)))
    found = read(path, Reader(), shard_bytes)
    assert [text for text, _ in found] == expected
    assert [words for _, words in found] == [len(text.split()) for text in expected]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, limit=st.integers(1, 6))
def test_splitting_keeps_every_line(tmp_path, lines, limit):
    path = tmp_path / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    whole, split = read(path, Reader(), 1000), read(path, Reader(max_document_words=limit), 1000)
    assert [line for text, _ in split for line in text.split("\n")] == [
        line for text, _ in whole for line in text.split("\n")
    ]
    for text, words in split:
        assert words == len(text.split())
        assert words <= limit or "\n" not in text
    for document, words in whole:
        pieces = list(Reader(max_document_words=limit).split(document, words))
        assert len(pieces) == 1 or words > limit, "a document of the limit stays whole"
        for (_, size), (following, _) in itertools.pairwise(pieces):
            line = following.partition("\n")[0]
            assert size + len(line.split()) > limit, "no line more would have fitted"


def test_a_piece_may_have_as_many_words_as_the_limit():
    pieces = Reader(max_document_words=4).split("a b\nc d\ne f", 6)
    assert list(pieces) == [("a b\nc d", 4), ("e f", 2)]


def test_json_lines_may_be_cut_anywhere(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "word{n}\\n\\nmore"}}\n\n' for n in range(20)))
    for shard_bytes in (1, 7, 50, 1000):
        assert [text for text, _ in read(path, Reader(), shard_bytes)] == [
            f"word{n}\nmore" for n in range(20)
        ]


def test_a_byte_order_mark_is_dropped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\n\ntwo\ufeff".encode())
    assert [text for text, _ in read(path, Reader(), 1000)] == ["one", "two\ufeff"]


def test_small_files_share_a_shard(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("word")
    files = [("s", file) for file in find_files(str(tmp_path))]
    assert [len(shard) for shard in make_shards(files, Reader("file"), 12)] == [3, 3, 3, 1]


def test_directories_are_read_sorted_without_hidden_files(tmp_path):
    for name in ("b/2.txt", "a/1.jsonl", ".hidden.txt", "_SUCCESS", "c.txt.zst"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert find_files(str(tmp_path)) == [
        str(tmp_path / name) for name in ("a/1.jsonl", "b/2.txt", "c.txt.zst")
    ]


@pytest.fixture
def linked(tmp_path):
    """A corpus with links to a folder and a file elsewhere, to a folder in it, and in a circle."""
    elsewhere, corpus = tmp_path / "elsewhere", tmp_path / "corpus"
    for path in (elsewhere / "deep/1.txt", elsewhere / "2.txt", corpus / "own/3.txt", tmp_path / "4.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"word {path.name}")
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "four.txt").symlink_to(tmp_path / "4.txt")
    (corpus / "again").symlink_to(corpus / "own")
    (elsewhere / "deep/circle").symlink_to(corpus)
    return corpus


def test_links_are_followed_and_each_file_is_read_once(linked):
    whole, matched = find_files(str(linked)), find_files(f"{linked}/**/*.txt")
    for found in (whole, matched):
        assert sorted(Path(file).read_text() for file in found) == [f"word {n}.txt" for n in (1, 2, 3, 4)]
        assert len(found) == 4
    assert str(linked / "four.txt") in whole, "the name of the link tells the format"


def test_a_dangling_link_is_an_error(linked):
    (linked / "own/5.txt").symlink_to("annex/objects/5.txt")
    for path in (linked, f"{linked}/**/*.txt", linked / "own"):
        with pytest.raises(UserError, match=r"/5.txt: .*a link to annex/objects/5.txt, which is missing"):
            find_files(str(path))
    (linked / "own/5.txt").rename(linked / "own/.5.txt")
    assert len(find_files(str(linked))) == 4, "hidden names are ignored"


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd_frames_of_any_number(tmp_path, frames):
    import zstandard

    text = "\n\n".join(f"document {n} " + "word " * 50 for n in range(2000)).encode()
    step = len(text) // frames + 1
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(zstandard.compress(text[at : at + step]) for at in range(0, len(text), step)))
    (tmp_path / "a.txt").write_bytes(text)
    assert read(path, Reader(), 1000) == read(tmp_path / "a.txt", Reader(), 1000)
