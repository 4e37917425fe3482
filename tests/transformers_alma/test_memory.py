"""Flags that save memory: gradient checkpointing changes no number, bf16 trains and resumes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.transformers_alma import tiny


@pytest.fixture(scope="module")
def train(tiny_engine) -> Callable[..., Path]:
    """`train(out, *flags)`: the folder of the model that a fork has trained."""
    from transformers_alma import training

    def run(out: Path, *flags: str) -> Path:
        arguments = tiny_engine.arguments(*flags)
        task = tiny.task(out, tiny_engine.parts)
        done = tiny.start(lambda: training.train(task, arguments), out / "train.log").wait()
        assert done.code == 0, done.output
        assert len(tiny.losses(done.output)) == tiny.UPDATES
        return out / "weights"

    return run


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "plain")


def test_gradient_checkpointing_gives_the_same_losses_and_weights(train, plain, tmp_path):
    model = train(tmp_path / "checkpointing", "--gradient_checkpointing")
    logs = [folder.parent / "train.log" for folder in (model, plain)]
    losses = [tiny.losses(log.read_text()) for log in logs]
    assert losses[0] == losses[1]
    assert tiny.checksums(model) == tiny.checksums(plain)


def test_bf16_trains_weights_in_fp32(train, plain, tmp_path):
    from safetensors.torch import load_file

    model = train(tmp_path / "bf16", "--bf16")
    weights = load_file(model / "model.safetensors")
    in_fp32 = load_file(plain / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert tiny.checksums(model) != tiny.checksums(plain)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, in_fp32[name], rtol=0, atol=0.05)
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"
