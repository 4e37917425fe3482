"""The made-up text, and the benchmark of data_prep on little text."""

import numpy as np
import pytest

from data_prep.documents import make_shards, normalise


@pytest.fixture
def small(benchmark, monkeypatch):
    """The benchmark with small samples, shards, buckets and vocabulary."""
    module = benchmark("data_prep")
    sizes = {
        "VOCABULARY": 300,
        "MAX_DOCUMENT_WORDS": 50,
        "BLOCK": 100,
        "SAMPLE_BYTES": 40_000,
        "SEEDS": 1,
    }
    sizes |= {"LEAST_RUNS": 2, "SMALL_VOCABULARY": 300, "FILE_DOCUMENTS": 300}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("data_prep.plan.BUCKET_BYTES", 300_000)
    return module


def test_made_up_documents_are_a_function_of_their_number(small, tmp_path):
    shards = make_shards(small.made_up(0.3, tmp_path), small.MadeUpReader())
    read_again = [list(small.MadeUpReader().read(shard)) for shard in shards]
    assert [len(documents) for documents in read_again] == [300] * 4
    assert [list(small.MadeUpReader().read(shard)) for shard in shards[::-1]] == read_again[::-1]
    texts = [document for shard in read_again for document in shard]
    assert all(
        words == len(text.split()) and normalise(text) == text for _, text, words in texts[::50]
    )
    copies = len(texts) - len({text for _, text, _ in texts})
    assert copies == pytest.approx(900 / small.COPIES, rel=0.6)


def test_stages_of_made_up_text(small):
    [(name, title, rows)] = small.measure(3, gigabytes=0.1)
    assert (name, title) == ("data_prep_stages", "data_prep on 0.1 GB of made-up text")
    stages = ["scan", "sort", "cut", "plan", "shuffle", "tokenizer", "encode", "finalise"]
    assert [row["stage"] for row in rows] == stages
    assert all(float(row["peak MB"]) > 20 for row in rows)


def test_tables_of_little_text(small, tmp_path):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh\xe9\xdf"), 1 + i % 7)) for i in range(400)]
    blocks = []
    for _ in range(400):
        blocks.append("\n".join(" ".join(rng.choice(words, 9)) for _ in range(4)))
    near = [f"{block} more" for block in blocks[:30]]
    (tmp_path / "text.txt").write_text("\n\n".join([*blocks, *blocks[:20]]), "utf-8")
    (tmp_path / "more.txt").write_text("\n\n".join(near), "utf-8")
    corpus = [str(tmp_path / "more.txt"), f"a={tmp_path}/text.txt"]
    tables = {name: rows for name, _, rows in small.measure(2, corpus)}
    assert list(tables) == [
        "data_prep_stages",
        "data_prep_encoding",
        "near_duplicates",
        "near_duplicates_effect",
    ]
    assert tables["data_prep_encoding"][0]["lines"] <= 1600
    similar = {row["similarity"]: row for row in tables["near_duplicates"]}
    assert (similar["0.90-1.00"]["documents"], similar["0.90-1.00"]["dropped"]) == (30, "1.000")
    assert similar["0.00-0.60"]["dropped"] == "0.000"
    assert [row["near duplicates"] for row in tables["near_duplicates_effect"]] == ["keep", "drop"]


def test_planted_copies_are_found_and_peers_that_are_missing_named(
    benchmark, tmp_path, monkeypatch, capsys
):
    module = benchmark("near_duplicates")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(100):
        texts.append(" ".join(f"w{i}" for i in rng.integers(0, 500, 300)))
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    module.main(
        ["--text", str(tmp_path / "text.txt"), "--documents", "100", "--out", str(tmp_path)]
    )
    names, row = (tmp_path / "near_duplicate_tools.csv").read_text().splitlines()
    assert names.endswith("found at 1%,at 5%,precision at 0.8")
    assert row.endswith(",1.0,0.0,1.0")
    assert capsys.readouterr().out.count("not installed") == 4
