"""The router: one softmax, its tree, copies of experts, half precision,
load-balancing loss, metrics."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_alma.moe.metrics import expert_losses, layer_stats
from fairseq_alma.moe.router import Router
from tests.fairseq_alma.shared import DIM, make_layer


def make_tree(parent: list[int]) -> Router:
    router = Router(DIM, len(parent))
    nn.init.normal_(router.weight)
    copies = torch.randint(1, 5, (len(parent),)).masked_fill(torch.tensor(parent) >= 0, 1)
    state = {"parent": torch.tensor(parent), "copies": copies}
    router.load_state_dict({**router.state_dict(), **state})
    return router


def slow_route(router: Router, token: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The expert, the gate and the probabilities (E,) of one token (D,),
    node by node from the root."""
    z = router.weight @ token
    parent = router.parent.tolist()
    log_m = router.copies.log()
    roots = [e for e, old in enumerate(parent) if old == -1]
    scale = sum(torch.exp(z[e] - log_m[e]) for e in roots)
    probs = {}

    def children(expert, last):
        """The next split of `expert` after split `last`, None where it is a leaf,
        and its probabilities."""
        new = next((j for j in range(last + 1, len(parent)) if parent[j] == expert), None)
        return new, None if new is None else 1 / (1 + torch.exp(-z[new]))

    def fill(expert, last, probability):
        new, stay = children(expert, last)
        if new is None:
            probs[expert] = probability
        else:
            fill(expert, new, probability * stay)
            fill(new, new, probability * (1 - stay))

    for e in roots:
        fill(e, e, torch.exp(z[e] - log_m[e]) / scale)
    expert = last = max(roots, key=lambda e: z[e].item())
    gate = torch.exp(z[expert]) / scale
    while (pair := children(expert, last))[0] is not None:
        last, stay = pair
        taken = stay if stay >= 0.5 else 1 - stay
        expert = expert if stay >= 0.5 else last
        gate = gate * (1 + taken - taken.detach())
    return expert, gate, torch.stack([probs[e] for e in range(len(parent))])


