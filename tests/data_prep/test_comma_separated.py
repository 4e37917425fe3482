"""CSV files: what a document is, and what is bad input."""

import pytest

from alma.dates import Dates, LeftOut
from data_prep.compressed import Segment, Skipped
from data_prep.documents import Reader

from .corpus_files import PACKERS, read


@pytest.mark.parametrize("suffix", PACKERS)
def test_rows_of_csv_are_documents(tmp_path, suffix):
    path = tmp_path / f"a.csv{suffix}"
    content = '\ufeffdate,text\r\n2024-01-01,"one, ""two""\r\n  é "\r\n\r\n,three\r\n'
    path.write_bytes(PACKERS[suffix](content.encode()))
    assert read(path) == (['one, "two"\né', "three"], [])
    left_out = []
    shard = (Segment("s", str(path), 0, path.stat().st_size),)
    dated = Reader(dates=Dates("year"))
    documents = dated.raw(shard, None, lambda why, *_: left_out.append(why))
    assert list(documents) == [("2024/s", 'one, "two"\r\n  é ')]
    assert left_out == [LeftOut.UNDATED]


def test_csv_that_is_bad(tmp_path, small):
    small(1 << 10)
    path = tmp_path / "a.csv"
    rows = [b"text,n", b"good,1", b"few", b"\xff,1", b'"x"y,1', b"again,1", b'"open,1', b"end,1"]
    path.write_bytes(b"\n".join(rows))
    documents, skips = read(path)
    assert documents == ["good", "again"]
    assert skips == [
        (3, "1 values, where line 1 names 2 columns"),
        (4, "not UTF-8"),
        (5, "malformed CSV (',' expected after '\"')"),
        (7, "malformed CSV (unexpected end of data)"),
    ]
    assert str(Skipped(f"{path}.gz", 3, "bad")).endswith("a.csv.gz: bad at line 3")
    no_text = "no field `body` that holds a string (--text-key names another)"
    path.write_text("text,n\ngood,1\n")
    assert read(path, Reader(text_key="body", on_bad_input="skip")) == ([], [(2, no_text)])
    path.write_text(f"text,n\n{'x' * 21},1\n")
    assert read(path) == ([], [(2, "a document longer than 20 bytes")])
    for header, problem in (
        ("date;text", "a single column, 'date;text': are commas between the columns?"),
        ("text,text", "two columns `text`"),
    ):
        path.write_text(f"{header}\n1,2\n")
        assert read(path) == ([], [(1, problem)])
