"""Installation under the lock: nothing is lost, and files of different settings never mix."""

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.files import LOCK, locked
from alma.stream import Stream
from data_prep import __main__ as cli
from data_prep import install, pipeline, stages

from .conftest import make_documents, run
from .test_pipeline import digests

SIZES = "--words 1500 --valid-words 300 --vocab-size 120 --workers 1"
APPEND = ("--append", "--workers", "1", "--mega-batches")
alma_data = functools.partial(run, cli.main)


class _KilledError(BaseException):
    """Stands for SIGKILL: no handler of the program catches it."""


def command(
    *line: object, script: str = "from data_prep import __main__; __main__.main()"
) -> list[str]:
    return [sys.executable, "-c", script, *map(str, line)]


@contextlib.contextmanager
def killed_after(monkeypatch, renames: int):
    """`install` is killed before rename number `renames`, if it gets that far."""
    left = renames
    replace = os.replace

    def fatal(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise _KilledError
        replace(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(_KilledError):
        patch.setattr(install, "os", SimpleNamespace(replace=fatal))
        yield


@pytest.fixture
def staged(corpus, tmp_path, monkeypatch):
    """The command of a stream, its files, and an --out where all is ready to be installed."""
    line = [corpus, "--mega-batches", 2, *SIZES.split(), "--out"]
    alma_data(*line, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(install, "install", lambda work, out: Stream.load(tmp_path / "whole"))
        alma_data(*line, tmp_path / "staged")
    return line, digests(tmp_path / "whole"), tmp_path / "staged"


def test_a_killed_installation_is_finished_by_any_command(staged, tmp_path, monkeypatch, capsys):
    """The same command, others with --out, and --append."""
    line, whole, ready = staged
    (tmp_path / "one.txt").write_text("\n\n".join(make_documents(3, 300)), "utf-8")
    inodes = {path.stat().st_ino for path in ready.glob(".work-*/stream/**/*.bin")}
    for renames in range(15):
        out = tmp_path / f"out{renames}"
        subprocess.run(["cp", "-al", ready, out], check=True)
        with killed_after(monkeypatch, renames):
            alma_data(*line, out)
        kind = renames % 3
        if kind == 0:
            alma_data(*line, out)
        elif kind == 1:
            with pytest.raises(SystemExit):
                alma_data(*line, out, "--seed", 5)
            assert "made with other settings (seed)" in capsys.readouterr().err
        else:
            alma_data(tmp_path / "one.txt", *APPEND, 1, "--words", 500, "--out", out)
            assert len(Stream.load(out).megabatches) == 3
        assert digests(out).items() >= whole.items()
        assert {path.stat().st_ino for path in out.rglob("*.bin")} >= inodes, "renamed, not copied"


def test_what_other_settings_have_left_is_removed(corpus, tmp_path, monkeypatch, capsys):
    """Killed while a work directory is removed: no run resumes in its remains."""
    line = [corpus, "--mega-batches", 2, *SIZES.split(), "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(stages.cut, "cut_corpus", lambda **_: sys.exit(3))
        with pytest.raises(SystemExit, match="3"):
            alma_data(*line, "--seed", 4)
    with monkeypatch.context() as patch, contextlib.suppress(_KilledError):
        patch.setattr(
            install.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(_KilledError)
        )
        alma_data(*line)
    assert not install.works(tmp_path / "out")
    assert install.leftovers(tmp_path / "out")
    assert "left by an interrupted run; removed" in capsys.readouterr().err
    alma_data(*line)
    digests(tmp_path / "out")


@pytest.fixture
def two(corpus, prepare, tmp_path):
    """A stream, and two commands that append to it."""
    out = prepare(corpus, out=tmp_path / "out")
    lines = []
    for n, name in ((3, "one"), (4, "two")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(make_documents(n, 300)), "utf-8")
        lines.append([tmp_path / f"{name}.txt", *APPEND, 1, "--out", out])
    return out, lines


def test_an_addition_that_ends_just_before_another_has_the_lock_is_not_lost(two, monkeypatch):
    out, (one, other) = two
    before = digests(out)

    @contextlib.contextmanager
    def late(directory):
        subprocess.run(command(*one), check=True)
        with locked(directory):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "locked", late)
        alma_data(*other)
    assert digests(out).items() > before.items()
    assert [list(part.sources) for part in Stream.load(out).megabatches[3:]] == [["one"], ["two"]]


PAUSED = """
import sys
from data_prep import __main__, cut, install
corpus = cut.cut_corpus
def pause(**arguments):
    print("locked", flush=True)
    sys.stdin.readline()
    corpus(**arguments)
cut.cut_corpus = pause
__main__.main()
"""


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_second_command_at_once_writes_nothing(two, tmp_path, capsys):
    """It exits with one line."""
    out, (one, other) = two
    process = subprocess.Popen(
        command(*one, script=PAUSED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    during = contents(tmp_path)
    with pytest.raises(SystemExit) as error:
        alma_data(*other)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another process is at work here" in line
    assert contents(tmp_path) == during
    process.communicate("\n", 60)
    assert process.returncode == 0
    alma_data(*other)
    assert [list(part.sources) for part in Stream.load(out).megabatches[3:]] == [["one"], ["two"]]


def test_a_finished_stream_may_be_read_only(corpus, prepare, tmp_path, monkeypatch, capsys):
    """So is one without a lock file: no file is created."""
    out = prepare(corpus, out=tmp_path / "out")
    (out / LOCK).unlink()
    monkeypatch.setattr(pipeline, "locked", functools.partial(pytest.fail, "locked"))
    prepare(corpus, out=out)
    assert "nothing to do" in capsys.readouterr().err
