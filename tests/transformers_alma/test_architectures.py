"""Nine architectures with the tokenizers that they have: exact at t = 0, under kills, exported."""

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from alma.export import main as export
from alma.records import Run
from alma.stream import Stream
from tests.data_prep.tokenizer_folders import folders
from tests.machine_fields import without_machine_fields
from tests.transformers_alma.conftest import BLOCK, KINDS
from tests.transformers_alma.test_engine import loss_by_hand

TOKENIZERS = {
    "Llama": "llama3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen2",
    "GPTNeoX": "gpt_neox",
    "OPT": "gpt2",
    "Gemma": "gemma",
    "Mistral": "mistral",
    "Mamba": "gpt_neox",
    "Mixtral": "mistral",
}
FLAGS = (
    f"--block_size {BLOCK} --max_steps 8 --learning_rate 1e-2 --per_device_train_batch_size 4"
    " --use_cpu --save_steps 3"
).split()


@pytest.fixture(scope="module")
def tokenizer_folders(transformers, tmp_path_factory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("tokenizers"))


def make_model(transformers, kind: str, folder: Path) -> None:
    """Add a model of random weights to the folder of a tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sizes = KINDS.get(kind, KINDS["Llama"]) | {"vocab_size": 640}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, f"{kind}Config")(**sizes, **tokens)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_stream(text: Path, folder: Path, out: Path, monkeypatch) -> Stream:
    """Two mega-batches in the tokens of a folder."""
    from data_prep.__main__ import main as data_prep

    sizes = "--mega-batches 2 --words 1500 --eval-words 500 --valid-words 200 --seed 1 --workers 1"
    words = [f"help={text}/help.txt", "--max-document-words", "100", *sizes.split()]
    monkeypatch.setattr("sys.argv", ["data", *words, "--tokenizer", str(folder), "--out", str(out)])
    data_prep()
    return Stream.load(out)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rows_kills_and_export(
    kind, transformers, tokenizer_folders, text, train, tmp_path, monkeypatch
):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tokenizer_folders[TOKENIZERS[kind]].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    make_model(transformers, kind, folder)
    stream = make_stream(text, folder, tmp_path / "stream", monkeypatch)
    words = [stream.directory, "--init", folder, "--learner", "sm", "--average", "poly:8", "--out"]
    train(*words, tmp_path / "whole", "--", *FLAGS)
    rows = Run.read(tmp_path / "whole").rows

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer("").input_ids
    first = encoded[0] if encoded else None
    ids = np.fromfile(stream.directory / "test.bin", np.uint16).astype(np.int64)
    ids = np.where(ids == 2, stream.end_token, ids - 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if first is None:  # the first block begins with the end of a text, which loss_by_hand has not
        first_context = stream.end_token
        monkeypatch.setattr("tests.transformers_alma.test_engine.END", first_context)
    expected = loss_by_hand(model, ids, first)
    assert math.log(rows[0]["value"]) == pytest.approx(expected, abs=1e-5)
    assert rows[2]["value"] < 0.8 * rows[0]["value"]

    killed = tmp_path / "killed"
    for at in ("checkpoint-3/alma_seconds.json", "checkpoint-6/alma_seconds.json"):
        train.kill_at = at
        train(*words, killed, "--", *FLAGS, code=-signal.SIGKILL)
    train.kill_at = ""
    train(*words, killed, "--", *FLAGS)
    assert without_machine_fields(Run.read(killed).rows) == without_machine_fields(rows)

    out = tmp_path / "exported"
    monkeypatch.setattr("sys.argv", ["alma export", str(killed), "--out", str(out)])
    export()
    exported = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    last = loss_by_hand(exported, ids, first)
    assert math.log(rows[2]["value"]) == pytest.approx(last, abs=1e-5)
    of_export = transformers.AutoTokenizer.from_pretrained(out)
    assert of_export("a text\nof lines").input_ids == tokenizer("a text\nof lines").input_ids
    assert json.loads((out / "config.json").read_text())["model_type"] == model.config.model_type
