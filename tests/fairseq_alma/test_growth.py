"""Growing: `preserve` is exact, `copy` jumps as the paper's does, every copy gets tokens."""

import pytest
import torch

from alma.errors import UserError
from fairseq_alma.growth import grow_model_state, grow_optimizer_state, losing_experts
from fairseq_alma.switch_layer import switch_layers

PREFIX = "decoder.layers.1.fc1"


def grown(build, model, parents, router, **kwargs):
    """A model with `parents` split off `model`'s experts."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = state[f"{PREFIX}.w1"].size(0)
    grow_model_state(state, {PREFIX: parents}, router, **kwargs)
    _, larger = build("--moe-expert-count", str(before + len(parents)))
    larger.load_state_dict(state)
    return larger.eval()


def logits(model, sample) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**sample["net_input"])[0]


def test_preserve_without_noise_leaves_logits_as_they_were_even_twice(build, sample):
    _, model = build("--moe-expert-count", "4")
    before = logits(model, sample)
    once = grown(build, model, [2, 0], "preserve")
    torch.testing.assert_close(logits(once, sample), before, atol=1e-5, rtol=0)
    twice = grown(build, once, [4, 1, 2], "preserve")  # 4 is itself a copy of 2
    torch.testing.assert_close(logits(twice, sample), before, atol=1e-5, rtol=0)
    assert switch_layers(twice)["1"].router.log_multiplicity.exp().tolist() == pytest.approx(
        [2, 2, 4, 1, 4, 2, 4, 2, 4]
    )


def test_copy_divides_every_gate_by_one_plus_the_copied_probabilities(build, sample):
    _, model = build("--moe-expert-count", "4")
    before = logits(model, sample)
    old = switch_layers(model)["1"].routing
    larger = grown(build, model, [2, 0], "copy")
    assert (logits(larger, sample) - before).abs().max() > 1e-3  # the paper's jump
    new = switch_layers(larger)["1"].routing
    expected = old.gate / (1 + old.probs[:, [2, 0]].sum(1))
    torch.testing.assert_close(new.gate, expected, atol=1e-5, rtol=1e-4)


def test_noise_shares_the_tokens_of_a_parent_with_its_copy(build, sample):
    _, model = build("--moe-expert-count", "2")
    layer = switch_layers(model)["1"]
    sums = torch.zeros(2, 32)

    def add(router, inputs, routing):
        sums.index_add_(0, routing.expert, inputs[0])

    hook = layer.router.register_forward_hook(add)
    logits(model, sample)
    hook.remove()
    before = layer.routing.counts
    without = grown(build, model, [0, 1], "preserve")
    logits(without, sample)
    assert switch_layers(without)["1"].routing.counts.tolist() == [*before.tolist(), 0, 0]
    for seed in range(5):
        means = {PREFIX: sums}
        larger = grown(build, model, [0, 1], "preserve", noise=0.1, mean_tokens=means, seed=seed)
        logits(larger, sample)
        after = switch_layers(larger)["1"].routing.counts
        assert after.min() >= 0.1 * after.sum(), (before, after)


def test_losing_experts_are_those_of_the_largest_summed_loss():
    assert losing_experts(torch.tensor([3.0, 9.0, 1.0, 7.0]), 2) == [1, 3]
    with pytest.raises(UserError, match="each of the 4 experts at most once"):
        losing_experts(torch.ones(4), 5)


def adam_state(model, flat: bool) -> dict:
    values = [torch.randn(p.shape) for p in model.parameters()]
    if flat:
        return {"state": {0: {"step": 3, "exp_avg": torch.cat([v.reshape(-1) for v in values])}}}
    return {"state": {i: {"step": 3, "exp_avg": v.clone()} for i, v in enumerate(values)}}


@pytest.mark.parametrize("flat", [False, True])
def test_copies_get_their_parents_optimizer_state_and_nothing_else_changes(build, flat):
    _, model = build("--moe-expert-count", "3")
    optimizer = adam_state(model, flat)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    old = optimizer["state"][0]["exp_avg"] if flat else None
    before = (
        dict(zip(shapes, old.split([s.numel() for s in shapes.values()]), strict=True))
        if flat
        else {name: optimizer["state"][i]["exp_avg"].clone() for i, name in enumerate(shapes)}
    )
    grow_optimizer_state(optimizer, shapes, {PREFIX: [1]})
    _, larger = build("--moe-expert-count", "4")
    new_shapes = {name: p.shape for name, p in larger.named_parameters()}
    state = optimizer["state"]
    pieces = (
        state[0]["exp_avg"].split([s.numel() for s in new_shapes.values()])
        if flat
        else [state[i]["exp_avg"] for i in range(len(shapes))]
    )
    stacked = 0
    for (name, shape), piece in zip(new_shapes.items(), pieces, strict=True):
        old_value, new_value = before[name].view(shapes[name]), piece.view(shape)
        assert torch.equal(new_value[: len(old_value)], old_value)
        if shape != shapes[name]:
            stacked += 1
            assert torch.equal(new_value[-1], old_value[1])
    assert stacked == 5
