"""Readers: cuts do not change the documents; text is normalised as fairseq splits it."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep.documents import Reader, find_files, make_shards

LINES = st.lists(
    st.sampled_from(["", " \t", "\r", "a", "b c\r", "\u00a0", "d\u2009e \u0085f", "é" * 9]),
    max_size=30,
)


def read(path, reader, shard_bytes):
    shards = make_shards([("s", str(path))], reader, shard_bytes)
    assert (
        sum(segment.end - segment.start for shard in shards for segment in shard)
        == path.stat().st_size
    )
    return [
        piece
        for shard in shards
        for _, text, words in reader.read(shard)
        for piece in reader.split(text, words)
    ]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=LINES, limit=st.integers(1, 6))
def test_splitting_keeps_every_line(tmp_path, lines, limit):
    path = tmp_path / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    whole = read(path, Reader(), 1000)
    split = read(path, Reader(max_document_words=limit), 1000)
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


def test_small_files_share_a_shard(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("word")
    files = [("s", file) for file in find_files(str(tmp_path))]
    assert [len(shard) for shard in make_shards(files, Reader("file"), 12)] == [3, 3, 3, 1]


@pytest.fixture
def linked(tmp_path):
    """A corpus with links to a folder and a file elsewhere, to a folder in it, and in a circle."""
    elsewhere = tmp_path / "elsewhere"
    corpus = tmp_path / "corpus"
    for path in (
        elsewhere / "deep/1.txt",
        elsewhere / "2.txt",
        corpus / "own/3.txt",
        tmp_path / "4.txt",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"word {path.name}")
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "four.txt").symlink_to(tmp_path / "4.txt")
    (corpus / "again").symlink_to(corpus / "own")
    (elsewhere / "deep/circle").symlink_to(corpus)
    return corpus


def test_links_are_followed_and_each_file_is_read_once(linked):
    whole = find_files(str(linked))
    matched = find_files(f"{linked}/**/*.txt")
    for files in (whole, matched):
        assert sorted(Path(file).read_text() for file in files) == [
            f"word {n}.txt" for n in (1, 2, 3, 4)
        ]
        assert len(files) == 4
    assert str(linked / "four.txt") in whole, "the name of the link tells the format"


def test_a_dangling_link_is_an_error(linked):
    (linked / "own/5.txt").symlink_to("annex/objects/5.txt")
    for path in (linked, f"{linked}/**/*.txt", linked / "own"):
        with pytest.raises(
            UserError, match=r"/5.txt: .*a link to annex/objects/5.txt, which is missing"
        ):
            find_files(str(path))
    (linked / "own/5.txt").rename(linked / "own/.5.txt")
    assert len(find_files(str(linked))) == 4, "hidden names are ignored"
