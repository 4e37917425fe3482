"""Formats of corpus files: what a document is in each, and what is bad input."""

import io
import itertools
import json
import lzma
import random
import shutil
import subprocess

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alma.errors import UserError
from data_prep import compressed, formats
from data_prep.documents import Reader

from .corpus_files import PACKERS, read, warc


@pytest.mark.parametrize("packed", PACKERS)
def test_modes_of_plain_text(tmp_path, packed):
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(PACKERS[packed]("\ufeffone two\r\nthree\r\n\r\nfour\u2028five".encode()))
    expected = {
        "blank-line": ["one two\nthree", "four five"],
        "line": ["one two", "three", "four five"],
        "file": ["one two\nthree\nfour five"],
    }
    for mode, texts in expected.items():
        assert read(path, Reader(mode)) == (texts, [])


@pytest.mark.parametrize("mode", ["blank-line", "line", "file"])
def test_lines_that_end_with_cr_alone_are_refused(tmp_path, mode):
    path = tmp_path / "a.txt"
    for text in ("one\rtwo\r\rthree\r", "\ufeffone\r\rtwo"):
        path.write_text(text, "utf-8", newline="")
        message = r"its lines end with CR alone at byte \d; .* tr '\\r' '\\n'"
        with pytest.raises(UserError, match=message):
            read(path, Reader(mode))
    for text in ("one two\r", "\rone two", "one\rtwo\n", "one two\r\n"):
        path.write_text(text, "utf-8", newline="")
        assert read(path, Reader(mode)) == (["one two"], []), "one line, with space"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "wiki_00"])
def test_byte_order_marks_of_files_that_were_joined(tmp_path, monkeypatch, name):
    monkeypatch.setattr(compressed, "BLOCK", 2)
    parts = {"a.txt": "{}\n\n", "a.jsonl": '{{"text": "{}"}}\n'}
    parts["wiki_00"] = '<doc id="1">\n{}\n</doc>\n'
    texts = ("one", "two", "\ufeffthree")
    path = tmp_path / name
    path.write_bytes("".join("\ufeff" + parts[name].format(text) for text in texts).encode())
    for shard_bytes in (1, 1000):
        assert read(path, None, shard_bytes) == (["one", "two", "three"], [])


DOCS = (
    '<doc id="1" url="u?curid=1" title="A &gt; B">\nA > B\n\nFirst <doc id=1>\nSecond.\n\n</doc>\n'
    '<doc id="2" url="u" title="Empty">\n\n</doc>\n'
    '<doc id="3" url="u" title="C">\nC\n\nText of C\n</doc>'
)


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("name", ["wiki_00", "all.txt"])
def test_wikiextractor(tmp_path, name, packed):
    path = tmp_path / (name + packed)
    reader = Reader("wikiextractor" if name == "all.txt" else "blank-line")
    texts = ["A > B\nFirst <doc id=1>\nSecond.", "C\nText of C"]
    for data in (DOCS, DOCS + "\n", DOCS.replace("\n", "\r\n")):
        path.write_bytes(PACKERS[packed](data.encode()))
        for shard_bytes in (1, 60, 1000):
            assert read(path, reader, shard_bytes) == (texts, [])


def test_wikiextractor_json(tmp_path):
    path = tmp_path / "wiki_07"
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": f"text {n}"}) + "\n" for n in range(9))
    )
    for shard_bytes in (1, 60, 1000):
        documents = read(path, Reader("file", text_key="body"), shard_bytes)
        assert documents == ([f"text {n}" for n in range(9)], []), "its field is always `text`"


def test_wikiextractor_that_is_broken(tmp_path):
    skip = Reader("wikiextractor", on_bad_input="skip")
    path = tmp_path / "a.txt"
    pieces = ["stray\n", '<doc id="1">\nlost\n']
    pieces += ['<doc id="2">\nkept\n</doc>\n', '<doc id="3">\ncut']
    path.write_text("".join(pieces))
    unclosed = "a <doc> without </doc>"
    skips = [(0, "text outside <doc> and </doc>"), (6, unclosed)]
    skips.append((len("".join(pieces[:3])), unclosed))
    assert read(path, skip) == (["kept"], skips)
    path = tmp_path / "wiki_00"
    path.write_text("neither")
    damaged = "damaged or truncated (WikiExtractor's files begin with <doc or {)"
    assert read(path) == ([], [(0, damaged)])
    path.write_text("")
    assert read(path) == ([], [])


RECORDS = [
    warc("warcinfo", b"Software-Info: x\r\n"),
    warc("conversion", "Caf\u00e9\n\nmenu".encode()),
    warc("conversion", b""),
    warc("conversion", b"WARC/1.0\r\n\r\ntwo"),
]


