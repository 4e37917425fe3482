"""--store-ema: the weight average in training, after a resume, in a new stage and in our commands."""

import copy
import json

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from safetensors.torch import load_file

from fairseq_alma.moe.growth import GROWN
from fairseq_alma.training.average import WeightAverage

EMA = ("--store-ema", "--ema-decay", "0.5")


def load(path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.fixture
def train(start, stream, tiny):
    """`train(save, *flags)` trains and returns the last checkpoint."""

    def run(save, *flags):
        done = start("train", stream, *tiny, *EMA, "--save-dir", save, *flags).wait()
        assert done.code == 0, done.output
        return load(save / "checkpoint_last.pt")

    return run


@pytest.fixture
def averaged(train, tmp_path):
    """A checkpoint of 4 updates, with an average."""
    train(tmp_path / "run", "--max-update", "4")
    return tmp_path / "run" / "checkpoint_last.pt"


def test_each_weight_is_averaged_once_in_fp32_and_buffers_are_copied(build):
    _, model = build("--members", "1")
    assert model.decoder.embed_tokens.weight is model.decoder.output_projection.weight
    model.half()
    expected = {name: weight.detach().float() for name, weight in model.named_parameters()}
    average = WeightAverage(model, EMAConfig(store_ema=True, ema_decay=0.999))
    generator = torch.Generator().manual_seed(0)
    for update in range(1, 4):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 1e-2)
                expected[name] = torch.lerp(expected[name], weight.float(), 0.001)
            for buffer in model.buffers():
                buffer.add_(1)
        average.step(model, update)
    found = average.get_model()
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)
    for (name, copied), buffer in zip(found.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(copied, buffer.to(copied.dtype)), name


def test_a_resumed_average_equals_that_of_an_uninterrupted_run(start, stream, tiny, train, tmp_path):
    flags = ("--max-update", "12", "--save-interval-updates", "4", "--ema-update-freq", "3")
    whole = train(tmp_path / "whole", *flags)
    save = tmp_path / "killed"
    child = start("train", stream, *tiny, *EMA, "--save-dir", save, *flags)
    child.kill_when(lambda: any(save.glob("checkpoint_*_8.pt")))
    resumed = train(save, *flags)
    for name, value in whole["extra_state"]["ema"].items():
        assert torch.equal(value, resumed["extra_state"]["ema"][name]), name
        assert torch.equal(whole["model"][name], resumed["model"][name]), name
    assert any(
        not torch.equal(whole["extra_state"]["ema"][name], whole["model"][name]) for name in whole["model"]
    )


@pytest.mark.parametrize(
    "flags", ["--members 2", "--fp16", "--checkpoint-activations", "--arch transformer_lm"]
)
def test_other_models_are_averaged_too(train, tmp_path, flags):
    flags = flags.replace("transformer_lm", "transformer_lm --share-decoder-input-output-embed")
    state = train(tmp_path, "--max-update", "2", *flags.split())
    assert state["extra_state"]["ema"].keys() == state["model"].keys()
    moved = [
        name
        for name, value in state["extra_state"]["ema"].items()
        if not torch.equal(value, state["model"][name])
    ]
    assert any("fc" in name for name in moved)


@pytest.mark.parametrize("router", ["preserve", "copy", "tree"])
def test_a_grown_stage_starts_its_average_from_the_grown_weights(train, averaged, tmp_path, router):
    growing = ("--stage", "1", "--moe-expert-count", "6", "--grow-experts", "2", "--grow-router", router)
    updates = ("--max-update", "1", "--warmup-updates", "1")
    state = train(tmp_path / "grown", *growing, "--finetune-from-model", averaged, *updates)
    grown = load(tmp_path / "grown" / GROWN)["model"]
    is_mean_of(state, grown)


def test_a_new_stage_starts_its_average_from_the_weights_it_loads(train, averaged, tmp_path):
    previous = load(averaged)
    state = train(tmp_path / "next", "--stage", "1", "--finetune-from-model", averaged, "--max-update", "1")
    is_mean_of(state, previous["model"])
    del previous["extra_state"]["ema"]
    torch.save(previous, tmp_path / "without.pt")
    without = ("--finetune-from-model", tmp_path / "without.pt")
    is_mean_of(train(tmp_path / "later", "--stage", "1", *without, "--max-update", "1"), previous["model"])


def is_mean_of(state: dict, before: dict) -> None:
    """Assert that the average in `state` is the mean of the weights `before` and after its only update."""
    for name, value in state["extra_state"]["ema"].items():
        if value.is_floating_point():
            mean = (before[name].float() + state["model"][name].float()) / 2
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6, msg=name)


def test_expert_parallelism_averages_all_experts(train, tmp_path):
    flags = "--max-update 2 --cpu --distributed-world-size 2 --ddp-backend legacy_ddp".split()
    together = train(tmp_path / "whole", *flags)["extra_state"]["ema"]
    apart = train(tmp_path / "parallel", *flags, "--moe-expert-parallel")["extra_state"]["ema"]
    assert together.keys() == apart.keys()
    for name, value in together.items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding error, which Adam scales up
            torch.testing.assert_close(apart[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_average_is_evaluated_combined_and_exported(start, stream, averaged, tmp_path):
    state = load(averaged)
    average = state["extra_state"]["ema"]
    as_model = tmp_path / "as_model.pt"
    torch.save(state | {"model": average}, as_model)

    def nll(path, *flags) -> float:
        out = tmp_path / "result.json"
        done = start("evaluate", stream, "--path", path, "--out", out, *flags).wait()
        assert done.code == 0, done.output
        return json.loads(out.read_text())["nll"]

    found = nll(averaged, "--weights", "average")
    assert found == nll(as_model)
    assert found != nll(averaged)
    both = tmp_path / "both.pt"
    combining = ("--out", both, "--weights", "average")
    assert start("combine", averaged, averaged, *combining).wait().code == 0
    assert nll(both) == pytest.approx(found, rel=1e-5)
    assert "has no weight average" in start("combine", both, averaged, *combining).wait().error
    assert start("export", averaged, "--out", tmp_path / "hf", "--weights", "average").wait().code == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    key = "layers.0.self_attn.k_proj.weight"
    assert torch.equal(exported[f"members.0.{key}"], average[f"decoder.{key}"])


def test_a_checkpoint_without_an_average_is_one_clear_line(start, stream, averaged, tmp_path):
    state = copy.copy(load(averaged))
    del state["extra_state"]["ema"]
    plain = tmp_path / "plain.pt"
    torch.save(state, plain)
    average = ("--weights", "average", "--out", tmp_path / "out")
    for command in (("evaluate", stream, "--path", plain), ("combine", plain), ("export", plain)):
        error = start(*command, *average).wait().error
        assert error == f"{plain} has no weight average: train with --store-ema, or leave --weights out"
    untrained = ("--untrained", "--arch", "switch_gmoe_tiny")
    assert "an untrained model has no average" in start("evaluate", stream, *untrained, *average).wait().error
    assert not (tmp_path / "out").exists()