@settings(deadline=None, max_examples=40)
@given(data=st.data(), experts=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_a_tree_routes_as_the_descent_token_by_token_in_values_and_gradients(data, experts, seed):
    torch.manual_seed(seed)
    router = make_tree([-1, *(data.draw(st.integers(-1, j - 1)) for j in range(1, experts))])
    tokens = torch.randn(12, DIM)
    weight = torch.randn(12, experts + 1)
    routing = router(tokens)
    slow = [slow_route(router, token) for token in tokens]
    assert routing.expert_S.tolist() == [expert for expert, _, _ in slow]
    assert routing.counts_E.sum() == 12
    torch.testing.assert_close(routing.probs_SE.sum(1), torch.ones(12), atol=1e-6, rtol=0)
    slow_gate, slow_probs = (torch.stack(parts) for parts in list(zip(*slow, strict=True))[1:])
    gradients = [
        torch.autograd.grad((torch.cat([probs, gate[:, None]], 1) * weight).sum(), router.weight)
        for gate, probs in ((routing.gate_S, routing.probs_SE), (slow_gate, slow_probs))
    ]
    torch.testing.assert_close(routing.gate_S, slow_gate, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(routing.probs_SE, slow_probs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_the_output_alone_trains_the_gates_of_the_splits_from_zero_on():
    layer = make_layer(2, capacity_factor=0.0)
    state = {**layer.router.state_dict(), "parent": torch.tensor([-1, 0])}
    layer.router.load_state_dict(state)
    with torch.no_grad():
        layer.router.weight[1] = 0.0
    y, routing = layer(torch.randn(4, 6, DIM))
    y.sum().backward()
    assert routing.counts_E.tolist() == [24, 0]  # a tie: the old expert
    assert routing.gate_S.tolist() == [1.0] * 24
    assert layer.router.weight.grad[1].abs().min() > 0


def test_a_tree_outlives_copies_and_half_precision_and_goes_with_the_state_dict():
    router = make_tree([-1, 0, -1, 1, 0])
    tokens = torch.randn(64, DIM)
    expected = router(tokens)
    assert torch.equal(copy.deepcopy(router)(tokens).probs_SE, expected.probs_SE)
    half = copy.deepcopy(router).half()
    assert half.parent.tolist() == [-1, 0, -1, 1, 0]
    torch.testing.assert_close(half(tokens).probs_SE, expected.probs_SE, atol=5e-3, rtol=0)
    router.load_state_dict({**router.state_dict(), "parent": torch.full((5,), -1)})
    flat = torch.softmax(tokens @ router.weight.T - router.copies.log(), -1)
    torch.testing.assert_close(router(tokens).probs_SE, flat)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_no_count_of_copies(dtype):
    """Rounded logarithms would multiply every gate of experts split in 2, 4 or 64 by up to
    1.007."""
    router = Router(DIM, 4)
    copies = torch.tensor([2, 1, 4, 64])
    router.load_state_dict({**router.state_dict(), "copies": copies})
    router = router.to(dtype)
    expected = Router(DIM, 4)
    expected.load_state_dict({**router.state_dict(), "weight": router.weight.float()})
    tokens = torch.randn(64, DIM)
    torch.testing.assert_close(router(tokens).gate_S, expected(tokens).gate_S, atol=1e-6, rtol=0)
    assert router.copies.tolist() == [2, 1, 4, 64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_router_computes_in_fp32_in_half_precision_models(dtype):
    layer = make_layer(4).to(dtype)
    x = torch.randn(2, 16, DIM, dtype=dtype)
    y, routing = layer(x)
    assert y.dtype == dtype
    assert routing.probs_SE.dtype == torch.float32
    expected = torch.softmax(x.float().reshape(-1, DIM) @ layer.router.weight.float().T, -1)
    torch.testing.assert_close(routing.probs_SE, expected)


def test_balance_loss_counts_tokens_before_they_are_dropped():
    router = make_layer(4).router
    tokens = torch.randn(64, DIM)
    routing = router(tokens, capacity=2)
    assert routing.kept_E.sum() < routing.counts_E.sum() == 64
    probs = torch.softmax(tokens @ router.weight.T, -1)
    share = torch.bincount(probs.argmax(-1), minlength=4) / 64
    assert routing.balance_loss.item() == pytest.approx(
        4 * (share * probs.mean(0)).sum().item(), rel=1e-5
    )


def test_the_balance_loss_does_not_see_padding():
    router = make_layer(4).router
    real = torch.randn(40, DIM)
    padding = torch.randn(24, DIM).abs()  # of other experts than the real tokens'
    padded = torch.arange(64) >= 40
    together = router(torch.cat([real, padding]), padded).balance_loss
    assert together.item() == pytest.approx(router(real).balance_loss.item(), rel=1e-6)
    assert together.item() != pytest.approx(
        router(torch.cat([real, padding])).balance_loss.item(), rel=1e-3
    )


def test_expert_losses_sum_the_loss_of_the_tokens_of_each_expert():
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    _, routing = make_layer(3)(torch.randn(2, 7, DIM), padding)
    nll = torch.rand(2, 7)
    sums = expert_losses(routing, nll)
    assert sums.sum().item() == pytest.approx(nll[~padding].sum().item(), rel=1e-6)
    for expert in range(3):
        chosen = routing.expert_S.view(2, 7) == expert
        assert sums[expert].item() == pytest.approx(nll[chosen].sum().item(), rel=1e-6)


@pytest.mark.parametrize("padded", [0, 5])
def test_routing_stats_describe_the_tokens_of_a_pass_but_padding(padded):
    routing = make_layer(3).router(
        torch.randn(32 + padded, DIM), torch.arange(32 + padded) >= 32, capacity=6
    )
    stats = {
        name.removeprefix("moe_l0_"): value for name, value in layer_stats({"0": routing}).items()
    }
    assert stats["tokens"] == 32
    assert stats["load"].sum() == 32
    assert stats["dropped"] == (stats["load"] - 6).clamp(min=0).sum()
    assert stats["balance"] == 32 * routing.balance_loss
    probs_SE = routing.probs_SE[:32]
    assert stats["top1"].item() == pytest.approx(probs_SE.amax(1).sum().item(), rel=1e-5)
    entropy = -(probs_SE * probs_SE.log()).sum().item()
    assert stats["entropy"].item() == pytest.approx(entropy, rel=1e-5)