@pytest.mark.parametrize("name", ["a.wet", "a.wet.gz", "CC-MAIN-1.warc.wet.gz", "a.warc.wet.zst"])
def test_common_crawl_wet(tmp_path, name):
    pack = PACKERS[compressed.packing(name)]
    path = tmp_path / name
    path.write_bytes(b"".join(map(pack, RECORDS)))
    assert read(path, Reader("file"), 1) == (["Café\nmenu", "WARC/1.0\ntwo"], [])


def test_wet_that_is_broken(tmp_path, small):
    small(7)
    path = tmp_path / "a.wet"
    whole = b"".join(RECORDS)
    last = len(RECORDS[-1])
    for cut in (5, 20, last - 30, last - 3):
        path.write_bytes(whole[:-cut])
        documents, [(_, reason)] = read(path)
        assert documents == ["Café\nmenu"]
        assert reason.startswith("damaged or truncated")
    path.write_bytes(warc("conversion", b"x" * 21) + warc("conversion", b"\xff") + RECORDS[3])
    long = len(warc("conversion", b"x" * 21))
    bad = warc("conversion", b"\xff").index(b"\xff")
    skips = [(0, "a document longer than 20 bytes"), (long + bad, "not UTF-8")]
    assert read(path) == (["WARC/1.0\ntwo"], skips)
    path.write_bytes(warc("warcinfo", b"x" * 21) + warc("warcinfo", b"x" * 999) + RECORDS[3])
    assert read(path) == (["WARC/1.0\ntwo"], []), "what is no text may be long"
    path.write_bytes(warc("conversion", b"x" * 999) + RECORDS[3])
    assert read(path) == (["WARC/1.0\ntwo"], skips[:1])
    path.write_bytes(warc("warcinfo", b"x" * 999)[:-9])
    assert [reason[:20] for _, reason in read(path)[1]] == ["damaged or truncated"]
    path.write_bytes(RECORDS[3] + b"garbage\nmore of it\n" + RECORDS[1])
    skips = [(last, "damaged or truncated (no WARC record)")]
    assert read(path) == (["WARC/1.0\ntwo", "Café\nmenu"], skips)


def test_a_record_without_content_length(tmp_path):
    path = tmp_path / "a.wet"
    for length in (b"", b"-3", b"1e3", b"9" * 5000):
        broken = RECORDS[1].replace(b"Content-Length: 11", b"Content-Length: " + length)
        path.write_bytes(RECORDS[3] + broken + RECORDS[1] + broken + broken)
        documents, skips = read(path)
        assert documents == ["WARC/1.0\ntwo", "Café\nmenu"]
        sizes = [len(RECORDS[3]), len(broken) + len(RECORDS[1]), len(broken)]
        assert skips == [(start, skips[0][1]) for start in itertools.accumulate(sizes)]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("error", [-30, -5, -2, -1, 5, 170, 400, 10**6, 10**9, 10**20])
def test_a_wrong_content_length_costs_one_record(tmp_path, packed, error):
    """What is read and what is skipped are all records: a length that is too long hides none."""
    texts = [f"text {n}\n\nof {'many ' * n}words" for n in range(40)]
    records = [warc("conversion", text.encode()) for text in texts]
    size = len(texts[20])
    records[20] = records[20].replace(b": %d\r" % size, b": %d\r" % max(size + error, 0))
    path = tmp_path / f"a.wet{packed}"
    path.write_bytes(b"".join(map(PACKERS[packed], records)))
    documents, skips = read(path)
    assert documents == [text.replace("\n\n", "\n").strip() for text in texts[:20] + texts[21:]]
    start = sum(map(len, records[:20]))
    assert [(offset, reason[:20]) for offset, reason in skips] == [(start, "damaged or truncated")]
    with pytest.raises(UserError, match=f"a WARC record .* at byte {start}; .*--on-bad-input skip"):
        read(path, Reader())


def test_blank_lines_after_a_record_may_be_any(tmp_path):
    path = tmp_path / "a.wet"
    for end in (b"", b"\n", b"\n\n", b"\r\n" * 9):
        path.write_bytes((RECORDS[1][:-4] + end) * 2)
        assert read(path) == (["Café\nmenu"] * 2, [])


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), "dictionary"]
)
def test_parquet_may_be_cut_anywhere(tmp_path, kind):
    texts = [f"document {n}\n\nword{n % 7}" for n in range(1000)]
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    table = pyarrow.table({"id": range(1000), "body": column})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=90)
    for shard_bytes in (100, 3000, 1 << 30):
        documents, skips = read(path, Reader(text_key="body"), shard_bytes)
        assert (documents, skips) == ([text.replace("\n\n", "\n") for text in texts], [])


