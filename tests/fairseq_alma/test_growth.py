"""Growth: `preserve` and `tree` are exact, `copy` changes gates as in the paper,
every copy gets tokens."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from alma.errors import UserError
from fairseq_alma import growth
from fairseq_alma.growth import GROWN, grow_model_state, grow_optimizer_state, losing_experts
from fairseq_alma.moe.layer import SwitchFFN, switch_layers
from fairseq_alma.moe.router import Routing
from fairseq_alma.training.precision import FP32
from tests.fairseq_alma.shared import changed, load

PREFIX = "decoder.layers.1.fc1"


def grown(build, model, parents, router, **kwargs):
    """A copy of `model` with its experts `parents` split."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = state[f"{PREFIX}.w1"].size(0)
    grow_model_state(state, {PREFIX: parents}, router, **kwargs)
    _, larger = build("--moe-expert-count", str(before + len(parents)))
    larger.load_state_dict(state)
    return larger.eval()


@torch.no_grad()
def run(model, sample) -> tuple[torch.Tensor, Routing]:
    """The logits, and the routing of the only Switch layer."""
    logits, extra = model.eval()(**sample["net_input"])
    return logits, extra["routings"]["1"]


def test_preserve_without_noise_keeps_logits_even_twice(build, sample):
    _, model = build("--moe-expert-count", "4")
    before, _ = run(model, sample)
    once = grown(build, model, [2, 0], "preserve")
    torch.testing.assert_close(run(once, sample)[0], before, atol=1e-5, rtol=0)
    twice = grown(build, once, [4, 1, 2], "preserve")  # 4 is itself a copy of 2
    torch.testing.assert_close(run(twice, sample)[0], before, atol=1e-5, rtol=0)
    assert switch_layers(twice)["1"].router.copies.tolist() == [2, 2, 4, 1, 4, 2, 4, 2, 4]


def test_copy_divides_every_gate_by_one_plus_the_copied_probabilities(build, sample):
    _, model = build("--moe-expert-count", "4")
    before, old = run(model, sample)
    after, new = run(grown(build, model, [2, 0], "copy"), sample)
    assert (after - before).abs().max() > 1e-3
    expected = old.gate_S / (1 + old.probs_SE[:, [2, 0]].sum(1))
    torch.testing.assert_close(new.gate_S, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [0.0, 0.1])
def test_copies_are_plain_without_noise_and_evenly_set_apart_with_it(build, size):
    _, model = build("--moe-expert-count", "4")
    larger = grown(
        build, model, [2, 0], "copy", noise=size, mean_tokens={PREFIX: torch.randn(4, 32)}
    )
    old, new = (
        switch_layers(language_model)["1"].router.weight for language_model in (model, larger)
    )
    assert torch.equal(new[[1, 3]], old[[1, 3]])
    assert torch.equal(new[4:], old[[2, 0]]) == torch.equal(new[[2, 0]], old[[2, 0]]) == (size == 0)
    torch.testing.assert_close(new[4:] - old[[2, 0]], old[[2, 0]] - new[[2, 0]], atol=1e-6, rtol=0)
    assert (new[4:] - new[[2, 0]]).std().item() == pytest.approx(size, rel=0.3)


def test_each_growth_of_a_run_has_noise_of_its_own(build, monkeypatch):
    """The same stage has the same noise again, so that a repeated training gives the same model."""
    _, model = build("--moe-expert-count", "4")
    losses = {PREFIX: torch.tensor([0.0, 1.0, 0.0, 0.0])}
    mean_tokens = {PREFIX: torch.ones(4, 32)}

    def new_row(stage):
        """The router's row of the expert that stage `stage` adds."""
        state = {name: value.clone() for name, value in model.state_dict().items()}
        saved = {"model": state, "optimizer_history": [{}]}
        monkeypatch.setattr(growth.checkpoint_utils, "load_checkpoint_to_cpu", lambda _: saved)
        args = SimpleNamespace(
            grow_experts=1,
            grow_router="copy",
            grow_noise=0.1,
            grow_optimizer="reset",
            schedule="stage",
            stage=stage,
        )
        cfg = SimpleNamespace(common=SimpleNamespace(seed=1))
        trainer = SimpleNamespace(task=SimpleNamespace(args=args), cfg=cfg)
        grown_state = growth._grown_state("previous.pt", model, losses, mean_tokens, trainer)
        return grown_state["model"][f"{PREFIX}.router.weight"][4]

    assert torch.equal(new_row(1), new_row(1))
    assert not torch.equal(new_row(1), new_row(2))


