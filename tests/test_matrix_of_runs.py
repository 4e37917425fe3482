"""`alma matrix` of the models of real runs, typed as a user does, and `alma advise` on its file."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

MONTHS = 4
DATA = "news.jsonl --by month --words 4k --eval-words 300 --valid-words 300"
MATRIX = "--data later.jsonl --by month --device cpu"
FAIRSEQ = (
    "--arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 16 "
    "--decoder-attention-heads 2 --tokens-per-sample 32 --max-tokens 512 --lr 1e-2 "
    "--max-update 20 --optimizer adam --warmup-updates 4 --no-epoch-checkpoints --num-workers 0"
)
TRANSFORMERS = (
    "--max_steps 20 --learning_rate 3e-3 --per_device_train_batch_size 8 --block_size 32 --use_cpu"
)


def write_news(place: Path) -> None:
    """Text whose usual words move on each month, to train on, and other text to test on."""
    generator = random.Random(1)
    for name, days, documents in (("news", 28, 4), ("later", 9, 1)):
        with (place / f"{name}.jsonl").open("w") as file:
            for month in range(1, MONTHS + 1):
                for number in range(days * documents):
                    words = []
                    for _ in range(60):
                        rank = int(3 * generator.paretovariate(1.1))
                        words.append(f"w{(rank + 30 * month) % 300}")
                    date = f"2024-{month:02}-{number % days + 1:02}"
                    print(json.dumps({"date": date, "text": " ".join(words)}), file=file)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with dated text."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("place")
    write_news(folder)
    return folder


def alma(place: Path, words: str, code: int = 0) -> str:
    """The output of a command of alma that ends with `code`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alma", *words.split()]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def check_matrix(place: Path, name: str) -> None:
    """The newest model is best on the newest month, and `alma advise` answers in bits a byte."""
    lines = list(csv.DictReader((place / name).open()))
    assert len(lines) == MONTHS**2
    on_newest = [line for line in lines if line["tested_on"] == f"2024-{MONTHS:02}"]
    best = min(on_newest, key=lambda line: float(line["bits_per_byte"]))
    assert best["trained_until"] == best["tested_on"]
    answer = alma(place, f"advise --matrix {name} --every 1,3")
    assert "How often to retrain?" in answer
    assert "bits a byte" in answer


@pytest.mark.thorough
def test_the_stages_of_a_run_of_transformers(place):
    script = ROOT / "examples/tiny_model.py"
    subprocess.run([sys.executable, script, "news.jsonl", "model"], cwd=place, check=True)
    alma(place, f"data {DATA} --tokenizer model --out model_stream")
    alma(place, f"train model_stream --init model --learner sm --out run -- {TRANSFORMERS}")
    printed = alma(place, f"matrix run {MATRIX} --out run.csv")
    assert "run/stage_03        2024-04" in printed
    check_matrix(place, "run.csv")


@pytest.mark.thorough
def test_a_run_of_fairseq_by_the_remedy_that_its_error_names(place):
    alma(place, f"data {DATA} --vocab-size 150 --out stream")
    alma(place, f"train stream --learner sm --out fairseq -- {FAIRSEQ} --cpu")
    error = alma(place, f"matrix fairseq {MATRIX}", code=2)
    remedy = error.split("`")[1]
    assert remedy == "alma export fairseq --t 1 --out DIR"
    folders = []
    for month in range(1, MONTHS + 1):
        folders.append(f"exported/month-{month}")
        words = remedy.removeprefix("alma ").replace("--t 1", f"--t {month}")
        alma(place, words.replace("DIR", folders[-1]))
    printed = alma(place, f"matrix {' '.join(folders)} {MATRIX} --out exported.csv")
    assert "exported/month-4        2024-04" in printed
    check_matrix(place, "exported.csv")
