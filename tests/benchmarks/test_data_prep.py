"""The synthetic corpus, and both benchmarks of data_prep on little text."""

import csv
import pickle
import sys

import numpy as np
import pytest

from alma.errors import UserError
from data_prep.documents import make_shards, normalise


@pytest.fixture
def scale(benchmark, monkeypatch):
    """data_prep_scale with small shards, buckets and vocabulary."""
    scale = benchmark("data_prep_scale")
    monkeypatch.setattr("data_prep.documents.SHARD_BYTES", 1 << 20)
    monkeypatch.setattr("data_prep.plan.BUCKET_BYTES", 300_000)
    monkeypatch.setattr(scale, "VOCABULARY", 500)
    return scale


def test_synthetic_documents_are_a_function_of_their_number(scale, tmp_path):
    corpus = scale.Corpus(12e6, tmp_path)
    shards = make_shards(corpus.files, corpus.reader, 1 << 20)
    made = [list(corpus.reader.read(shard)) for shard in shards]
    scale.line_pool.cache_clear()
    again = pickle.loads(pickle.dumps(corpus)).reader
    assert [list(again.read(shard)) for shard in shards[::-1]] == made[::-1]
    texts = [document for shard in made for document in shard]
    assert len(texts) == corpus.documents
    assert all(words == len(text.split()) and normalise(text) == text for _, text, words in texts[::50])
    assert sum(words for _, _, words in texts) == pytest.approx(corpus.words, rel=0.1)
    copies = len(texts) - len({text for _, text, _ in texts})
    assert copies == pytest.approx(len(texts) / scale.COPIES, rel=0.5)


@pytest.mark.parametrize("workers", [1, 2])
def test_stages_of_synthetic_text_are_measured_and_files_removed(scale, tmp_path, capsys, workers):
    flags = f"--gigabytes 0.004 --out {tmp_path}/out --workers {workers} --results {tmp_path}/results"
    scale.main([*flags.split(), "--encode-share", "0.5"])
    with open(tmp_path / "results/data_prep_scale.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    stages = ["scan", "sort", "cut", "plan", "shuffle", "tokenizer", "encode"]
    assert [row["stage"] for row in rows] == stages
    assert [row["tasks"] for row in rows[:6]] == ["4", "1", "1", "1", "4", "1"]
    assert "4 shards" in capsys.readouterr().out
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_flags_of_scale(scale, tmp_path):
    with pytest.raises(UserError, match="at most 1"):
        scale.main(f"--gigabytes 1 --encode-share 2 --out {tmp_path}".split())


def test_speed_on_little_text(benchmark, monkeypatch, tmp_path):
    speed = benchmark("data_prep_speed")
    small = {"VOCABULARY": 300, "MAX_DOCUMENT_WORDS": 50, "BLOCK": 100, "SAMPLE_BYTES": 40_000}
    small |= {"WORKERS": (2,), "LEAST_RUNS": 1, "spread": lambda values: f"{values[0]:.2f}"}
    for name, value in small.items():
        monkeypatch.setattr(speed, name, value)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghéß"), 1 + i % 7)) for i in range(400)]
    blocks = ["\n".join(" ".join(rng.choice(words, 9)) for _ in range(4)) for _ in range(400)]
    (tmp_path / "text.txt").write_text("\n\n".join([*blocks, *blocks[:20]]), "utf-8")
    (tmp_path / "more.txt").write_text("\n\n".join(blocks[:40]), "utf-8")
    corpus = [f"a={tmp_path}/text.txt", str(tmp_path / "more.txt")]
    names, _, rows = zip(*speed.measure(1, corpus), strict=True)
    assert names == ("data_prep_stages", "data_prep_encoding")
    stages = ["scan", "sort", "cut", "plan", "shuffle", "tokenizer", "encode", "finalise", "the command"]
    assert [(row["workers"], row["stage"]) for row in rows[0]] == [(2, stage) for stage in stages]
    assert rows[1][0]["lines"] <= 1600


def test_the_memory_of_a_command_is_its_own_and_a_failure_an_error(benchmark):
    speed = benchmark("data_prep_speed")
    with pytest.raises(UserError, match=r"code 3: no more"):
        speed.run([sys.executable, "-c", "import sys; print('no more'); sys.exit(3)"])
    ballast = np.ones(40_000_000)
    small = speed.run([sys.executable, "-c", "pass"])
    large = speed.run([sys.executable, "-c", "x = bytearray(10**8)"])
    assert small.peak < 5e7 < 1e8 < large.peak < 2e8 < ballast.nbytes
    assert small.cpu > 0
    assert small.stages == {}
