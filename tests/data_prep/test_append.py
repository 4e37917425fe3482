"""--append: adds mega-batches of new documents to a finished stream."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alma.files import LOCK
from alma.stream import Stream

from .conftest import make_documents
from .test_pipeline import digests, texts

NEW = {"mega_batches": None, "words": None, "valid_words": None, "vocab_size": None}


@pytest.fixture
def stream(corpus, prepare, tmp_path) -> Path:
    """Three mega-batches of 1,500 words."""
    return prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "stream")


@pytest.fixture
def more(corpus, tmp_path) -> Path:
    """600 new documents and the whole corpus of the stream."""
    old = "\n\n".join(path.read_text("utf-8") for path in sorted(corpus.iterdir()))
    new = make_documents(3, 600)
    path = tmp_path / "more.txt"
    path.write_text("\n\n".join([*new[:300], old, *new[300:], *new[:7]]), "utf-8")
    return path


def test_new_documents_alone_are_added(stream, more, prepare, capsys):
    before = {path: path.stat().st_mtime_ns for path in stream.rglob("[!.]*") if path.is_file()}
    old = digests(stream)
    had = [text for part in Stream.load(stream).parts for text in texts(stream, part.prefix)]
    capsys.readouterr()
    prepare(more, "--append", out=stream, **NEW | {"mega_batches": 2})
    printed = capsys.readouterr().out
    now = digests(stream)
    assert now.items() >= old.items()
    changed = {path for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed - {stream / LOCK} == {stream / "stream.json"}
    longer = Stream.load(stream)
    assert [part.name for part in longer.megabatches] == [f"megabatch_{t:02d}" for t in range(5)]
    added = [text for part in longer.megabatches[3:] for text in texts(stream, part.prefix)]
    assert not set(added) & set(had)
    assert len(added) == len(set(added)) == sum(part.documents for part in longer.megabatches[3:])
    assert set(added) & set(make_documents(3, 600))
    # the surplus of alpha and web was in no part, so it may be added
    assert set(added) <= {*make_documents(3, 600), *make_documents(1, 300), *make_documents(2, 200)}
    for part in longer.megabatches[3:]:
        longest = max(len(text.split()) for text in added)
        assert abs(part.words - 1500) <= longest / 2 + 1
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows[1:8]] == [part.name for part in longer.parts]
    assert rows[0][-3:] == ["alpha", "more", "web"]


def test_the_same_addition_twice_and_another(stream, more, prepare, tmp_path, capsys):
    prepare(more, "--append", out=stream, **NEW)
    once = digests(stream)
    prepare(more, "--append", out=stream, **NEW)
    assert "nothing to do" in capsys.readouterr().err
    assert digests(stream) == once
    (tmp_path / "other.txt").write_text("\n\n".join(make_documents(4, 300)), "utf-8")
    prepare(tmp_path / "other.txt", "--append", out=stream, **NEW | {"words": "1000"})
    assert digests(stream).items() > once.items()
    assert len(Stream.load(stream).megabatches) == 5
    assert [each["first"] for each in Stream.load(stream).appended] == [3, 4]


def test_the_first_command_still_finds_its_stream(corpus, stream, more, prepare, capsys):
    prepare(more, "--append", out=stream, **NEW)
    longer = digests(stream)
    prepare(corpus / "alpha.txt", corpus / "web.txt", out=stream)
    assert "nothing to do" in capsys.readouterr().err
    assert digests(stream) == longer


def test_the_order_is_that_of_the_seed(corpus, more, prepare, tmp_path):
    """Added documents are in hash order with the seed of the stream."""
    out = prepare(corpus, out=tmp_path / "seven", seed=7)
    prepare(more, "--append", out=out, **NEW | {"mega_batches": 2})
    for part in Stream.load(out).parts:
        keys = np.fromfile(out / f"{part.prefix}.keys", ">u8").reshape(-1, 2)
        assert len(keys) == part.documents
        assert (np.diff(keys[:, 0].astype(np.float64)) > 0).all()


def test_append_killed_and_run_again(corpus, stream, more, prepare, tmp_path):
    other = prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "other")
    prepare(more, "--append", out=stream, **NEW | {"mega_batches": 2})
    script = """
import os, signal, sys
import alma.files
from data_prep import __main__
left, replace = int(sys.argv.pop(1)), os.replace
def fatal(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*arguments)
alma.files.os.replace = fatal
__main__.main()
"""
    line = [str(more), "--append", "--out", str(other), "--mega-batches", "2", "--workers", "1"]
    codes = []
    while not codes or codes[-1]:
        assert len(codes) < 12
        codes.append(subprocess.run([sys.executable, "-c", script, "6", *line]).returncode)
        assert Stream.load(other).parts  # a stream at any moment
    assert len(codes) > 2
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert digests(other) == digests(stream)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vocab_size": 120}, "--vocab-size: not with --append"),
        ({"valid_words": 100}, "--valid-words: not with --append"),
        ({"seed": 0}, "--seed: not with --append"),
        ({"max_document_words": 20}, "the stream was made with no --max-document-words"),
        ({"words": 100_000}, "words are missing; add text or ask for fewer"),
    ],
)
def test_flags_that_append_refuses(stream, more, prepare, capsys, flags, message):
    old = digests(stream)
    with pytest.raises(SystemExit) as error:
        prepare(more, "--append", out=stream, **NEW | flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert Stream.load(stream).parts
    assert all((stream / name).is_file() for name in old)


def test_append_needs_the_keys_of_the_stream(stream, more, prepare, capsys):
    (stream / "valid.keys").unlink()
    with pytest.raises(SystemExit):
        prepare(more, "--append", out=stream, **NEW)
    assert (
        "valid.keys: missing; the documents of the stream are unknown without it" in capsys.readouterr().err
    )
    assert not list(stream.glob(".work-*"))


@pytest.mark.parametrize("name", ["valid.keys", "megabatch_00/train.bin"])
def test_append_needs_whole_files(stream, more, prepare, capsys, name):
    with open(stream / name, "r+b") as file:
        file.truncate(24)
    with pytest.raises(SystemExit):
        prepare(more, "--append", out=stream, **NEW)
    assert f"{name}: damaged; restore the file" in capsys.readouterr().err
    assert not list(stream.glob(".work-*"))


def test_nothing_to_append_to(more, prepare, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare(more, "--append", out=tmp_path / "none", **NEW)
    assert "no finished stream here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_run_continues_with_the_longer_stream(stream, more, prepare):
    """An addition leaves unchanged what slurm.launch compares."""
    record = json.loads((stream / "stream.json").read_text("utf-8"))
    prepare(more, "--append", out=stream, **NEW)
    longer = json.loads((stream / "stream.json").read_text("utf-8"))
    assert longer["megabatches"][:3] == record["megabatches"]
    for name in ("files", "valid", "test", "settings", "corpus", "seed", "vocab_size"):
        assert longer[name] == record[name]
    assert os.stat(stream / "dict.txt").st_size == record["files"]["dict.txt"]["size"]
