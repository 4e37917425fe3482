"""Installation under the lock: nothing is lost, and files of different settings never mix."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.files import LOCK, locked
from alma.stream import Stream
from data_prep import __main__ as cli
from data_prep import documents, install, pipeline, plan

from .conftest import make_documents
from .test_pipeline import COMMAND, digests

SIZES = "--words 1500 --valid-words 300 --vocab-size 120 --workers 1"
APPEND = ("--append", "--workers", "1", "--mega-batches")


class _KilledError(BaseException):
    """Stands for SIGKILL: no handler of the program catches it."""


def run(monkeypatch, *line: object) -> None:
    monkeypatch.setattr(sys, "argv", ["data_prep", *map(str, line)])
    cli.main()


def command(*line: object, script: str = "from data_prep import __main__; __main__.main()") -> list[str]:
    return [sys.executable, "-c", script, *map(str, line)]


@contextlib.contextmanager
def killed_after(monkeypatch, renames: int):
    """`install` is killed before rename number `renames`, if it gets that far."""
    left, replace = renames, os.replace

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
def mixed(corpus, tmp_path, monkeypatch):
    """Two commands for one --out the stream of each, and an --out with both to install."""
    lines, wholes = [], []
    for seed, megabatches in ((1, 3), (2, 2)):
        lines.append([corpus, "--seed", seed, "--mega-batches", megabatches, *SIZES.split(), "--out"])
        run(monkeypatch, *lines[-1], tmp_path / f"whole{seed}")
        wholes.append(digests(tmp_path / f"whole{seed}"))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(install, "install", lambda work, out: Stream.load(tmp_path / "whole1"))
        for line in lines:
            run(patch, *line, out)
    assert len(install.works(out)) == 2
    assert {path.name for path in out.iterdir()} == {LOCK, *(path.name for path in install.works(out))}
    return lines, wholes, out


def test_two_seeds_killed_in_turn_while_they_are_installed(mixed, tmp_path, monkeypatch, capsys):
    """The command that finishes makes the same stream as alone."""
    lines, wholes, ready = mixed
    rng = random.Random(0)
    for attempt in range(25):
        out = tmp_path / f"out{attempt}"
        subprocess.run(["cp", "-a", ready, out], check=True)
        last = rng.randrange(2)
        for _ in range(rng.randint(1, 5)):
            last = 1 - last
            with killed_after(monkeypatch, rng.randrange(15)):
                run(monkeypatch, *lines[last], out)
                break  # not killed: fewer files were left
        else:
            last = rng.randrange(2)
            run(monkeypatch, *lines[last], out)
        assert digests(out) == wholes[last]
        assert "removed" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            run(monkeypatch, *lines[1 - last], out)
        assert "made with other settings" in capsys.readouterr().err


def test_two_seeds_killed_in_turn_at_random_moments(corpus, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SHARD_BYTES", 12000)
    monkeypatch.setattr(plan, "BUCKET_BYTES", 6000)
    lines = [[corpus, "--seed", seed, "--mega-batches", 3, *SIZES.split(), "--out"] for seed in (1, 2)]
    wholes = []
    for line in lines:
        run(monkeypatch, *line, tmp_path / f"whole{len(wholes)}")
        wholes.append(digests(tmp_path / f"whole{len(wholes)}"))
    rng = random.Random(1)
    out = tmp_path / "out"
    code, turn = -signal.SIGKILL, 0
    while code:
        turn += 1
        assert turn < 30, "no progress between kills"
        allowed = rng.randint(8, 40)
        line = lines[turn // 4 % 2]  # a change removes what the other has done
        code = subprocess.run(command(allowed, *line, out, script=COMMAND)).returncode
        assert code in (0, -signal.SIGKILL)
    assert turn > 3
    assert digests(out) == wholes[turn // 4 % 2]


def test_a_killed_installation_is_undone_by_another_addition(corpus, prepare, tmp_path, monkeypatch):
    """Made again later, it contains what is new by then."""
    out = prepare(corpus, out=tmp_path / "out")
    before = digests(out)
    for n, name in ((3, "one"), (4, "two")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(make_documents(n, 300)), "utf-8")
    one = [tmp_path / "one.txt", *APPEND, 2, "--out", out]
    with killed_after(monkeypatch, 4):
        run(monkeypatch, *one)
    assert (out / "megabatch_04").exists()
    assert len(Stream.load(out).megabatches) == 3
    run(monkeypatch, tmp_path / "two.txt", *APPEND, 1, "--out", out)
    assert digests(out).items() > before.items()
    assert Stream.load(out).megabatches[3].sources == {"two": Stream.load(out).megabatches[3].words}
    assert not (out / "megabatch_04").exists()
    run(monkeypatch, *one)
    assert digests(out).items() > before.items()
    assert [list(part.sources) for part in Stream.load(out).megabatches[3:]] == [["two"], ["one"], ["one"]]


def test_a_finished_command_undoes_a_killed_addition(corpus, prepare, tmp_path, monkeypatch):
    out = prepare(corpus, out=tmp_path / "out")
    before = digests(out)
    (tmp_path / "one.txt").write_text("\n\n".join(make_documents(3, 300)), "utf-8")
    with killed_after(monkeypatch, 2):
        run(monkeypatch, tmp_path / "one.txt", *APPEND, 1, "--out", out)
    assert (out / "megabatch_03" / "train.bin").exists()
    prepare(corpus, out=out)
    assert digests(out) == before


def test_killed_while_work_directories_are_removed(mixed, monkeypatch):
    """No run resumes in their remains; the same command removes them."""
    lines, wholes, out = mixed

    def kill(*_, **__):
        raise _KilledError

    with monkeypatch.context() as patch:
        patch.setattr(install.shutil, "rmtree", kill)
        with pytest.raises(_KilledError):
            run(patch, *lines[0], out)
    assert not install.works(out)
    assert len(install.leftovers(out)) > 0
    run(monkeypatch, *lines[0], out)
    assert digests(out) == wholes[0]


def test_installing_takes_no_disk_space(mixed, monkeypatch):
    """Files are renamed, not copied."""
    lines, _, out = mixed
    (work,) = (path for path in install.works(out) if Stream.load(path / "stream").seed == 2)
    before = {path.stat().st_ino for path in (work / "stream").rglob("*.bin")}
    run(monkeypatch, *lines[1], out)
    assert {path.stat().st_ino for path in out.rglob("*.bin")} == before


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
        run(patch, *other)
    assert digests(out).items() > before.items()
    assert [list(part.sources) for part in Stream.load(out).megabatches[3:]] == [["one"], ["two"]]


PAUSED = """
import sys
from data_prep import __main__, cut, install
corpus = cut.cut_corpus
def pause(*arguments):
    print("locked", flush=True)
    sys.stdin.readline()
    corpus(*arguments)
