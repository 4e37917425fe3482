"""--store-ema: the weight average in training, after a resume, in a new stage and in our
commands."""

import math

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig

from alma import averages
from alma.errors import UserError
from fairseq_alma.checkpoint import with_weights
from fairseq_alma.growth import GROWN
from fairseq_alma.training import weight_average
from fairseq_alma.training.weight_average import WeightAverage
from tests.fairseq_alma.shared import changed, load

EMA = ("--store-ema", "--ema-decay", "0.5")


@pytest.fixture
def train(last_of):
    """`train(save, *flags)` trains and returns the last checkpoint."""
    return lambda save, *flags: last_of(save, *EMA, *flags)


@pytest.fixture
def averaged(train_once, tmp_path):
    """A checkpoint of 4 updates, with an average."""
    return train_once(tmp_path / "run", *EMA, "--max-update", "4")


def test_each_weight_is_averaged_once_in_fp32_and_buffers_are_copied(build):
    _, model = build("--members", "1")
    assert model.decoder.embed_tokens.weight is model.decoder.output_projection.weight
    model.half()
    expected = {name: weight.detach().float() for name, weight in model.named_parameters()}
    average = WeightAverage(model, EMAConfig(store_ema=True, ema_decay=0.999))
    generator = torch.Generator().manual_seed(0)
    for update in range(1, 4):  # 1 / update > 1 - decay
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 1e-2)
                expected[name] = torch.lerp(
                    expected[name], weight.float(), 1 / update
                )  # the plain mean
            for buffer in model.buffers():
                buffer.add_(1)
        average.step(model, update)
    averaged = average.get_model()
    for name, weight in averaged.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)
    for (name, copied), buffer in zip(averaged.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(copied, buffer.to(copied.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_equals_a_lerp_of_each_tensor(dtype, build, monkeypatch):
    """In groups of tensors, each with one kernel."""
    monkeypatch.setattr(weight_average, "_COPIED", 2000)
    _, model = build()
    model.to(dtype)
    average = WeightAverage(model, EMAConfig(store_ema=True, ema_decay=0.9))
    expected = [weight.detach().float().clone() for weight in model.parameters()]
    foreach = torch._foreach_lerp_
    numbers = []

    def lerp(averages, weights, share):
        numbers.append(sum(weight.numel() for weight in weights[:-1]))
        foreach(averages, weights, share)

    monkeypatch.setattr(torch, "_foreach_lerp_", lerp)
    for update in range(1, 4):
        with torch.no_grad():
            for weight, mean in zip(model.parameters(), expected, strict=True):
                weight.add_(1 / 3)
                mean.lerp_(weight.float(), averages.share(update, 0.9))
        average.step(model, update)
    assert all(map(torch.equal, average.get_model().parameters(), expected))
    assert 0 < max(numbers) < 2000
    assert 3 < len(numbers) < len(expected)


def test_a_polynomial_average_of_numbers(build):
    """The shares of Shamir and Zhang (2013), section 4."""
    _, model = build("--members", "1")
    average = WeightAverage(model, EMAConfig(store_ema=True), eta=3.0)
    weight = model.decoder.output_projection.weight
    expected = 0.0
    for update in range(1, 5):
        with torch.no_grad():
            weight.fill_(float(update**2))
        share = (3 + 1) / (update + 3)
        expected = (1 - share) * expected + share * update**2
        average.step(model, update)
    projection = average.get_model().decoder.output_projection.weight
    torch.testing.assert_close(projection, torch.full_like(projection, expected))


@pytest.mark.parametrize(
    "kind", [(), pytest.param(("--ema-poly", "4"), marks=pytest.mark.thorough)]
)
def test_a_resumed_average_equals_that_of_an_uninterrupted_run(
    kind, start, stream, tiny, train, tmp_path
):
    flags = ("--max-update", "12", "--save-interval-updates", "4", "--ema-update-freq", "3", *kind)
    whole = train(tmp_path / "whole", *flags)
    save = tmp_path / "killed"
    child = start("train", stream, *tiny, *EMA, "--save-dir", save, *flags)
    child.kill_when(lambda: any(save.glob("checkpoint_*_8.pt")))
    resumed = train(save, *flags)
    for name, value in whole["extra_state"]["ema"].items():
        assert torch.equal(value, resumed["extra_state"]["ema"][name]), name
        assert torch.equal(whole["model"][name], resumed["model"][name]), name
    assert any(
        not torch.equal(whole["extra_state"]["ema"][name], whole["model"][name])
        for name in whole["model"]
    )


@pytest.mark.thorough
def test_the_average_starts_with_the_update_that_ema_start_update_names(train, tmp_path):
    """The k-th update counts from 1; after a resume too.
    With few updates the average is the plain mean."""
    flags = (
        "--ema-start-update 3 --ema-decay .99 --save-interval-updates 1 --keep-interval-updates 9"
    ).split()
    whole = train(tmp_path / "whole", *flags, "--max-update", "6")
    train(tmp_path / "resumed", *flags, "--max-update", "4")
    resumed = train(tmp_path / "resumed", *flags, "--max-update", "6")
    at = [
        load(path)["model"] for path in sorted((tmp_path / "whole").glob("checkpoint_1_[345].pt"))
    ]
    for name, value in whole["extra_state"]["ema"].items():
        assert torch.equal(value, resumed["extra_state"]["ema"][name]), name
        mean = torch.stack([weights[name].double() for weights in (*at, whole["model"])]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6, msg=name)
    assert len(at) == 3


@pytest.mark.parametrize(
    "flags",
    [
        "--members 2 --checkpoint-activations",
        pytest.param("--arch transformer_lm --fp16", marks=pytest.mark.thorough),
    ],
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


def test_the_average_of_a_schedule_for_each_stage_starts_anew(train, averaged, tmp_path):
    first = (
        "--stage",
        "1",
        "--finetune-from-model",
        averaged,
        "--max-update",
        "1",
        "--warmup-updates",
        "1",
    )
    for growing in ((), ("--moe-expert-count", "6", "--grow-experts", "2")):
        state = train(tmp_path / f"next{len(growing)}", *first, *growing)
        is_average(state, state["model"], 1)


def is_average(state: dict, old: dict, share: float) -> None:
    """Assert that the last update of the average in `state` gave the new weights `share`;
    `old`: before."""
    for name, value in state["extra_state"]["ema"].items():
        if value.is_floating_point():
            expected = torch.lerp(old[name].float(), state["model"][name].float(), share)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("growing", ["", "copy", "tree"])
def test_the_average_of_a_continuous_schedule_goes_on(train, averaged, tmp_path, growing):
    words = f"--moe-expert-count 6 --grow-experts 2 --grow-router {growing}" if growing else ""
    flags = ("--schedule", "continuous", "--finetune-from-model", averaged, "--max-update", "5")
    save = tmp_path / "next"
    state = train(save, "--stage", "1", *flags, *words.split())
    before = load(save / GROWN if growing else averaged)
    is_average(state, before["extra_state"]["ema"], 0.5)
    if growing:  # a split expert's average splits, too
        parents = before["growth"]
        shares = before["extra_state"]["ema"]
        old = load(averaged)
        pairs = [(before["model"], old["model"]), (shares, old["extra_state"]["ema"])]
        for prefix, split in parents.items():
            assert torch.equal(shares[f"{prefix}.w1"][4:], shares[f"{prefix}.w1"][split])
            rows = f"{prefix}.router.weight"  # with the noise of the weights' router
            noise = [
                grown[rows][4:] - old[rows][split] * (growing == "copy") for grown, old in pairs
            ]
            torch.testing.assert_close(*noise, rtol=0, atol=1e-6)
            assert noise[0].abs().max() > 1e-3
        assert not torch.equal(shares[f"{prefix}.w1"], before["model"][f"{prefix}.w1"])


def test_a_continuous_schedule_starts_an_average_that_the_stage_before_lacks(
    train, averaged, tmp_path
):
    without = changed(
        averaged, tmp_path / "without.pt", lambda state: state["extra_state"].pop("ema")
    )
    flags = ("--schedule", "continuous", "--finetune-from-model", without)
    state = train(tmp_path / "next", "--stage", "1", *flags, "--max-update", "5")
    is_average(state, state["model"], 1)


def test_expert_parallelism_averages_all_experts(train, tmp_path):
    flags = "--max-update 2 --cpu --distributed-world-size 2 --ddp-backend legacy_ddp".split()
    together = train(tmp_path / "whole", *flags)["extra_state"]["ema"]
    apart = train(tmp_path / "parallel", *flags, "--moe-expert-parallel")["extra_state"]["ema"]
    assert together.keys() == apart.keys()
    for name, value in together.items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding error, which Adam scales up
            torch.testing.assert_close(apart[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_average_is_evaluated(evaluate, averaged, tmp_path):
    state = load(averaged)
    as_model = tmp_path / "as_model.pt"
    torch.save(state | {"model": state["extra_state"]["ema"]}, as_model)
    record = evaluate("--path", averaged, "--weights", "average", "--valid")
    assert record["nll"] == evaluate("--path", as_model)["nll"]
    raw = evaluate("--path", averaged, "--valid")
    assert record["raw"]["nll"] == raw["nll"] != record["nll"]
    assert record["raw"]["valid"] == raw["valid"] != record["valid"]
    assert record["raw"]["perplexity"] == pytest.approx(math.exp(record["raw"]["nll"]))


def test_a_checkpoint_without_an_average_is_one_clear_line(start, stream, averaged, tmp_path):
    plain = changed(averaged, tmp_path / "plain.pt", lambda state: state["extra_state"].pop("ema"))
    average = ("--weights", "average", "--out", tmp_path / "out")
    for command in (("evaluate", stream, "--path", plain), ("export", plain)):
        error = start(*command, *average).wait().error
        assert (
            error
            == f"{plain} has no weight average: train with --store-ema, or leave --weights out"
        )
    untrained = ("--untrained", "--arch", "switch_gmoe_tiny")
    assert (
        "an untrained model has no average"
        in start("evaluate", stream, *untrained, *average).wait().error
    )
    none = start("export", plain, "--weights", "last:0", "--out", tmp_path / "out").wait()
    assert "last:0: give trained, average, or last:K such as last:8" in none.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [("--ema-poly", "4"), ("--store-ema", "--ema-poly", "-1")])
def test_a_wrong_polynomial_average_is_one_clear_line(flags, start, stream, tiny, tmp_path):
    done = start("train", stream, *tiny, *flags, "--save-dir", tmp_path / "run").wait()
    assert (done.code, done.error) == (
        2,
        f"--ema-poly {flags[-1]}: give a number from 0, and --store-ema",
    )
    assert not list(tmp_path.rglob("*.pt"))


def test_the_mean_of_the_last_checkpoints_is_evaluated(evaluate, train, tmp_path):
    save = tmp_path / "run"
    flags_of_saves = ("--save-interval-updates", "2", "--keep-interval-updates", "3")
    last = train(save, "--max-update", "7", *flags_of_saves)  # 2, 4 and 6, and the last
    states = [*(load(path) for path in sorted(save.glob("checkpoint_*_[46].pt"))), last]
    assert [state["optimizer_history"][-1]["num_updates"] for state in states] == [4, 6, 7]
    out = tmp_path / "alone" / "checkpoint_last.pt"
    mean = with_weights(str(save / "checkpoint_last.pt"), last, "last:3")
    for name, value in mean["model"].items():
        expected = torch.stack([state["model"][name].double() for state in states]).mean(0)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7, msg=name)
    out.parent.mkdir()
    torch.save(mean, out)
    nll = evaluate("--path", save / "checkpoint_best.pt", "--weights", "last:3")["nll"]
    assert nll == pytest.approx(evaluate("--path", out)["nll"], rel=1e-6)
    flags = "--save-interval-updates N --keep-interval-updates 9"
    with pytest.raises(
        UserError, match=f"{out.parent} has 1 checkpoints to average: train with {flags}"
    ):
        with_weights(str(out), mean, "last:9")
