"""`alma images --by week` on the command line, and the stream that `--write` makes for a
trainer."""

import json

import pytest

from alma.stream import Stream
from tests.vision.conftest import command, error_of, jobs
from tests.vision.test_weeks import arrive
from vision.periods import listed


@pytest.fixture
def shop(tmp_path):
    arrive(tmp_path / "shop", 1, 2, 3, 4)
    return tmp_path / "shop"


def test_the_command_line(shop, tmp_path, monkeypatch, capsys):
    words = (
        f"--data-root {shop} --by week --arch mlp --hidden 2 --epochs 1 --out {tmp_path / 'run'}"
    )
    (job,) = jobs(*words.split(), "--classes", "known")
    assert job.command.endswith(
        f"--data-root {shop} --by week --classes known --out {tmp_path / 'run'}"
    )
    assert "--megabatches" not in job.command
    listed.cache_clear()
    command(monkeypatch, *words.split())
    output = capsys.readouterr().out
    assert output.count("\n2026-W0") == 3
    assert "images: 90; periods: 4; classes: 3; other files left out: none" in output
    arrive(shop, 5)
    listed.cache_clear()
    assert "2026-W05: give --append" in error_of(monkeypatch, capsys, *words.split())
    for wrong in (
        "--append",
        "--by week --megabatches 3",
        "--by week --dataset digits",
        "--group-by x",
    ):
        assert error_of(monkeypatch, capsys, *wrong.split(), "--data-root", shop)


def test_write_makes_a_stream_that_grows(shop, tmp_path, monkeypatch, capsys, refused):
    words = f"--data-root {shop} --by week --write {tmp_path / 'stream'}".split()
    command(monkeypatch, *words)
    before = Stream.load(tmp_path / "stream")
    before.check(before.parts)
    assert (before.ordered, before.vocab_size, before.held_out[2].period) == (True, 3, "2026-W03")
    line = json.loads((tmp_path / "stream/test_02.jsonl").read_text().splitlines()[0])
    assert (tmp_path / "stream" / line["path"]).is_file()
    arrive(shop, 5)
    listed.cache_clear()
    assert "has 4 of 5 periods: give --append" in error_of(monkeypatch, capsys, *words)
    command(monkeypatch, *words, "--append")
    after = Stream.load(tmp_path / "stream")
    assert after.megabatches[:4] == before.megabatches
    assert (after.test, len(after.held_out)) == (before.test, 5)
    assert (before.test_megabatches, after.test_megabatches) == (4, 4)
    after.check(after.parts)
    (shop / "2026-W01/a/0.png").unlink()
    listed.cache_clear()
    assert "2026-W01 had other images" in error_of(monkeypatch, capsys, *words, "--append")
