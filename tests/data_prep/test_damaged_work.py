"""A file of an interrupted run that has lost its end is one line, not another stream."""

import os
import re
import shutil

import numpy as np
import pytest

from data_prep import work

AFTER = {
    "scan": ["scan-00000.bin"],
    "sort": ["range-00000.bin", "sums-00000.npz"],
    "cut": ["cut.npz"],
    "plan": ["dropped-00000.bin", "parts-00000.npz"],
    "shuffle": ["spill-00000.bin", "spill-00000.index", "spill-00000.npy"],
    "encode": ["bucket-00000.bin", "bucket-00000.npz"],
    "finalise": ["stream/megabatch_00/train.bin", "stream/valid.keys", "test.json"],
}
"""Files that the next stage reads."""


@pytest.fixture
def stopped(corpus, prepare, tmp_path):
    """Make a stream up to the end of a stage; returns what finishes it elsewhere."""

    def call(stage: str):
        run = work.Work.run

        def stop(self, at, *arguments):
            run(self, at, *arguments)
            if at == stage:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(work.Work, "run", stop)
            with pytest.raises(SystemExit):
                prepare(corpus, out=tmp_path / "out")
        return lambda out: prepare(corpus, out=out)

    return call


@pytest.mark.parametrize("stage", AFTER)
def test_it_is_named(stopped, tmp_path, capsys, stage):
    finish = stopped(stage)
    for number, name in enumerate(AFTER[stage]):
        out = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "out", out)
        (path,) = out.glob(f".work-*/{name}")
        os.truncate(path, path.stat().st_size // 2)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            finish(out)
        assert ended.value.code == 2
        named = {"bucket-00000.bin": "bucket-*.bin", "spill-00000.index": "spill-00000.bin"}.get(
            name, path.name
        )
        assert re.search(
            rf"^error: .*/{re.escape(named)}: damaged; remove ",
            capsys.readouterr().err,
            re.MULTILINE,
        )


def test_a_text_that_is_not_as_it_was_written(stopped, tmp_path, capsys):
    finish = stopped("shuffle")
    (path,) = (tmp_path / "out").glob(".work-*/spill-00000.bin")
    texts = bytearray(path.read_bytes())
    texts[len(texts) // 2] ^= 1
    path.write_bytes(texts)
    with pytest.raises(SystemExit) as ended:
        finish(tmp_path / "out")
    assert ended.value.code == 2
    assert "damaged; remove " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["documents", "words", "keys"])
def test_a_bucket_that_is_not_as_planned(stopped, tmp_path, capsys, name):
    """Whole, but with other documents: as many words and other keys are not enough."""
    finish = stopped("encode")
    (path,) = (tmp_path / "out").glob(".work-*/bucket-00001.npz")
    arrays = work.read_arrays(path)
    arrays[name] = arrays[name] + np.uint64(1)
    np.savez(path, **arrays)
    with pytest.raises(SystemExit) as ended:
        finish(tmp_path / "out")
    assert ended.value.code == 2
    assert "damaged (bucket 1 differs from the plan); remove it" in capsys.readouterr().err