def test_parquet_that_is_bad(tmp_path, small):
    small(1 << 10)
    path = tmp_path / "a.parquet"
    broken = pyarrow.array([b"\xff"]).view(pyarrow.string())
    column = pyarrow.chunked_array([["good", None, "x" * 21], broken, ["\x00"]])
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "n": range(5)}), path)
    no_text = "no field `{}` that holds a string (--text-key names another)"
    long = "a document longer than 20 bytes"
    assert read(path) == (
        ["good", "\x00"],
        [(1, no_text.format("text")), (2, long), (3, "not UTF-8")],
    )
    numbers = "the column `n` holds int64, not string (--text-key names another)"
    absent = "no column `absent`; the columns are `text`, `n` (--text-key names another)"
    for key, problem in (("n", numbers), ("absent", absent)):
        skips = [(0, problem)]
        assert read(path, Reader(text_key=key, on_bad_input="skip")) == ([], skips)
    path.write_bytes(path.read_bytes()[:-9])
    documents, [(offset, reason)] = read(path)
    assert (documents, offset) == ([], 0)
    assert reason.startswith("damaged or truncated (")


BAD_LINES = {
    b'{"text": "a': "malformed JSON",
    b'{"text": "\\ud800"}': "malformed JSON",
    b'{"body": "a"}': "no field `text` that holds a string",
    b"7": "no field `text` that holds a string",
}


