"""The Switch layer against a one-hot reference, its capacity, its losses; its router is in test_router."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_alma.moe import layer as switch_layer
from fairseq_alma.moe.dispatch import best_layout
from fairseq_alma.moe.layer import SwitchFFN, expert_losses, routing_stats

DIM, HIDDEN = 8, 16


def make(experts: int, capacity_factor: float = 1.0, eval_capacity: float = -1.0) -> SwitchFFN:
    torch.manual_seed(experts)
    layer = SwitchFFN(DIM, HIDDEN, experts, capacity_factor, eval_capacity, F.gelu, nn.Identity())
    nn.init.normal_(layer.router.weight)
    return layer


def one_hot_reference(layer: SwitchFFN, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """The same layer by the one-hot (S, E, C) dispatch of Mesh TensorFlow; x (T, B, D), padding (B, T)."""
    tokens = x.transpose(0, 1).reshape(-1, DIM)
    probs = torch.softmax(tokens @ layer.router.weight.T - layer.router.copies.log(), -1)
    chosen = F.one_hot((tokens @ layer.router.weight.T).argmax(-1), layer.experts)
    chosen = chosen * ~padding.reshape(-1, 1)
    position = chosen.cumsum(0) * chosen - 1
    capacity = layer.capacity(len(tokens)) or len(tokens)
    slot = (position[:, :, None] == torch.arange(capacity)).to(x.dtype)  # (S, E, C), zero where dropped
    inputs = torch.einsum("sec,sd->ecd", slot, tokens)
    hidden = F.gelu(torch.einsum("ecd,ehd->ech", inputs, layer.w1) + layer.b1[:, None])
    outputs = torch.einsum("ech,edh->ecd", hidden, layer.w2) + layer.b2[:, None]
    weight = (probs * layer.router.copies * chosen).sum(-1)
    y = torch.einsum("sec,ecd->sd", slot, outputs) * weight[:, None]
    return y.view(x.size(1), x.size(0), DIM).transpose(0, 1)


def forced(layout: str):
    """`best_layout` for a device that wants this one; padded, whose layout is a number, needs a capacity."""
    return lambda x, capacity: ("loop" if capacity is None else capacity) if layout == "padded" else layout


needs_grouped_mm = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="grouped_mm is of torch 2.10")
LAYOUTS = ["loop", "padded", pytest.param("grouped", marks=needs_grouped_mm)]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    experts=st.integers(1, 7),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 4)),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    split=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_one_hot_reference_in_outputs_and_gradients(
    monkeypatch, layout, experts, shape, factor, split, seed
):
    monkeypatch.setattr(switch_layer, "best_layout", forced(layout))
    layer = make(experts, factor)
    torch.manual_seed(seed)
    if split:
        layer.router.copies.random_(1, 5)
    x = torch.randn(*shape, DIM, requires_grad=True)
    padding = torch.rand(shape[1], shape[0]) < 0.2
    layer.padding_mask = padding
    weight = torch.randn(*shape, DIM)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    results = []
    for function in (layer, lambda value: one_hot_reference(layer, value, padding)):
        y = function(x)
        gradients = torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()], allow_unused=True)
        results.append((y, gradients))
    (ours, our_gradients), (reference, reference_gradients) = results
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    for name, a, b in zip(names, our_gradients, reference_gradients, strict=True):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_memory_of_a_gradient_is_used_again_once_nothing_else_uses_it():
    layer = make(4, 0.0)
    x = torch.randn(16, 2, DIM)

    def gradient() -> torch.Tensor:
        layer(x).sum().backward()
        assert layer.w1.grad is not None
        return layer.w1.grad

    expected = gradient().clone()
    gradient()
    torch.testing.assert_close(gradient(), 3 * expected)  # accumulated
    layer.zero_grad()
    kept = gradient()
    memory = kept.data_ptr()
    layer.zero_grad()
    assert gradient().data_ptr() != memory
    kept.zero_()
    torch.testing.assert_close(layer.w1.grad, expected)
    memory = layer.w1.grad.data_ptr()
    del kept
    layer.zero_grad()
    assert gradient().data_ptr() == memory
    torch.testing.assert_close(layer.w1.grad, expected)


class Allocations(TorchDispatchMode):
    """Counts the elements of every tensor that an operation makes; views and what is written in place not."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, tensor.numel())
                self.total += tensor.numel()
        return result


def allocations(layout: str, tokens: int, experts: int, monkeypatch) -> Allocations:
    monkeypatch.setattr(switch_layer, "best_layout", forced(layout))
    layer = make(experts)
    x = torch.randn(tokens, 1, DIM, requires_grad=True)
    with Allocations() as counted:
        layer(x).sum().backward()
    return counted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_linear_in_tokens_and_no_tensor_is_of_tokens_times_experts_times_capacity(
    layout, monkeypatch
):
    small, large = (allocations(layout, tokens, 4, monkeypatch) for tokens in (1024, 4096))
    assert large.largest <= 1.1 * HIDDEN * 4096  # a one-hot dispatch has S * S elements
    assert large.total <= 4 * small.total
    more = allocations(layout, 4096, 16, monkeypatch)
    router = 20 * 4096 * 12  # (S, E) in softmax and losses, of 12 more experts
    weights = 12 * sum(p.numel() for p in make(1).parameters())
    assert more.total <= 1.1 * large.total + router + 3 * weights


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        ("padded", 1.0),
        pytest.param("grouped", 1.0, marks=needs_grouped_mm),
        pytest.param("grouped", 0.0, marks=needs_grouped_mm),
    ],
)
def test_layouts_of_the_gpu_never_wait_for_a_number(layout, factor, monkeypatch):
    """Fake tensors have shapes and no values: what asks for one raises."""
    monkeypatch.setattr(switch_layer, "best_layout", forced(layout))
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):  # what grouped_mm of a GPU takes
        layer = make(4, factor)
        x = torch.randn(64, 2, DIM, requires_grad=True)
        layer.padding_mask = torch.zeros(2, 64, dtype=torch.bool)
        y = layer(x)
        (y.sum() + layer.balance_loss).backward()
        assert y.shape == x.shape
        assert all(p.grad is not None for p in layer.parameters())
        layer.shards = SimpleNamespace(tokens=256, send=lambda rows, _: rows, send_back=lambda rows, _: rows)
        if factor:  # as many rows as the largest batch of all processes wants, which is known before
            layer(x)
        layer.shards = None
        monkeypatch.setattr(switch_layer, "best_layout", forced("loop"))
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            layer(x)


