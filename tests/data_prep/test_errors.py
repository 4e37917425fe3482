"""Bad input gives one line on stderr and exit code 2, and leaves no stream."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from .corpus_files import PACKERS

TEXT = b"one two three\n\nfour five six\n\nseven eight nine ten\n"


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def refused(prepare, tmp_path, capsys):
    """Run and return the line on stderr."""

    def call(*arguments, **flags):
        sizes = {"mega_batches": 1, "words": 3, "valid_words": 3, "vocab_size": 25}
        with pytest.raises(SystemExit) as error:
            prepare(*arguments, **{"out": tmp_path / "out"} | sizes | flags)
        assert error.value.code == 2
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if not line.endswith("other settings; removed")]
        assert len(lines) == 1
        assert not captured.out
        assert lines[0].startswith("error: ")
        assert not (tmp_path / "out" / "stream.json").exists()
        return lines[0]

    return call


def test_bad_text_and_json(refused, tmp_path):
    data = TEXT + b"\nok \xff\xfe bad\n"
    path = write(tmp_path / "a.txt.gz", gzip.compress(data))
    assert f"{path}: not UTF-8 at byte {data.index(0xFF)}" in refused(path)
    good = json.dumps({"text": "one two"}).encode() + b"\n"
    for line, message in ((b'{"text": "a\n', "malformed JSON"), (b'{"body": "a"}\n', "no field `text`")):
        path = write(tmp_path / f"{len(line)}.jsonl", good + b"\n" + good + line + good)
        found = refused(path)
        assert found.startswith(f"error: {path}: {message}")
        assert f" at byte {2 * len(good) + 1}; fix or remove it, or" in found


def test_damaged_archives(refused, tmp_path):
    for suffix in (".gz", ".zst", ".bz2", ".xz"):
        whole = PACKERS[suffix](TEXT * 50)
        for number, data in enumerate((whole[:-3], b"no archive at all", b"")):
            path = write(tmp_path / f"{number}.txt{suffix}", data)
            assert f"{path}: damaged or truncated" in refused(path)
        assert f"{path}: damaged or truncated" in refused(path, documents="file")


def test_nothing_to_read(refused, tmp_path):
    assert "no documents" in refused(write(tmp_path / "blank.txt", b" \n\n\t\n"))
    assert "no documents" in refused(write(tmp_path / "empty.txt", b""))
    assert "no such file" in refused(tmp_path / "absent.txt")
    assert "*.txt: matches no file" in refused(tmp_path / "absent" / "*.txt")
    (tmp_path / "folder").mkdir()
    assert "an empty directory" in refused(tmp_path / "folder")
    path = write(tmp_path / "folder" / "a.pdf", b"x")
    assert f"{path}: unknown kind of file" in refused(tmp_path / "folder")
    assert f"{path}: unknown kind of file" in refused(path)
    assert f"{path}: unknown kind of file" in refused(tmp_path / "fold*" / "*")


def test_a_file_of_two_sources(refused, tmp_path):
    path = write(tmp_path / "folder" / "a.txt", TEXT)
    assert f"{path}: is in both one and two" in refused(f"one={path}", f"two={tmp_path}/folder")


def test_a_missing_package_is_named_at_once(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(tmp_path / "a.parquet", b"PAR1")
    assert refused(path) == f"error: {path}: needs pyarrow; pip install 'alma-macroscale[corpus]'"


def test_too_small_a_corpus(refused, tmp_path):
    path = write(tmp_path / "a.txt", TEXT + b"\n" + TEXT)
    line = refused(path, words=100)
    assert "10 words in 3 documents after dropping 3 duplicates" in line
    assert "193 words are missing" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"words": "0"}, "not a positive whole number"),
        ({"words": "1.5"}, "not a positive whole number"),
        ({"words": "many"}, "not a positive whole number"),
        ({"mega_batches": "-1"}, "--mega-batches"),
        ({"vocab_size": None}, "give one of --vocab-size, --tokenizer, --bpe"),
        ({"tokenizer": "x.model"}, "not allowed with argument"),
        ({"tokenizer": "x.model", "vocab_size": None}, "x.model: no such file"),
        ({"valid_source": "other"}, "no such source; choose from a"),
        ({"documents": "page"}, "invalid choice"),
        ({"documents": "a=page"}, "invalid choice: 'a=page'"),
        ({"documents": "b=file"}, "--documents b=: no such source; choose from a"),
        ({"on_bad_input": "ignore"}, "invalid choice"),
        ({"frobnicate": "1"}, "unrecognized arguments"),
        ({"partition": "cpu", "mem_gb": "4"}, "--partition, --mem-gb: only with --cluster slurm"),
    ],
)
def test_bad_flags(refused, tmp_path, flags, message):
    assert message in refused(write(tmp_path / "a.txt", TEXT), **flags)


def test_vocabulary_that_does_not_fit(refused, tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    assert "--vocab-size 5,000 is too large" in refused(path, vocab_size=5000)
    assert "--vocab-size 2 is too small" in refused(path, vocab_size=2)


def test_bad_model(refused, tmp_path):
    model = write(tmp_path / "bad.model", b"nothing")
    line = refused(write(tmp_path / "a.txt", TEXT), vocab_size=None, tokenizer=model)
    assert "not a SentencePiece model" in line
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir()), "found out too late"


def test_out_with_other_files(refused, tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    other = write(tmp_path / "home" / "notes", b"mine").parent
    assert "not empty" in refused(path, out=other)
    assert "cannot become one" in refused(path, out=path)
    assert "cannot become one" in refused(path, out=path / "below")
    assert path.read_bytes() == TEXT


def test_a_stream_of_other_settings(prepare, capsys, tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    sizes = {"mega_batches": 1, "words": 3, "valid_words": 3, "vocab_size": 10}
    out = prepare(path, out=tmp_path / "out", **sizes)
    before = (out / "stream.json").read_bytes()
    for change, named in (({"seed": 3}, "(seed)"), ({"words": 4}, "(eval_words, words)")):
        with pytest.raises(SystemExit) as error:
            prepare(path, out=out, **sizes | change)
        assert error.value.code == 2
        assert f"made with other settings {named}" in capsys.readouterr().err
    write(path, TEXT + b"\nmore\n")
    with pytest.raises(SystemExit):
        prepare(path, out=out, **sizes)
    assert "(input)" in capsys.readouterr().err
    assert (out / "stream.json").read_bytes() == before


def test_all_problems_are_reported_at_once_files_first(refused, tmp_path, capsys):
    out = tmp_path / "out"
    none = dict.fromkeys(("mega_batches", "words", "valid_words", "vocab_size"))
    absent, other = tmp_path / "absent.txt", tmp_path / "other.txt"
    assert refused(absent, f"b={other}", out=out, documents="c=file", valid_source="d", **none) == (
        f"error: {absent}: no such file or directory; {other}: no such file or directory; "
        "--documents c=: no such source; choose from absent, b; "
        "--valid-source d: no such source; choose from absent, b; "
        "give --mega-batches, --words, --valid-words; "
        "give one of --vocab-size, --tokenizer, --bpe: the tokenizer"
    )
    assert not out.exists()
    flags = {"vocab_size": None, "bpe": "gpt2", "gpt2_encoder_json": tmp_path / "e.json"}
    line = refused(absent, **flags)
    for part in (f"{absent}: no such", "e.json: no such file", "all three or none"):
        assert part in line
    path = write(tmp_path / "a.txt", TEXT)
    flags = {"tokenizer": tmp_path / "x.model", "gpt2_vocab_bpe": path, "vocab_size": None}
    assert "x.model: no such file; --bpe gpt2, --gpt2" in refused(path, **flags)
    assert refused("=x", documents="c=file").count("expected PATH or NAME=PATH") == 1


def test_errors_in_workers_are_one_line_too(tmp_path):
    sources = [write(tmp_path / f"{name}.txt.gz", b"no archive") for name in "abc"]
    script = write(
        tmp_path / "run.py",
        b"from data_prep import __main__, documents\n"
        b"if __name__ == '__main__':\n    documents.SHARD_BYTES = 1\n    __main__.main()\n",
    )
    sizes = {"mega-batches": 1, "words": 3, "valid-words": 3, "vocab-size": 10, "workers": 2}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    result = subprocess.run(
        [sys.executable, script, *sources, *flags, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "damaged or truncated" in result.stderr
