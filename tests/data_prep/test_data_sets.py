"""Data sets in folders as the Hub has them and as datasets.save_to_disk writes them."""

import json
import re

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from alma.errors import UserError
from data_prep.compressed import Skipped
from data_prep.data_sets import files_of
from data_prep.documents import Reader, find_files
from data_prep.inputs import named_files
from tests.data_prep.test_formats import read

from .conftest import make_documents


def table(texts):
    return pyarrow.table({"id": range(len(texts)), "text": texts, "date": ["2023-05"] * len(texts)})


def write_parquet(path, texts=("one", "two")):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table(list(texts)), path)


def write_arrow(path, texts=("one", "two"), rows=100):
    """A stream, as datasets writes it."""
    columns = table(list(texts))
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, columns.schema) as stream,
    ):
        stream.write_table(columns, max_chunksize=rows)


def save_to_disk(folder, split, shards=2):
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for name in names:
        write_arrow(folder / name, [f"{split} {name}"])
    state = {"_data_files": [{"filename": name} for name in names], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def chosen(root, split=None):
    files = files_of(str(root), split)
    return files and [path.relative_to(root).as_posix() for path in files]


def test_a_split_of_a_hub_folder_is_read_and_the_rest_is_named(tmp_path, capsys):
    names = [f"train-{n:05}-of-00003" for n in range(3)]
    for name in (*names, "test-00000-of-00001-a09b74b3", "validation-00000-of-00001"):
        write_parquet(tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("# Card")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert chosen(tmp_path) == [f"data/{name}.parquet" for name in names]
    assert capsys.readouterr().err == (
        f"{tmp_path}: split train (3 files); left out: split test (1 file), "
        "split validation (1 file), README.md, dataset_infos.json\n"
    )
    assert find_files(str(tmp_path), "test") == [
        f"{tmp_path}/data/test-00000-of-00001-a09b74b3.parquet"
    ]
    assert len(named_files([f"news={tmp_path}"], "train")) == 3
    with pytest.raises(UserError, match="no split dev; choose from test, train, validation"):
        find_files(str(tmp_path), "dev")
    (tmp_path / "data" / f"{names[1]}.parquet").unlink()
    with pytest.raises(UserError, match="split train lacks its shard 00001-of-00003") as error:
        find_files(str(tmp_path))
    remedy = str(error.value).split("'")[1]
    assert len(find_files(remedy)) == 2


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["a/0000.parquet", "b.parquet"], None, None),  # no splits: the folder as any other
        (["train.parquet", "notes.txt"], None, None),
        (["train/0000.parquet", "test/0000.parquet"], None, ["train/0000.parquet"]),
        (["part-00000-of-00001.parquet"], None, ["part-00000-of-00001.parquet"]),
        (["news-train.arrow", "cache-1f.arrow"], None, ["news-train.arrow"]),
        (["news-train-00000-of-00001.arrow", "news-test.arrow"], "test", ["news-test.arrow"]),
        (["en/train.parquet", "de/test.parquet"], None, ["en/train.parquet"]),
        (["en/train.parquet", "de/train.parquet"], None, r"configurations \(de, en\); name one: "),
        (["dev.parquet", "test.parquet"], None, "no split train; give --split: dev, test"),
        (["latest.parquet"], "train", "no folder of a data set .*; leave out --split train"),
    ],
)
def test_splits_are_in_names(tmp_path, names, split, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            find_files(str(tmp_path), split)
    else:
        assert chosen(tmp_path, split) == expected


def test_what_save_to_disk_writes_is_read(tmp_path, capsys):
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "train" / "cache-12.arrow").touch()
    names = ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    assert chosen(tmp_path) == names
    assert "left out: split test (2 files), train/cache-12.arrow\n" in capsys.readouterr().err
    assert read(tmp_path / names[0]) == (["train data-00000-of-00002.arrow"], [])
    assert len(find_files(str(tmp_path / "test"))) == 2
    with pytest.raises(UserError, match="no split train"):
        find_files(str(tmp_path / "test"), "train")
    (tmp_path / names[0]).unlink()
    with pytest.raises(UserError, match="data-00000-of-00002.arrow: missing, though state.json"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json: damaged"),
        ("{}", "state.json: lists no data files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "state.json: lists no data files"),
        (
            '{"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [1]}',
            "state.json: has the order of its rows in another file; save it again",
        ),
    ],
)
def test_a_damaged_folder_of_save_to_disk_is_named(tmp_path, state, message):
    write_arrow(tmp_path / "a.arrow")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match=message):
        find_files(str(tmp_path))