def test_tree_growth_keeps_outputs_with_any_noise_even_twice():
    torch.manual_seed(0)
    layers = {
        experts: nn.ModuleDict({"fc1": SwitchFFN(8, 16, experts, 0.0, F.gelu, nn.Identity())})
        for experts in (3, 5, 8)
    }
    x = torch.randn(50, 4, 8)
    before, routing = layers[3]["fc1"](x)
    routed = [routing.expert_S]
    for old, new, split in ((3, 5, [0, 2]), (5, 8, [0, 3, 1])):  # then 0 has a gate, 3 is a child
        state = dict(layers[old].state_dict())
        means = {"fc1": torch.randn(old, 8)}
        grow_model_state(state, {"fc1": split}, "tree", noise=0.5, mean_tokens=means, seed=new)
        layers[new].load_state_dict(state)
        after, routing = layers[new]["fc1"](x)
        torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
        routed.append(routing.expert_S)
        changed = routed[-1] != routed[-2]
        assert set(routed[-1][changed].tolist()) == set(range(old, new))  # every child has tokens
    assert layers[8]["fc1"].router.parent.tolist() == [-1, -1, -1, 0, 2, 0, 3, 1]


def test_tree_growth_keeps_the_loss_even_after_preserve(build, sample):
    _, model = build("--moe-expert-count", "4")
    model = grown(build, model, [2, 0], "preserve")
    before, _ = run(model, sample)
    loss = F.cross_entropy(before.flatten(0, 1), sample["target"].flatten())
    for split in ([2, 1], [6, 2, 4]):  # 2 was split by preserve, then by tree; 6 is its child
        # Any mean tokens will do where growth keeps the function.
        means = {PREFIX: torch.randn(switch_layers(model)["1"].experts, 32)}
        model = grown(build, model, split, "tree", noise=0.5, mean_tokens=means)
        after, _ = run(model, sample)
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
        after_loss = F.cross_entropy(after.flatten(0, 1), sample["target"].flatten())
        assert after_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    router = switch_layers(model)["1"].router
    assert router.parent.tolist() == [-1] * 6 + [2, 1, 6, 2, 4]
    assert router.copies.tolist() == [2, 1, 2, 1, 2, 2] + [1] * 5


def test_a_tree_is_grown_trained_and_grown_again_by_fairseq_train(
    start, train, stage0, evaluate, stream, tiny, tmp_path
):
    def flags(stage: int, router="tree") -> list:
        count = ["--stage", stage, "--moe-expert-count", 4 + 2 * stage, "--grow-experts", 2]
        return [*count, "--finetune-from-model", last[stage - 1], "--grow-router", router]

    def nll(checkpoint) -> float:
        return evaluate("--path", checkpoint, "--gen-subset", "valid")["nll"]

    last = [stage0, *(tmp_path / f"stage_0{stage}" / "checkpoint_last.pt" for stage in (1, 2))]
    train(last[1].parent, *flags(1), "--lr", "0", "--max-update", "1")
    assert nll(last[1]) == pytest.approx(nll(last[0]), abs=1e-6)
    train(last[2].parent, *flags(2))
    before = load(last[2].parent / GROWN)["model"]
    after = load(last[2])["model"]
    gates = f"{PREFIX}.router.weight"
    assert (after[gates] - before[gates])[4:].abs().amax(1).min() > 1e-3
    assert torch.equal(after[f"{PREFIX}.router.parent"], before[f"{PREFIX}.router.parent"])
    assert (after[f"{PREFIX}.router.parent"] >= 0).tolist() == [False] * 4 + [True] * 4
    refused = start(
        "train", stream, *tiny, "--save-dir", tmp_path / "other", *flags(2, "preserve")
    ).wait()
    assert "use --grow-router tree again" in refused.error


@pytest.mark.parametrize("router", ["preserve", "tree"])
def test_noise_divides_the_tokens_of_a_parent_with_its_copy(build, sample, router):
    _, model = build("--moe-expert-count", "2")
    layer = switch_layers(model)["1"]
    sums = torch.zeros(2, 32)

    def add(_, inputs, routing):
        sums.index_add_(0, routing.expert_S, inputs[0])

    hook = layer.router.register_forward_hook(add)
    _, routing = run(model, sample)
    hook.remove()
    before = routing.counts_E
    _, routing = run(grown(build, model, [0, 1], router), sample)
    assert routing.counts_E.tolist() == [*before.tolist(), 0, 0]
    for seed in range(5):
        larger = grown(
            build, model, [0, 1], router, noise=0.1, mean_tokens={PREFIX: sums}, seed=seed
        )
        after = run(larger, sample)[1].counts_E
        assert after.min() >= 0.1 * after.sum(), (before, after)


def test_losing_experts_have_the_largest_summed_loss():
    assert losing_experts(torch.tensor([3.0, 9.0, 1.0, 7.0]), 2) == [1, 3]
    with pytest.raises(UserError, match="each of the 4 experts at most once"):
        losing_experts(torch.ones(4), 5)