def test_drops_come_last_in_batch_major_order_and_only_in_training():
    layer = make(2, capacity_factor=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0] = 1.0  # positive tokens all go to expert 0
    x = torch.rand(6, 4, DIM) + 0.1
    dropped = (layer(x).transpose(0, 1).abs().sum(-1) == 0).reshape(-1)
    assert dropped.tolist() == [False] * 12 + [True] * 12  # C = ceil(24 / 2): sequences 0 and 1
    assert routing_stats(layer)["dropped"] == 12
    layer.eval()
    assert (layer(x).abs().sum(-1) > 0).all()


def test_evaluation_capacity_limits_when_asked():
    layer = make(1, eval_capacity=0.25).eval()
    layer(torch.randn(4, 4, DIM))
    assert layer.kept.tolist() == [4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_capacity_of_zero_every_token_is_dropped(layout, monkeypatch):
    monkeypatch.setattr(switch_layer, "best_layout", forced(layout))
    layer = make(3, eval_capacity=0.0).eval()
    y = layer(torch.randn(5, 2, DIM))
    y.sum().backward()
    assert (y == 0).all()
    assert layer.kept.tolist() == [0, 0, 0]
    assert (layer.w1.grad == 0).all()


@pytest.mark.parametrize(
    ("capability", "layout"),
    [((7, 0), 16), ((8, 0), 16), ((8, 9), 16), ((9, 0), "grouped"), ((10, 3), "grouped"), ((12, 0), 16)],
)
def test_grouped_mm_is_used_where_it_does_not_wait_for_the_device(capability, layout, monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
    )
    x = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.bfloat16)
    assert best_layout(x, 16) == layout
    assert asked == [torch.device("cuda:1")]


def test_padding_is_not_routed_and_takes_no_capacity():
    layer = make(2, capacity_factor=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0] = 1.0
    x = torch.rand(4, 2, DIM) + 0.1
    layer.padding_mask = torch.tensor([[False, True, True, True], [False, False, False, True]])
    y = layer(x).transpose(0, 1)
    assert layer.routing.counts.tolist() == [4, 0]
    assert (y[~layer.padding_mask].abs().sum(-1) > 0).all()
    assert (y[layer.padding_mask] == 0).all()


def test_a_batch_of_padding_only_gives_zeros_and_gradients():
    layer = make(3)
    layer.padding_mask = torch.ones(2, 5, dtype=torch.bool)
    y = layer(torch.randn(5, 2, DIM))
    (y.sum() + layer.balance_loss).backward()
    assert (y == 0).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in (layer.w1, layer.router.weight))


def test_balance_loss_is_one_at_balance_and_experts_when_collapsed():
    layer = make(4)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, DIM) * 1e-4)
    x = torch.eye(4, DIM).repeat(6, 1).view(24, 1, DIM)  # an equal number for each expert
    layer(x)
    assert layer.balance_loss.item() == pytest.approx(1.0, abs=1e-3)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 100.0
    layer(x)
    assert layer.balance_loss.item() == pytest.approx(4.0, abs=1e-3)


def test_balance_loss_counts_tokens_before_they_are_dropped():
    layer = make(4, capacity_factor=0.1)
    x = torch.randn(32, 2, DIM)
    layer(x)
    probs = torch.softmax(x.transpose(0, 1).reshape(-1, DIM) @ layer.router.weight.T, -1)
    share = torch.bincount(probs.argmax(-1), minlength=4) / 64
    assert layer.balance_loss.item() == pytest.approx(4 * (share * probs.mean(0)).sum().item(), rel=1e-5)


def test_expert_losses_sum_the_loss_of_the_tokens_of_each_expert():
    layer = make(3).eval()
    layer(torch.randn(7, 2, DIM))
    nll = torch.rand(2, 7)
    sums = expert_losses(layer, nll)
    for expert in range(3):
        assert sums[expert].item() == pytest.approx(nll[layer.expert_of == expert].sum().item(), rel=1e-6)


def test_stats_describe_the_pass():
    layer = make(3, capacity_factor=0.5)
    layer(torch.randn(16, 2, DIM))
    stats = routing_stats(layer)
    assert stats["tokens"] == 32
    assert stats["load"].sum() == 32
    assert stats["dropped"] == (stats["load"] - math.ceil(16 / 3)).clamp(min=0).sum()
    probs = layer.routing.probs
    assert stats["entropy"].item() == pytest.approx(-(probs * probs.log()).sum().item(), rel=1e-5)
