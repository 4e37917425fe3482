"""Too little disk: found before the work, or reported with the path and the remedy."""

import gzip
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from alma.files import atomic_write
from data_prep import disk, install

from .conftest import make_documents

SIZES = {"mega_batches": 3, "words": 1500, "valid_words": 300, "vocab_size": 120}


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of the disk."""

    def set_free(size):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=size))

    return set_free


def refused(prepare, capsys, *arguments, **flags):
    with pytest.raises(SystemExit) as error:
        prepare(*arguments, **flags)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_too_little_disk_is_found_before_the_scan(corpus, prepare, free, tmp_path, capsys):
    out = tmp_path / "out"
    free(30_000)
    line = refused(prepare, capsys, corpus, out=out)
    assert line.startswith(f"error: {out}: making this stream takes about ")
    for remedy in ("--out on another disk", "--no-disk-check"):
        assert remedy in line
    assert not install.works(out), "found out too late"
    free(1 << 30)
    prepare(corpus, out=out)


def test_the_estimate_can_be_overridden(corpus, prepare, free, tmp_path):
    free(0)
    prepare("--no-disk-check", corpus, out=tmp_path / "out")
    more = tmp_path / "more.txt"
    more.write_text("\n\n".join(make_documents(3, 300)), "utf-8")
    flags = dict.fromkeys(("valid_words", "vocab_size"))
    with pytest.raises(SystemExit):
        prepare("--append", more, out=tmp_path / "out", mega_batches=1, words=300, **flags)
    prepare("--append", "--no-disk-check", more, out=tmp_path / "out", mega_batches=1, words=300, **flags)


def test_compressed_text_counts_by_its_size_afterwards(corpus, prepare, free, tmp_path, capsys):
    for path in corpus.glob("*.txt"):
        path.with_suffix(".txt.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = sum(path.stat().st_size for path in corpus.iterdir())
    free(3 * packed)
    assert "takes about" in refused(prepare, capsys, corpus, out=tmp_path / "out", words=10**7)
    free(12 * packed)
    assert "words are missing" in refused(prepare, capsys, corpus, out=tmp_path / "out", words=10**7)


def test_what_a_killed_run_has_written_counts(corpus, prepare, free, tmp_path, monkeypatch, capsys):
    """So does what runs with other settings have left: it is removed first."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(install, "install", lambda work, out: sys.exit(3))
        for seed in (1, 2):
            with pytest.raises(SystemExit, match="3"):
                prepare(corpus, out=out, seed=seed)
            (work,) = install.works(out)
            os.remove(work / "stream" / "stream.json")  # as if killed a little earlier
    assert "with other settings; removed" in capsys.readouterr().err
    free(0)
    prepare(corpus, out=out, seed=2)


FULL = """
import resource, sys
from data_prep import __main__
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
__main__.main()
"""


def test_a_file_that_cannot_grow_is_named(corpus, tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    done = subprocess.run(
        [sys.executable, "-c", FULL, "20000", corpus, *flags, "--workers=1", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/out/.work-")
    assert "File too large" in line


def test_a_full_disk_is_named_by_numpy_too(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as error, atomic_write(tmp_path / "x", "wb"):
        raise OSError("7 requested and 0 written")  # as ndarray.tofile says it
    assert error.value.filename == str(tmp_path / "x")
