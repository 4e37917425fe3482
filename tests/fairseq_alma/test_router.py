"""The router of the Switch layer: one softmax, its tree, copies of experts, half precision."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_alma.moe.layer import Router, SwitchFFN

DIM = 8


def make(experts: int, capacity_factor: float = 1.0) -> SwitchFFN:
    torch.manual_seed(experts)
    layer = SwitchFFN(DIM, 16, experts, capacity_factor, -1.0, F.gelu, nn.Identity())
    nn.init.normal_(layer.router.weight)
    return layer


def make_tree(parent: list[int]) -> Router:
    router = Router(DIM, len(parent))
    nn.init.normal_(router.weight)
    copies = torch.randint(1, 5, (len(parent),)).masked_fill(torch.tensor(parent) >= 0, 1)
    state = {"parent": torch.tensor(parent), "copies": copies}
    router.load_state_dict({**router.state_dict(), **state})
    return router


def slow_route(router: Router, token: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The expert, the gate and the probabilities (E,) of one token (D,), node by node from the root."""
    z, parent, log_m = router.weight @ token, router.parent.tolist(), router.copies.log()
    roots = [e for e, old in enumerate(parent) if old == -1]
    scale = sum(torch.exp(z[e] - log_m[e]) for e in roots)
    probs = {}

    def children(expert, last):
        """The next split of `expert` after split `last`, None where it is a leaf, and its probabilities."""
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
    while (found := children(expert, last))[0] is not None:
        last, stay = found
        taken = stay if stay >= 0.5 else 1 - stay
        expert = expert if stay >= 0.5 else last
        gate = gate * (1 + taken - taken.detach())
    return expert, gate, torch.stack([probs[e] for e in range(len(parent))])


@settings(deadline=None, max_examples=40)
@given(data=st.data(), experts=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_a_tree_routes_as_the_descent_token_by_token_in_values_and_gradients(data, experts, seed):
    torch.manual_seed(seed)
    router = make_tree([-1, *(data.draw(st.integers(-1, j - 1)) for j in range(1, experts))])
    tokens, weight = torch.randn(12, DIM), torch.randn(12, experts + 1)
    routing = router(tokens)
    slow = [slow_route(router, token) for token in tokens]
    assert routing.expert.tolist() == [expert for expert, _, _ in slow]
    assert routing.counts.sum() == 12
    torch.testing.assert_close(routing.probs.sum(1), torch.ones(12), atol=1e-6, rtol=0)
    gradients = []
    for gate, probs in (
        (routing.gate, routing.probs),
        tuple(map(torch.stack, list(zip(*slow, strict=True))[1:])),
    ):
        gradients.append(
            torch.autograd.grad((torch.cat([probs, gate[:, None]], 1) * weight).sum(), router.weight)
        )
    torch.testing.assert_close(routing.gate, torch.stack([gate for _, gate, _ in slow]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(routing.probs, torch.stack([p for _, _, p in slow]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_the_output_alone_trains_the_gates_of_the_splits_from_zero_on():
    layer = make(2, capacity_factor=0.0)
    state = {**layer.router.state_dict(), "parent": torch.tensor([-1, 0])}
    layer.router.load_state_dict(state)
    with torch.no_grad():
        layer.router.weight[1] = 0.0
    layer(torch.randn(6, 4, DIM)).sum().backward()
    assert layer.routing.counts.tolist() == [24, 0]  # a tie: the old expert
    assert layer.routing.gate.tolist() == [1.0] * 24
    assert layer.router.weight.grad[1].abs().min() > 0


def test_a_tree_outlives_copies_and_half_precision_and_goes_with_the_state_dict():
    router = make_tree([-1, 0, -1, 1, 0])
    tokens = torch.randn(64, DIM)
    expected = router(tokens)
    assert torch.equal(copy.deepcopy(router)(tokens).probs, expected.probs)
    half = copy.deepcopy(router).half()
    assert half.parent.tolist() == [-1, 0, -1, 1, 0]
    torch.testing.assert_close(half(tokens).probs, expected.probs, atol=5e-3, rtol=0)
    router.load_state_dict({**router.state_dict(), "parent": torch.full((5,), -1)})
    flat = torch.softmax(tokens @ router.weight.T - router.copies.log(), -1)
    torch.testing.assert_close(router(tokens).probs, flat)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_no_count_of_copies(dtype):
    """Rounded logarithms would multiply every gate of experts split in 2, 4 or 64 by up to 1.007."""
    router = Router(DIM, 4)
    router.copies.copy_(torch.tensor([2, 1, 4, 64]))
    router = router.to(dtype)
    expected = Router(DIM, 4)
    expected.load_state_dict({**router.state_dict(), "weight": router.weight.float()})
    tokens = torch.randn(64, DIM)
    torch.testing.assert_close(router(tokens).gate, expected(tokens).gate, atol=1e-6, rtol=0)
    assert router.copies.tolist() == [2, 1, 4, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_routers_saved_by_earlier_versions_load(dtype):
    router = make_tree([-1, -1, -1])
    state = router.state_dict()
    state["log_multiplicity"] = torch.tensor([1.0, 2.0, 64.0]).log().to(dtype)
    del state["copies"], state["parent"]
    router.load_state_dict(state)
    assert router.copies.tolist() == [1, 2, 64]
    assert router.parent.tolist() == [-1, -1, -1]


def test_a_router_without_splits_is_one_softmax_to_the_bit():
    router = make_tree([-1] * 6)
    tokens = torch.randn(64, DIM)
    logits, routing = F.linear(tokens, router.weight), router(tokens)
    probs = torch.softmax(logits - router.copies.log(), -1)
    expert = logits.argmax(-1)
    assert torch.equal(routing.probs, probs)
    assert torch.equal(routing.expert, expert)
    assert torch.equal(routing.gate, probs[range(64), expert] * router.copies[expert])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_router_computes_in_fp32_in_half_precision_models(dtype):
    layer = make(4).to(dtype)
    x = torch.randn(16, 2, DIM, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert layer.routing.probs.dtype == torch.float32
    expected = torch.softmax(x.float().transpose(0, 1).reshape(-1, DIM) @ layer.router.weight.float().T, -1)
    torch.testing.assert_close(layer.routing.probs, expected)
