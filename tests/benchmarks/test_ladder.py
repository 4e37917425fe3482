"""The ladder of the GPU, at tiny sizes on a CPU; where there is a GPU, it uses it."""

import json
import re
import time
from types import SimpleNamespace

import pytest

CASES_OF_THE_LADDER = [
    {"case": "off", "model": "base, 8 experts", "flags": "--bf16"},
    {"case": "all", "model": "base, 8 experts", "flags": "--bf16 --compile"},
    {"case": "Switch beside dense", "tokens": 64},
    {"case": "one process has nothing to shard"},
]


def test_cases_of_the_ladder(forked, tmp_path):
    """In one process: it trains without changes, then with all of them."""
    words = "benchmarks gpu step ladder --dry-run".split()
    words += [f"--environment={tmp_path}/environment", f"--out={tmp_path}"]
    with forked() as process:
        code, text = process.child([*words, f"--cases={json.dumps(CASES_OF_THE_LADDER)}"])
    assert code == 0, text
    lines = filter(None, map(process.parse, text.encode().splitlines()))
    rows = [line.row for line in lines if line.kind == "ROW"]
    assert [row["case"] for row in rows] == CASES_OF_THE_LADDER
    off, on, layer, refused = rows
    for row in (off, on):
        assert "error" not in row
        assert len(row["tokens/s"]) == 2
        # 2 layers: attention, FFN; a router; the output layer; scores
        weights = 2 * (4 * 32**2 + 8 * 32**2) + 8 * 32 + 104 * 32
        assert row["MFLOP / token"] == pytest.approx((6 * weights + 12 * 2 * 32 * 32) / 1e6)
        assert row["of the data sheet"] == pytest.approx(row["TFLOP/s"] / 989)
        assert row["update, ms"] > 0
    assert "estimate GB" in on
    assert on["loss"] == pytest.approx(off["loss"], rel=1e-3)
    assert layer["now / dense: host"] > 0
    assert "--zero-sharding os divides" in refused["message"]


@pytest.mark.thorough
def test_the_rehearsal_of_the_ladder(benchmark, forked, tmp_path, capsys):
    """Every case has a result, within three minutes of a quiet machine."""
    began = time.monotonic()
    words = ["ladder", "--dry-run", "--out", str(tmp_path), "--environment", f"{tmp_path}/e"]
    with forked():
        benchmark("gpu").main(words)
    assert time.monotonic() - began < 180
    step = json.loads((tmp_path / "gpu.json").read_text())["steps"]["ladder"]
    assert len(step["rows"]) > 20
    assert "+foreach  --bf16" in re.sub(" {2,}", "  ", capsys.readouterr().out)


@pytest.mark.parametrize(("loss", "is_error"), [(5.04, False), (5.06, True)])
def test_a_loss_that_changes_alter_is_an_error(benchmark, tmp_path, monkeypatch, loss, is_error):
    """By more than 1%; the figures are kept."""
    ladder = benchmark("gpu.ladder")
    laps = benchmark("gpu.laps")

    def run(training, *_):
        losses = [6.0, loss if training.changes else 5.0]
        return laps.Lap([0.1], {}, losses, 10**9, False)

    (tmp_path / "stream").mkdir()
    (tmp_path / "stream/dict.txt").write_text("a 1\nb 1\n")
    monkeypatch.setattr(ladder, "run", run)
    monkeypatch.setattr(ladder, "estimated", lambda words, tokens: tokens * 10**9)
    data = ladder.RandomTokens(tmp_path, True, 104, 32)
    row = ladder.on_text(tmp_path, data)
    assert ("error" in row) == is_error
    assert (row["off: loss"], row["all: loss"], row["peak / estimate"]) == (5.0, loss, 0.5)


def test_a_training_is_measured_until_its_time_is_over(benchmark, monkeypatch):
    """Intervals after the warm-up, then profiled updates; memory that runs out is an error."""
    laps = benchmark("gpu.laps")
    clock = iter(range(1000))
    monkeypatch.setattr(laps.time, "perf_counter", lambda: float(next(clock)))
    asked = []

    class Trainer:
        cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=laps.ENDLESS))

        def get_num_updates(self):
            return len(asked)

    def update(trainer, samples, raise_oom):
        asked.append(raise_oom)

    trainer = Trainer()
    lengths = laps.Lengths(seconds=20, warm_up=3, interval=2, profiled=2)
    stopwatch = laps.Stopwatch(lengths)
    while len(asked) < trainer.cfg.optimization.max_update:
        stopwatch.train_step(update, trainer, [])
    # an interval: the clock is read at its start and end, and twice in each update
    assert stopwatch.intervals == [2.5] * 4
    assert len(asked) == 3 + 2 * 4 + 2
    assert all(asked)
    assert stopwatch.profile["update, ms"] == 2500


def test_the_table_of_gains(benchmark):
    """Speeds are compared with those of `off`, and of the case before."""
    module = benchmark("gpu.gains")
    rows = []
    for case, speed in (("off", 100.0), ("+gelu", 110.0), ("+foreach", 121.0)):
        row = {"case": {"case": case, "flags": "--bf16"}, "tokens/s": [speed, speed]}
        rows.append(row | {"GPU idle": 0.25})
    rows.insert(1, {"case": {"case": "text"}, "worst loss": "1e-3"})
    header, *lines = module.gains(rows)
    assert [line[:5] for line in lines] == [
        ["off", "--bf16", "100 [100-100]", "1.00", ""],
        ["+gelu", "--bf16", "110 [110-110]", "1.10", "1.10"],
        ["+foreach", "--bf16", "121 [121-121]", "1.21", "1.10"],
    ]
    assert lines[0][header.index("GPU idle")] == "0.25"
    rows[0]["ms by kind"] = {"loss": 20.0, "copies": 10.0}
    rows.append({"case": {"case": "all"}, "ms by kind": {"loss": 5.0, "matmul": 30.0}})
    assert module.by_kind(rows) == [
        ["ms of an update", "off", "all"],
        ["loss", "20", "5"],
        ["copies", "10", "0"],
        ["matmul", "0", "30"],
    ]
