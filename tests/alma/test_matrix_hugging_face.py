"""`alma matrix` of folders of Hugging Face: bits a byte, kills, and jobs of a real SLURM."""

import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alma.report.advice.__main__ import main as advise
from tests.alma.matrix_data import WORDS, records, write_records
from tests.conftest import ROOT

NAMES = tuple(f"news-2024-{month:02}" for month in range(1, 5))
DATA = ("--data", "news.jsonl", "--by", "month")
COMMAND = [sys.executable, "-m", "alma", "matrix", *NAMES, *DATA, "--device", "cpu"]
BLOCK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Four tiny models with a tokenizer, which differ, and dated records."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tests.transformers_alma.tiny import TOKENS, make_model, make_tokenizer

    place = tmp_path_factory.mktemp("folders")
    write_records(place / "news.jsonl", records())
    for seed, name in enumerate(NAMES):
        folder = place / name
        make_model(folder, vocab_size=TOKENS, max_position_embeddings=BLOCK)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
        model.save_pretrained(folder)
        make_tokenizer(folder, " ".join(WORDS))
    return place


@pytest.fixture(scope="module")
def undisturbed(folders) -> Path:
    """The folder in which the matrix is made in one go."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*COMMAND, "--out", "undisturbed.csv"]
    done = subprocess.run(words, cwd=folders, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "alma advise --matrix undisturbed.csv" in done.stdout
    assert done.stderr.count("tokens") == 4
    return folders


def bits_per_byte(folder: Path, month: str) -> float:
    """By transformers alone: blocks of tokens, each predicted from those before it in its block."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [record["text"] for record in records() if record["date"].startswith(month)]
    stream = [tokenizer.eos_token_id]
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    nats = 0.0
    for start in range(0, len(stream) - 1, BLOCK - 1):
        block = torch.tensor([stream[start : start + BLOCK]])
        with torch.no_grad():
            loss = model(input_ids=block, labels=block).loss
        nats += float(loss) * (block.shape[1] - 1)
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def test_bits_a_byte_are_those_of_transformers(undisturbed, monkeypatch, capsys):
    lines = list(csv.DictReader((undisturbed / "undisturbed.csv").open()))
    assert len(lines) == 16
    assert {line["model"] for line in lines} == {"news"}
    for line in lines[::3]:
        folder = undisturbed / f"news-{line['trained_until']}"
        expected = bits_per_byte(folder, line["tested_on"])
        assert float(line["bits_per_byte"]) == pytest.approx(expected, rel=1e-5)
    monkeypatch.chdir(undisturbed)
    monkeypatch.setattr("sys.argv", ["alma advise", "--matrix", "undisturbed.csv"])
    advise()
    assert "bits a byte" in capsys.readouterr().out


def test_a_damaged_model_is_named_and_the_cells_before_it_stay(undisturbed, tmp_path):
    for name in NAMES[:2]:
        shutil.copytree(undisturbed / name, tmp_path / name)
    shutil.copyfile(undisturbed / "news.jsonl", tmp_path / "news.jsonl")
    weights = tmp_path / NAMES[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    command = [sys.executable, "-m", "alma", "matrix", *NAMES[:2], *DATA]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"error: {tmp_path / NAMES[1]}: transformers cannot load it" in done.stderr
    assert len(list(tmp_path.glob(f"matrix.cells/{NAMES[0]}-*/2024-*.json"))) == 4


@pytest.mark.thorough
def test_killed_five_times_the_matrix_is_the_same(undisturbed, tmp_path):
    for name in (*NAMES, "news.jsonl"):
        (tmp_path / name).symlink_to(undisturbed / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    cells = {}
    for enough in (1, 3, 6, 9, 13):
        process = subprocess.Popen(COMMAND, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(_cells(tmp_path)) < enough and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        written = _cells(tmp_path)
        assert len(written) >= enough
        assert written.items() >= cells.items()  # the seconds of a cell would differ
        cells = written
    assert not (tmp_path / "matrix.csv").exists()
    subprocess.run(COMMAND, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert _cells(tmp_path).items() >= cells.items()
    matrix = (tmp_path / "matrix.csv").read_text()
    assert matrix == (undisturbed / "undisturbed.csv").read_text()


def _cells(place: Path) -> dict[str, str]:
    """The cells that are written, by name."""
    files = place.glob("matrix.cells/news-*/2024-*.json")
    return {str(file.relative_to(place)): file.read_text() for file in files}
