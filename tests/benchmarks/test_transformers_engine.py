"""The engine and the Trainer run by hand train the same."""

import json
from functools import partial

import pytest

from alma.files import sha256_file
from benchmarks import transformers_engine as bench
from tests.conftest import Child

SIZE = bench.ModelSize(
    {**bench.SIZES["tiny"].model, "hidden_size": 16}, block=32, batch=2, updates=3
)


def test_both_train_the_same_weights(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from transformers_alma.arguments import parse
    from transformers_alma.training import MODEL, train

    words = bench.make(tmp_path, SIZE)
    arguments = parse(words)
    hashes = set()
    for kind in bench.KINDS:
        task = bench.task_of(tmp_path, tmp_path / kind, SIZE.updates)
        (tmp_path / kind).mkdir()
        trained = partial(train, task, arguments)
        if kind == "hand":
            trained = partial(bench.by_hand, task, words)

        def timed(task=task, trained=trained) -> None:
            bench.timed(task)
            trained()

        done = Child(tmp_path / f"{kind}.log", timed).wait()
        assert done.code == 0, done.output
        hashes.add(sha256_file(tmp_path / kind / MODEL / "model.safetensors"))
        times = json.loads((tmp_path / kind / "times.json").read_text())
        assert times["seconds"] > 0
        assert times["cpu"] > 0
    assert len(hashes) == 1


def test_a_row_has_the_ratio_of_times():
    times = {"seconds": 2.0, "cpu": 1.0, "parameters": 5, "start": 7.0}
    measured = {"engine": [times] * 3, "hand": [{**times, "seconds": 1.0}] * 3}
    row = bench._row("tiny", SIZE, measured)
    assert row["speed"] == "0.50 [0.50-0.50]"
    assert row["speed by CPU seconds"] == "1.00 [1.00-1.00]"
    assert row["engine tokens/s"] == "93"
    assert row["start s"] == "7.0"