SHOW = """
from fairseq_alma import growth

losing, evaluate = growth.losing_experts, growth.evaluate

def show(losses, count):
    print("losses", *losses.tolist())
    return losing(losses, count)

def share(model, batches, pad):
    batches = [batch for batch in batches if batch]
    print("share", len(batches))
    return evaluate(model, batches, pad)

growth.losing_experts, growth.evaluate = show, share
"""


def numbers(output: str, name: str) -> list[float]:
    """The numbers in the lines of an output that begin with `name`."""
    lines = [line.split() for line in output.splitlines() if line.startswith(f"{name} ")]
    return [float(word) for _, *words in lines for word in words]


def test_two_processes_evaluate_half_of_the_validation_set_each(
    start, start_two, stage0, stream, tiny, tmp_path, user_dir
):
    """Processes that wait for a slower one may time out."""
    sizes = ("--max-tokens-valid", "64")
    growing = (
        "--grow-experts",
        "2",
        "--moe-expert-count",
        "6",
        "--stage",
        "1",
        "--max-update",
        "1",
        *sizes,
    )
    flags = (stream, *tiny, *growing, "--finetune-from-model", stage0)
    one = start("train", *flags, "--save-dir", tmp_path / "one", *user_dir(SHOW)).wait()
    assert one.code == 0, one.output
    shares = []
    losses = numbers(one.output, "losses")
    for process in start_two(*flags, "--save-dir", tmp_path / "two", *user_dir(SHOW)):
        finished = process.wait()
        assert finished.code == 0, finished.output
        shares += numbers(finished.output, "share")
        losses_on_two = numbers(finished.output, "losses")
        if losses_on_two:  # process 0 chooses
            assert losses_on_two == pytest.approx(losses, rel=1e-5)
    assert len(shares) == 2
    assert len(losses) == 4
    assert abs(shares[0] - shares[1]) <= 1 < shares[0]
    a, b = (load(tmp_path / name / GROWN) for name in ("one", "two"))
    assert a["growth"] == b["growth"]
    torch.testing.assert_close(a["model"], b["model"], atol=1e-6, rtol=1e-5)


def test_an_error_in_process_0_is_raised_in_all(stage0, start_two, stream, tiny, tmp_path):
    without = changed(
        stage0, tmp_path / "without.pt", lambda state: state.pop("last_optimizer_state")
    )
    growing = ("--grow-experts", "2", "--moe-expert-count", "6", "--grow-optimizer", "copy")
    flags = (*growing, "--stage", "1", "--finetune-from-model", without)
    for process in start_two(stream, *tiny, "--save-dir", tmp_path / "two", *flags):
        assert "has no optimizer state" in process.wait().error
    assert not (tmp_path / "two" / GROWN).exists()


def test_adafactors_columns_are_no_experts_though_there_are_as_many():
    """A router of four experts for tokens of width four: its columns stay as they are."""
    name = f"{PREFIX}.router.weight"
    columns = torch.arange(4.0)
    rows = 10 * torch.arange(4.0)
    saved = {"state": {0: {"exp_avg_sq_col": columns, "exp_avg_sq_row": rows}}}
    grown_state = grow_optimizer_state(saved, {name: torch.Size([4, 4])}, {PREFIX: [2, 0]})
    state = grown_state["state"][0]
    assert torch.equal(state["exp_avg_sq_col"], columns)
    assert state["exp_avg_sq_row"].tolist() == [0, 10, 20, 30, 20, 0]


def test_copies_get_their_parents_optimizer_state_and_nothing_else_changes(build):
    """But for the fp32 weights of half precision."""
    _, model = build("--moe-expert-count", "3")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    states = {
        i: {"step": 3, "exp_avg": torch.randn(shape), FP32: torch.randn(shape)}
        for i, shape in enumerate(shapes.values())
    }
    saved = {
        "state": states,
        "param_groups": [{"lr": 0.1, "params": list(states)}],
        "loss_scale": 8.0,
    }
    grown = grow_optimizer_state(saved, shapes, {PREFIX: [1]})
    _, larger = build("--moe-expert-count", "4")
    assert grown["param_groups"] == saved["param_groups"]
    assert grown["loss_scale"] == 8.0
    stacked = 0
    for i, (name, parameter) in enumerate(larger.named_parameters()):
        old = states[i]["exp_avg"]
        new = grown["state"][i]["exp_avg"]
        assert grown["state"][i].keys() == {"step", "exp_avg"}
        assert new.shape == parameter.shape
        assert torch.equal(new[: len(old)], old)
        if new.shape != shapes[name]:
            stacked += 1
            assert torch.equal(new[-1], old[1])
    assert stacked == 5