@pytest.mark.parametrize("kind", ["stream", "file", "dictionary"])
def test_arrow_may_be_cut_anywhere(tmp_path, kind):
    texts = [f"document {n}\n\nword{n % 7}" for n in range(3000)]
    path = tmp_path / "a.arrow"
    if kind == "file":
        pyarrow.feather.write_feather(table(texts), path, chunksize=90, compression="lz4")
    else:
        column = pyarrow.array(texts)
        if kind == "dictionary":
            column = column.dictionary_encode()
        write_arrow(path, column, rows=1500)
    for shard_bytes in (100, 3000, 1 << 30):
        documents, skips = read(path, None, shard_bytes)
        assert (documents, skips) == ([text.replace("\n\n", "\n") for text in texts], [])


def test_arrow_that_is_bad(tmp_path, small):
    small(1 << 10)
    path = tmp_path / "a.arrow"
    broken = pyarrow.array([b"\xff"]).view(pyarrow.string())
    write_arrow(path, pyarrow.chunked_array([["good", None, "x" * 21], broken, ["\x00"]]))
    no_text = "no field `text` that holds a string (--text-key names another)"
    skips = [(1, no_text), (2, "a document longer than 20 bytes"), (3, "not UTF-8")]
    assert read(path) == (["good", "\x00"], skips)
    for key, problem in (
        ("id", "the column `id` holds int64, not string (--text-key names another)"),
        (
            "body",
            "no column `body`; the columns are `id`, `text`, `date` (--text-key names another)",
        ),
    ):
        skips = [(0, problem)]
        assert read(path, Reader(text_key=key, on_bad_input="skip")) == ([], skips)
    assert str(Skipped(str(path), 3, "bad")).endswith("bad at record 3")
    write_arrow(path, ["one", "two"], rows=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    documents, [(offset, reason)] = read(path)
    assert (documents, offset) == (["one"], 1)
    assert reason.startswith("damaged or truncated (")
    path.write_bytes(b"\x00" * 100)
    documents, [(offset, reason)] = read(path)
    assert (documents, offset) == ([], 0)


def test_offsets_outside_a_batch_are_damage(tmp_path):
    """A crafted file must not read other memory."""
    path = tmp_path / "a.arrow"
    write_arrow(path, ["a" * 40, "b"])
    data = path.read_bytes()
    place = data.index((40).to_bytes(4, "little") + (41).to_bytes(4, "little"))
    path.write_bytes(data[:place] + (1 << 30).to_bytes(4, "little") + data[place + 4 :])
    documents, [(_, reason)] = read(path)
    assert (documents, reason[:20]) == ([], "damaged or truncated")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"text_key": "body"}, "no column `body`; the columns are `id`, `text`, `date`"),
        ({"by": "year", "date_key": "day"}, "no column `day`; the columns are .*--date-key"),
        ({"split": "dev"}, "no split dev; choose from test, train"),
    ],
)
def test_a_wrong_column_or_split_is_refused_before_the_start(
    tmp_path, prepare, capsys, flags, message
):
    write_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet")
    sizes = {"mega_batches": None, "words": None, "eval_words": 100} if "by" in flags else {}
    with pytest.raises(SystemExit, match="2"):
        prepare(tmp_path / "hub", out=tmp_path / "out", **sizes, **flags)
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_a_stream_of_a_data_set_equals_that_of_its_lines(tmp_path, prepare):
    documents = make_documents(1, 300)
    write_parquet(tmp_path / "hub" / "train-00000-of-00002.parquet", documents[:150])
    write_parquet(tmp_path / "hub" / "train-00001-of-00002.parquet", documents[150:])
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", ["left out"])
    write_arrow(tmp_path / "one.arrow", documents)
    lines = [json.dumps({"text": text}) for text in documents]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    streams = []
    for name in ("hub", "one.arrow", "lines.jsonl"):
        out = prepare(f"a={tmp_path / name}", out=tmp_path / f"{name}_stream")
        streams.append([(out / part).read_bytes() for part in ("test.bin", "valid.bin")])
    assert streams[0] == streams[1] == streams[2]
