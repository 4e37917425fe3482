"""Input files: cuts and blocks change nothing, bad input is skipped, memory is bounded."""

import os
import re
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import Stream
from data_prep import compressed
from data_prep.documents import Reader, find_files, make_shards, normalise
from data_prep.inputs import named_files, named_path

from .corpus_files import PACKERS, read, warc

SPACES = "".join(character for character in map(chr, range(0x11000)) if character.isspace())


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(SPACES + "\n\n  \t\u200b\ufeff\0ab\u00e9\u2014\U0001f600")))
def test_normalised_text(text):
    lines = (" ".join(line.split()) for line in text.replace("\ufeff", "").split("\n"))
    assert normalise(text) == "\n".join(filter(None, lines))


def plain_reference(data: bytes, border: bytes, longest: int):
    """The documents, and the offsets of those that are too long, found one by one."""
    documents = []
    long = []
    at = 0
    while at < len(data):
        at += len(data[at:]) - len(data[at:].lstrip())
        match = re.compile(border).search(data, at)
        end, size = (match.end(), match.end() - at - 1) if match else (len(data), len(data) - at)
        text = data[at : match.start() if match else end].decode()
        if size > longest:
            long.append(at)
        elif text := "\n".join(filter(None, (" ".join(line.split()) for line in text.split("\n")))):
            documents.append(text)
        at = end
    return documents, long


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(
        st.sampled_from(
            ["\n", "\n\n", " \n", "\r\n", " " * 9, "a", "b c", "\u00a0", "\u00e9" * 9, "d" * 19]
        )
    ),
    mode=st.sampled_from(["blank-line", "line"]),
    packed=st.sampled_from(["", "", ".gz"]),
    shard_bytes=st.integers(1, 60),
    block=st.integers(2, 20),
)
def test_cuts_and_blocks_do_not_matter(tmp_path, small, parts, mode, packed, shard_bytes, block):
    """Documents that are too long are skipped, wherever the cuts are."""
    small(block)
    data = "".join(parts).encode()
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(PACKERS[packed](data))
    documents, skips = read(path, Reader(mode, on_bad_input="skip"), shard_bytes)
    border = {"blank-line": rb"\n[ \t\r\v\f]*\n", "line": rb"\n"}[mode]
    long = [
        (offset, "a document longer than 20 bytes")
        for offset in plain_reference(data, border, 20)[1]
    ]
    assert (documents, skips) == (plain_reference(data, border, 20)[0], long)


RECORDS_AND_NOISE = {
    "a.txt": [
        '<doc id="1">\n',
        "</doc>\n",
        "</doc>",
        " </doc> \r\n",
        "\n",
        "a\n",
        "b" * 9,
        "c" * 30,
    ],
    "a.jsonl": [
        '{"text": "a"}\n',
        " ",
        "\r\n",
        '{"text": 3}',
        '{"text": "' + "b" * 30 + '"}',
        "\n",
        "{",
    ],
}


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), shard_bytes=st.integers(1, 60), block=st.integers(2, 20))
@pytest.mark.parametrize("name", RECORDS_AND_NOISE)
def test_cuts_and_blocks_do_not_matter_for_records(tmp_path, small, name, data, shard_bytes, block):
    path = tmp_path / name
    path.write_text("".join(data.draw(st.lists(st.sampled_from(RECORDS_AND_NOISE[name])))))
    reader = Reader("wikiextractor", on_bad_input="skip")
    small(20)
    whole = read(path, reader, 1000)
    small(block)
    assert read(path, reader, shard_bytes) == whole