cut.cut_corpus = pause
__main__.main()
"""


def start_paused(*line: object) -> subprocess.Popen[str]:
    """Run the command in a process that holds the lock and waits for a line on stdin."""
    process = subprocess.Popen(
        command(*line, script=PAUSED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    return process


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_two_additions_at_once(two, monkeypatch, capsys):
    """The second exits with one line and writes nothing."""
    out, (one, other) = two
    first = start_paused(*one)
    during = contents(out)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *other)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another process is at work here" in line
    assert contents(out) == during
    first.communicate("\n", 60)
    assert first.returncode == 0
    run(monkeypatch, *other)
    assert [list(part.sources) for part in Stream.load(out).megabatches[3:]] == [["one"], ["two"]]
    digests(out)


def test_a_second_build_and_an_addition_during_the_first_build(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    line = [corpus, "--mega-batches", 3, *SIZES.split(), "--out", out]
    first = start_paused(*line)
    during = contents(out)
    tree = set(out.rglob("*"))
    for second, message in (
        (line, "another process is at work here"),
        ([*line, "--seed", 2], "another process is at work here"),
        ([corpus, *APPEND, 1, "--out", out], "no finished stream here"),
    ):
        with pytest.raises(SystemExit) as error:
            run(monkeypatch, *second)
        assert error.value.code == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert message in said
        assert contents(out) == during
        assert set(out.rglob("*")) == tree
    first.communicate("\n", 60)
    assert first.returncode == 0
    digests(out)


def test_a_finished_stream_may_be_read_only(corpus, prepare, tmp_path, monkeypatch, capsys):
    """So is one without a lock file: no file is created."""
    out = prepare(corpus, out=tmp_path / "out")
    (out / LOCK).unlink()
    monkeypatch.setattr(pipeline, "locked", functools.partial(pytest.fail, "locked"))
    prepare(corpus, out=out)
    assert "nothing to do" in capsys.readouterr().err