def test_bad_lines_are_skipped_one_by_one(tmp_path):
    good = [b'{"text": "one"}', b"", b'{"text": "two"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([good[0], *BAD_LINES, *good[1:]]))
    documents, skips = read(path)
    assert documents == ["one", "two"]
    assert [reason.split(" (")[0] for _, reason in skips] == list(BAD_LINES.values())
    assert [path.read_bytes()[offset:].split(b"\n")[0] for offset, _ in skips] == list(BAD_LINES)
    with pytest.raises(UserError, match=f"{path}: malformed JSON .* at byte {len(good[0]) + 1}; "):
        read(path, Reader())


@pytest.mark.parametrize("name", ["c4.00000-of-01024.json.gz", "a.json", "a.json.xz"])
def test_json_is_lines_and_no_array(tmp_path, name):
    path = tmp_path / name
    pack = PACKERS[compressed.packing(name)]
    path.write_bytes(
        pack("\n".join(json.dumps({"text": f"text {n}", "url": "u"}) for n in range(5)).encode())
    )
    assert read(path, Reader(), 60) == ([f"text {n}" for n in range(5)], [])
    assert formats.stem(name) in ("a", "c4.00000-of-01024")
    path.write_bytes(pack(b'\n [{"text": "one"},\n\n{"text": "two"}]'))
    assert read(path, None, 8) == ([], [(0, "a JSON array")])
    with pytest.raises(
        UserError, match=r"a JSON array at byte 0; write a JSON object on each line, .*jq"
    ):
        read(path, Reader())


def test_a_field_of_an_object_in_a_record(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [
        {"data": {"text": "nested"}},
        {"data.text": "literal", "data": {"text": "nested"}},
        {"data": {"text": {"body": "deep"}}},
        {"data": "text"},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    documents, skips = read(path, Reader(text_key="data.text", on_bad_input="skip"))
    assert (documents, len(skips)) == (["nested", "literal"], 2)
    assert read(path, Reader(text_key="data.text.body", on_bad_input="skip"))[0] == ["deep"]


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.json"])
def test_a_compressed_file_whose_name_does_not_say_so(tmp_path, packed, name):
    path = tmp_path / name
    rng = random.Random(0)
    text = "\n\n".join("".join(rng.choices("abc \n", k=40)) for _ in range(200))
    path.write_bytes(PACKERS[packed](text.encode()))
    assert read(path, None, 100)[0] == [], "parts of it were taken for text"
    with pytest.raises(
        UserError, match=rf"compressed, as {packed} files are .*; rename it to {name}{packed}$"
    ):
        read(path, Reader())


def test_lines_without_a_blank_one_are_not_to_be_skipped(tmp_path, small):
    small(7)
    path = tmp_path / "books.txt"
    path.write_text("a sentence\n" * 9)
    with pytest.raises(UserError, match="longer than 20 bytes .*; .*give --documents s=line$"):
        read(path, Reader())
    assert read(path, Reader("line")) == (["a sentence"] * 9, [])


TOOLS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
MEMBERS = [b"one\n\n", b"", b"two " * 900, b"three"]


def damaged(data: st.DataObject, pieces: list[bytes]) -> bytes:
    """The pieces with damage at a border: a byte changed beside it, or the end cut off there."""
    borders = [sum(map(len, pieces[:number])) for number in range(len(pieces) + 1)]
    border = data.draw(st.sampled_from(borders))
    shift = data.draw(st.integers(-9, 9))
    whole = bytearray(b"".join(pieces))
    at = max(border + shift, 0)
    if data.draw(st.booleans()):
        return bytes(whole[:at])
    if at < len(whole):
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(whole)


@pytest.mark.parametrize("packed", TOOLS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), damage=st.booleans())
def test_the_bytes_of_the_tool_or_a_refusal(tmp_path, packed, data, damage):
    """Members, padding and junk; each is read whole where the tool does, without a warning."""
    if not shutil.which(TOOLS[packed]):
        pytest.skip(f"{TOOLS[packed]} is not installed")
    members = st.sampled_from(MEMBERS).map(PACKERS[packed])
    pieces = data.draw(st.lists(members, min_size=1, max_size=3))
    alien = [b"junk", b"x", lzma.compress(b"y", lzma.FORMAT_ALONE), b"\x50\x2a\x4d\x18\1\0\0\0y"]
    padding = st.integers(0, 9).map(bytes)
    sound = data.draw(st.booleans())
    if not sound:
        extra = data.draw(
            st.sampled_from([padding, st.sampled_from(alien)]).flatmap(lambda kind: kind)
        )
        pieces.insert(data.draw(st.integers(0, len(pieces))), extra)
    raw = damaged(data, pieces) if damage else b"".join(pieces)
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(raw)
    tool = subprocess.run([TOOLS[packed], "-dc", path], capture_output=True)
    try:
        with compressed.open_file(str(path)) as file:
            content = file.read()
    except (compressed.Damaged, *compressed.archive_errors(OSError)):
        assert damage or not sound, "what is sound is read"
    else:
        assert (tool.returncode, tool.stdout) == (0, content)


def test_an_error_stays_one(tmp_path):
    """Bytes before it are read first; nothing after it is."""

    class Broken(io.BytesIO):
        def read1(self, size=-1):
            if self.tell() == 2:
                self.seek(3)
                raise OSError("broken")
            return super().read1(min(size, 2))

    data = compressed.Input(compressed.Segment("s", str(tmp_path / "a.gz"), 0, 9))
    vars(data)["_file"] = Broken(b"ab\ncd\n")
    assert data.read(9) == b"ab"
    for call in (data.read, data.readline) * 2:
        with pytest.raises(OSError, match="broken"):
            call(9)
    data.unread(b"b\nrest")
    assert (data.readline(), data.readline()) == (b"b\n", b"rest")
    with pytest.raises(OSError, match="broken"):
        data.readline()


def test_padding_is_that_of_the_tools(tmp_path):
    """Zeros: any number ends a .gz, multiples of four are anywhere in an .xz,
    and none in the others."""
    for packed in TOOLS:
        one, two = (PACKERS[packed](text) for text in (b"one\n\n", b"two"))
        path = tmp_path / f"a.txt{packed}"
        for count in (1, 3, 4, 8, 3000):
            path.write_bytes(one + bytes(count) + two)
            whole = packed == ".xz" and count % 4 == 0
            assert (read(path) == (["one", "two"], [])) == whole, (packed, count)
            path.write_bytes(one + bytes(count))
            whole = packed == ".gz" or (packed == ".xz" and count % 4 == 0)
            assert (read(path) == (["one"], [])) == whole, (packed, count)
        other_magic = bytes([two[0] ^ 1]) + two[1:]
        for alien in (b"junk", lzma.compress(b"y", lzma.FORMAT_ALONE), other_magic):
            path.write_bytes(one + alien)
            documents, skips = read(path)
            assert (documents, len(skips)) == (["one"], 1)


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2", ".zst"])
def test_several_frames_are_all_read_and_what_is_none_is_damage(tmp_path, packed):
    path = tmp_path / f"a.txt{packed}"
    one, two = (PACKERS[packed](text) for text in (b"one\n\n", b"two"))
    path.write_bytes(one + two)
    assert read(path) == (["one", "two"], [])
    path.write_bytes(one + two[:1] + bytes([two[1] ^ 1]) + two[2:])
    documents, [(offset, reason)] = read(path)
    assert (documents, offset) == (["one"], 5)
    assert reason.startswith("damaged or truncated")