def test_hidden_names_are_read_only_when_named_and_else_counted(tmp_path, monkeypatch, capsys):
    names = "a.txt _SUCCESS .a.txt _b.txt .cache/c.txt _temporary/0/d.txt e/.f/g.txt e/h.md".split()
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    monkeypatch.chdir(tmp_path)
    for path, expected in (
        *((path, ["a.txt", "e/h.md"]) for path in ("in", "in/**", f"{tmp_path}/in/**/*.*")),
        *((path, [".cache/c.txt"]) for path in ("in/.cache", "in/.cache/*", "in/.c*/*.txt")),
        *((path, ["_temporary/0/d.txt"]) for path in ("in/_temporary", "in/_*/**/*.txt")),
        ("in/e/.f/*.txt", ["e/.f/g.txt"]),
        ("in/_*.txt", ["_b.txt"]),
        ("in/.*.txt", [".a.txt"]),
    ):
        assert [os.path.relpath(file, tmp_path / "in") for file in find_files(path)] == expected, (
            path
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "in: left out: 6 names that begin with . or _"
    assert not [
        line for line in lines if line.startswith(("in/.cache", "in/_temporary", "in/_*.txt"))
    ]


def test_a_deleted_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    (shard,) = make_shards([("s", str(path))], Reader())
    path.unlink()
    skips = []
    assert list(Reader(on_bad_input="skip").read(shard, skips.append)) == []
    assert [skip[:3] for skip in skips] == [
        (str(path), 0, "unreadable (No such file or directory)")
    ]
    with pytest.raises(UserError, match=f"{path}: unreadable"):
        list(Reader().read(shard))


def test_a_pipe_is_refused_also_within_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt", tmp_path / "*.txt"):
        with pytest.raises(
            UserError, match="pipe.txt: a pipe, socket or device; .* write it to a file"
        ):
            find_files(str(path))


def test_a_data_card_is_no_text(tmp_path):
    """README.md beside records, as in a snapshot of Hugging Face; beside text it is text."""
    for name in ("README.md", "data/train.parquet", "text/README.md", "text/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "**"):
        with pytest.raises(
            UserError, match=rf"README.md: would be text .*: '{tmp_path}/\*\*/\*.parquet'$"
        ):
            find_files(str(path))
    assert find_files(f"{tmp_path}/**/*.parquet") == [f"{tmp_path}/data/train.parquet"]
    assert len(find_files(f"{tmp_path}/text")) == 2
    assert find_files(f"{tmp_path}/README.md") == [f"{tmp_path}/README.md"]


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a.wet", "wiki_00", "b.txt"]
)
def test_memory_is_bounded(tmp_path, monkeypatch, name):
    """A line of 40 MB before good text, with a limit of 1 MB per document."""
    monkeypatch.setattr(compressed, "MAX_DOCUMENT_BYTES", 1 << 20)
    monkeypatch.setattr(compressed, "BLOCK", 1 << 16)
    mode = "file" if name == "b.txt" else "blank-line"
    long = b"a " * (20 << 20)
    data = {
        ".jsonl": b'{"text": "' + long + b'"}\n{"text": "good"}',
        ".wet": warc("conversion", long) + warc("conversion", b"good"),
        "": b'<doc id="1">\n' + long + b'\n</doc>\n<doc id="2">\ngood\n</doc>\n',
    }.get(re.sub(r"^[^.]*|\.gz|\.zst", "", name), long + b"\n\ngood")
    path = tmp_path / name
    path.write_bytes(PACKERS[compressed.packing(name)](data))
    del long, data
    tracemalloc.start()
    documents, skips = read(path, Reader(mode, on_bad_input="skip"), 8 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert documents == ([] if mode == "file" else ["good"])
    assert [reason for _, reason in skips] == ["a document longer than 1,048,576 bytes"]
    assert peak < (60 << 20 if name.endswith(".zst") else 12 << 20)


def test_corpus_arguments(tmp_path, monkeypatch):
    names = [
        "cc/1/wet/a.wet.gz",
        "cc/2/wet/b.wet.gz",
        "cc/2/wet/_log.gz",
        "cc/2/seg/c.txt",
        "one.txt.bz2",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    a, b, _, c, one = [str(tmp_path / name) for name in names]
    assert named_files([f"{tmp_path}/cc/*/wet/*.gz"]) == [("cc", a), ("cc", b)]
    assert named_files([f"web={tmp_path}/cc/**/*.wet.gz"]) == [("web", a), ("web", b)]
    assert named_files([f"{tmp_path}/cc/[2]"]) == [("cc", c), ("cc", b)]
    (tmp_path / "link.txt.bz2").symlink_to(one)
    twice = [f"x={tmp_path}/one*", f"x={tmp_path}/link.txt.bz2", f"cc={tmp_path}/*/2/**/*.txt"]
    assert named_files(twice) == [("x", one), ("cc", c)]
    monkeypatch.chdir(tmp_path / "cc" / "1" / "wet")
    assert named_files(["*.gz"]) == [("wet", a)]
    assert named_path("../..") == ("cc", "../..")


def test_a_path_that_exists_is_no_name(tmp_path, monkeypatch):
    for name in ("year=2021/part-0.txt", "year=2022/part-0.txt", "part-0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert named_path("year=2021/part-0.txt") == ("part-0", "year=2021/part-0.txt")
    assert named_path("year=2021") == ("year=2021", "year=2021")
    assert named_files(["year=*/part-*.txt"]) == [
        (tmp_path.name, f"{tmp_path}/year={year}/part-0.txt") for year in (2021, 2022)
    ]
    assert named_path("x=year=2021") == ("x", "year=2021")
    assert named_path("year=part-0.txt") == ("year", "part-0.txt")


def test_modes_by_source(corpus, prepare, tmp_path):
    """One source with a document per file, another with documents between blank lines."""
    whole = prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "whole")
    folder = tmp_path / "alpha"
    folder.mkdir()
    for number, block in enumerate((corpus / "alpha.txt").read_text("utf-8").split("\n\n")):
        (folder / f"{number}.txt").write_text(block.replace("\n", "\n\n"), "utf-8")
    flags = ("--documents", "line", "--documents", "web=blank-line", "--documents", "alpha=file")
    out = prepare(folder, corpus / "web.txt", *flags, out=tmp_path / "out")
    assert Stream.load(out).megabatches == Stream.load(whole).megabatches
    recorded = Stream.load(out).settings
    assert (recorded["documents"], recorded["documents_of"]) == (
        "line",
        {"alpha": "file", "web": "blank-line"},
    )
