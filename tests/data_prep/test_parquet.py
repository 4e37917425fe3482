"""Columns of Parquet files whose type is no plain string."""

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.documents import Reader
from tests.data_prep.test_formats import read


@pytest.fixture
def table(tmp_path):
    columns = {"lists": [["a", "b"], ["c"]], "coded": pyarrow.array(["a", "b"]).dictionary_encode()}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def test_a_column_of_lists_is_named_with_its_type(table):
    documents, [(offset, reason)] = read(table, Reader(text_key="lists", on_bad_input="skip"))
    assert (documents, offset) == ([], 0)
    assert reason.startswith("the column `lists` holds list<")
    assert reason.endswith(", not string (--text-key names another)")


@pytest.mark.parametrize("shard_bytes", [100, 1 << 30])
def test_a_bad_row_is_named_by_its_number_in_the_file(tmp_path, shard_bytes):
    texts = [f"document {number}" for number in range(90)]
    texts[5] = texts[71] = None
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    documents, skips = read(path, None, shard_bytes)
    assert len(documents) == 88
    assert [offset for offset, _ in skips] == [5, 71]


def test_a_coded_column_is_text(table):
    assert read(table, Reader(text_key="coded")) == (["a", "b"], [])
