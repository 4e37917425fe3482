"""--write: documents and Megatron's index hold what the stream holds; the light installation."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from alma.stream import Stream, read_index
from data_prep import plan

from .conftest import make_documents
from .test_pipeline import texts


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_documents_are_those_of_the_parts(form, corpus, prepare, tmp_path, inspected):
    flags = {"mega_batches": 2, "write": form}
    out = prepare(f"a={corpus}/alpha.txt", f"web={corpus}/web.txt", out=tmp_path / "out", **flags)
    plain = prepare(
        f"a={corpus}/alpha.txt", f"web={corpus}/web.txt", out=tmp_path / "p", mega_batches=2
    )
    for part in Stream.load(out).parts:
        path = out / f"{part.prefix}.{form}"
        if form == "jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        else:
            rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        assert [" ".join(row["text"].split()) for row in rows] == [
            " ".join(text.split()) for text in texts(out, part.prefix)
        ]
        words = {"a": 0, "web": 0}
        for row in rows:
            words[row["source"]] += len(row["text"].split())
        assert words == {"a": 0, "web": 0} | part.sources
        keys = (out / f"{part.prefix}.keys").read_bytes()
        assert [row["id"] for row in rows] == [
            keys[i : i + 12].hex() for i in range(0, len(keys), 16)
        ]
        assert (out / f"{part.prefix}.bin").read_bytes() == (
            plain / f"{part.prefix}.bin"
        ).read_bytes()
    assert inspected(out, "--verify")[0] == 0


def test_an_addition_is_written_as_before_and_has_its_periods(prepare, tmp_path):
    for year in (2023, 2024):
        lines = [
            json.dumps({"date": str(year), "text": text}) for text in make_documents(year, 200)
        ]
        (tmp_path / f"{year}.jsonl").write_text("\n".join(lines))
    sizes = {
        "by": "year",
        "eval_words": 200,
        "valid_words": 200,
        "mega_batches": None,
        "words": None,
    }
    out = prepare(f"news={tmp_path}/2023.jsonl", out=tmp_path / "out", write="jsonl", **sizes)
    prepare(
        f"news={tmp_path}/2024.jsonl", "--append", out=out, **dict.fromkeys([*sizes, "vocab_size"])
    )
    for number, year in enumerate(("2023", "2024")):
        for prefix in (f"megabatch_{number:02d}/train", f"test_{number:02d}"):
            rows = [json.loads(line) for line in (out / f"{prefix}.jsonl").read_text().splitlines()]
            assert {(row["date"], row["source"]) for row in rows} == {(year, "news")}


@pytest.mark.parametrize("ordered", [True, False])
def test_dropped_lists_what_stream_json_counts(ordered, near, prepare, tmp_path, inspected):
    flags = {
        "near_duplicates": "drop",
        "write": "jsonl",
        "words": 1200,
        "mega_batches": None if ordered else 2,
    }
    if ordered:
        flags |= {"eval_words": 200}
    arguments = [*near, *(["--ordered"] if ordered else []), "--write-dropped"]
    out = prepare(*arguments, out=tmp_path / "out", **flags)
    rows = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    corpus = Stream.load(out).corpus
    similar = [row for row in rows if row["kind"] == "near"]
    assert len(similar) == corpus["near_duplicate_documents"] > 20
    assert len(rows) == corpus["duplicate_documents"]
    texts = {}
    for path in out.rglob("*.jsonl"):
        if path.name != "dropped.jsonl":
            texts |= {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert not {row["id"] for row in similar} & texts.keys()
    assert all(0.75 < row["similarity"] <= 1 and row["repeats"] != row["id"] for row in similar)
    assert all(row["repeats"] == row["id"] for row in rows if row["kind"] == "exact")
    assert inspected(out, "--verify")[0] == 0


def test_the_similarity_of_a_near_copy_is_that_of_its_words():
    """Different hashes agree by chance in 1 of 256: that is no similarity."""
    assert plan.Repeated(b"", plan.HASHES).similarity == 1
    by_chance = plan.Repeated(b"", plan.HASHES / 256)
    assert by_chance.similarity == pytest.approx(0)


def test_megatron_reads_the_same_tokens(corpus, prepare, tmp_path, inspected):
    """By a reader after the published format: header, lengths, pointers, document indices."""
    out = prepare(f"a={corpus}/alpha.txt", out=tmp_path / "out", mega_batches=2, write="megatron")
    for part in Stream.load(out).parts:
        index = (out / f"{part.prefix}.megatron.idx").read_bytes()
        magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", index)
        assert (magic, version, code) == (b"MMIDIDX\0\0", 1, 8)
        assert (sequences, documents) == (part.documents, part.documents + 1)
        lengths = np.frombuffer(index, "<i4", sequences, 34)
        pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
        numbers = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
        assert len(index) == 34 + 12 * sequences + 8 * documents
        assert numbers.tolist() == list(range(documents))
        data = (out / f"{part.prefix}.megatron.bin").read_bytes()
        sizes, _ = read_index(out / f"{part.prefix}.idx")
        ends = np.cumsum(sizes)[sizes == 1]
        tokens = np.fromfile(out / f"{part.prefix}.bin", np.uint16)
        for tokens_of_item, length, pointer in zip(
            np.split(tokens, ends), lengths, pointers, strict=False
        ):
            assert np.array_equal(np.frombuffer(data, np.uint16, length, pointer), tokens_of_item)
            assert tokens_of_item[-2:].tolist() == [2, 2]
    assert inspected(out, "--verify")[0] == 0


@pytest.mark.thorough
def test_data_report_and_advise_run_without_what_the_light_installation_lacks(corpus, tmp_path):
    from tests.alma.synthetic import image_run

    image_run(tmp_path / "runs" / "one", [0.5, 0.4, 0.3, 0.2])
    image_run(tmp_path / "runs" / "two", [0.4, 0.3, 0.2, 0.1], 2)
    sizes = "--mega-batches 2 --words 1000 --valid-words 300 --vocab-size 120 --workers 1"
    packages = ("torch", "torchvision", "fairseq", "fairscale")
    packages += ("submitit", "safetensors", "sklearn", "tensorboardX")
    block = f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n"
    block += "from alma.__main__ import main\nmain()"
    for words in (
        f"data {corpus} --out {tmp_path}/stream {sizes}",
        f"inspect {tmp_path}/stream --workers 1",
        f"report {tmp_path}/runs --out {tmp_path}/report --html {tmp_path}/r.html",
        f"advise {tmp_path}/runs",
    ):
        done = subprocess.run(
            [sys.executable, "-c", block, *words.split()], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", block, "images"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: alma images needs torch; pip install")
