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


def texts(corpus, shards):
    return [list(corpus.reader.read(shard)) for shard in shards]


def test_synthetic_documents_are_a_function_of_their_number(scale, tmp_path):
    corpus = scale.Corpus(12e6, tmp_path)
    shards = make_shards(corpus.files, corpus.reader, 1 << 20)
    found = texts(corpus, shards)
    scale.line_pool.cache_clear()
    assert texts(pickle.loads(pickle.dumps(corpus)), shards[::-1]) == found[::-1]
    assert len(shards) == len(corpus.files) == len(found)
    assert {len(each) for each in found} == {corpus.reader.file_documents}
    documents = [document for each in found for document in each]
    assert len(documents) == corpus.documents
    assert all(words == len(text.split()) for _, text, words in documents)
    assert all(normalise(text) == text for _, text, _ in documents)
    words = sum(words for _, _, words in documents)
    assert words == pytest.approx(corpus.words, rel=0.1)
    size = sum(len(text.encode()) + 1 for _, text, _ in documents)
    assert size / words == pytest.approx(corpus.bytes_per_word, rel=0.01)
    assert size == pytest.approx(12e6, rel=0.15)
    assert np.median([words for *_, words in documents]) == pytest.approx(scale.MEDIAN_WORDS, rel=0.1)
    copies = len(documents) - len({text for _, text, _ in documents})
    assert copies == pytest.approx(len(documents) / scale.COPIES, rel=0.5)
    assert all(len({text for _, text, _ in each}) == len(each) for each in found[:1])


@pytest.mark.parametrize("workers", [1, 2])
def test_stages_of_synthetic_text_are_measured_and_files_removed(scale, tmp_path, capsys, workers):
    flags = f"--gigabytes 0.004 --out {tmp_path}/out --workers {workers} --results {tmp_path}/results"
    scale.main([*flags.split(), "--encode-share", "0.5"])
    with open(tmp_path / "results/data_prep_scale.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    processes = {row["stage"]: len(row["peak MB of each process"].split()) for row in rows}
    several = dict.fromkeys(("scan", "shuffle", "encode"), workers)
    assert processes == dict.fromkeys(("sort", "cut", "plan", "tokenizer"), 1) | several
    assert [row["tasks"] for row in rows[:6]] == ["4", "1", "1", "1", "4", "1"]
    assert "4 shards" in capsys.readouterr().out
    assert list((tmp_path / "out").iterdir()) == []


def test_the_plan_of_made_up_records_is_measured(scale, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("data_prep.ranges.RANGE_DOCUMENTS", 10_000)
    scale.main(f"--documents 50k --out {tmp_path}/out --workers 1 --results {tmp_path}".split())
    with open(tmp_path / "data_prep_plan.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["stage"], row["tasks"]) for row in rows] == [("sort", "5"), ("cut", "1"), ("plan", "5")]
    made, planned = capsys.readouterr().out.splitlines()[:2]
    documents, _, _, shards = made.replace(",", "").split()[:4]
    duplicates = int(planned.replace(",", "").split()[-2])
    assert int(documents) == int(shards) * scale.SHARD_RECORDS
    assert duplicates == pytest.approx(int(documents) / scale.COPIES / 2, rel=0.5)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gigabytes 1e9", "1500000000 are needed"),
        ("--gigabytes 1 --encode-share 2", "at most 1"),
        ("--documents 1000G", "90000 are needed"),
    ],
)
def test_bad_flags_of_scale(scale, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        scale.main([*flags.split(), "--out", str(tmp_path)])


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
    assert names == ("data_prep_stages", "data_prep_encoding", "data_prep_preprocess")
    stages = ["scan", "sort", "cut", "plan", "shuffle", "tokenizer", "encode", "finalise", "the command"]
    assert [(row["workers"], row["stage"]) for row in rows[0]] == [(2, stage) for stage in stages]
    assert rows[1][0]["lines"] < 1600
    assert len(rows[2]) == 4
    assert float(rows[2][0]["seconds"]) > 0


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
