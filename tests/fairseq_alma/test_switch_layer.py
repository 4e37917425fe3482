"""The Switch layer: outputs and gradients of a one-hot reference, capacity, memory;
see also test_router."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.moe import expert_parallel
from fairseq_alma.moe import layer as switch_layer
from fairseq_alma.moe.dispatchers import (
    Dispatcher,
    LoopDispatcher,
    PaddedDispatcher,
    fastest_dispatcher,
)
from fairseq_alma.moe.layer import SwitchFFN
from tests.fairseq_alma.shared import DIM, HIDDEN, Largest, make_layer


def one_hot_reference(layer: SwitchFFN, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """The same layer with the one-hot (S, E, C) dispatch of Mesh TensorFlow;
    x (B, T, D), padding (B, T)."""
    tokens = x.reshape(-1, DIM)
    probs = torch.softmax(tokens @ layer.router.weight.T - layer.router.copies.log(), -1)
    chosen = F.one_hot((tokens @ layer.router.weight.T).argmax(-1), layer.experts)
    chosen = chosen * ~padding.reshape(-1, 1)
    position = chosen.cumsum(0) * chosen - 1
    capacity = layer.capacity(len(tokens)) or len(tokens)
    slot = (position[:, :, None] == torch.arange(capacity)).to(
        x.dtype
    )  # (S, E, C), zero where dropped
    inputs = torch.einsum("sec,sd->ecd", slot, tokens)
    hidden = F.gelu(torch.einsum("ecd,ehd->ech", inputs, layer.w1) + layer.b1[:, None])
    outputs = torch.einsum("ech,edh->ecd", hidden, layer.w2) + layer.b2[:, None]
    weight = (probs * layer.router.copies * chosen).sum(-1)
    y = torch.einsum("sec,ecd->sd", slot, outputs) * weight[:, None]
    return y.view(x.shape)


def forced(layout: str):
    """A `fastest_dispatcher` with this layout; padded without a capacity becomes loop."""

    def dispatcher(x_SD, routing, capacity) -> Dispatcher:
        if layout == "padded" and capacity is not None:
            return PaddedDispatcher(routing, capacity)
        return LoopDispatcher(routing)

    return dispatcher


LAYOUTS = ["loop", "padded"]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    experts=st.integers(1, 7),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    split=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_one_hot_reference_in_outputs_and_gradients(
    monkeypatch, layout, experts, shape, factor, split, seed
):
    monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced(layout))
    layer = make_layer(experts, factor)
    torch.manual_seed(seed)
    if split:
        copies = torch.randint(1, 5, (experts,))
        layer.load_state_dict({**layer.state_dict(), "router.copies": copies})
    x = torch.randn(*shape, DIM, requires_grad=True)
    padding = torch.rand(shape) < 0.2
    weight = torch.randn(*shape, DIM)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    results = []
    for y in (layer(x, padding)[0], one_hot_reference(layer, x, padding)):
        gradients = torch.autograd.grad(
            (y * weight).sum(), [x, *layer.parameters()], allow_unused=True
        )
        results.append((y, gradients))
    (our_output, our_gradients), (reference, reference_gradients) = results
    torch.testing.assert_close(our_output, reference, atol=1e-5, rtol=1e-5)
    for name, a, b in zip(names, our_gradients, reference_gradients, strict=True):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_memory_of_a_gradient_is_reused_once_nothing_refers_to_it():
    layer = make_layer(4, 0.0)
    x = torch.randn(2, 16, DIM)

    def gradient() -> torch.Tensor:
        layer(x)[0].sum().backward()
        assert layer.w1.grad is not None
        return layer.w1.grad

    expected = gradient().clone()
    gradient()
    torch.testing.assert_close(gradient(), 3 * expected)  # accumulated
    layer.zero_grad()
    kept_gradient = gradient()
    memory = kept_gradient.data_ptr()
    layer.zero_grad()
    assert gradient().data_ptr() != memory
    kept_gradient.zero_()
    torch.testing.assert_close(layer.w1.grad, expected)
    memory = layer.w1.grad.data_ptr()
    del kept_gradient
    layer.zero_grad()
    assert gradient().data_ptr() == memory
    torch.testing.assert_close(layer.w1.grad, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_has_shape_s_e_c(layout, monkeypatch):
    monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced(layout))
    layer = make_layer(4)
    x = torch.randn(1, 4096, DIM, requires_grad=True)
    with Largest() as largest:
        layer(x)[0].sum().backward()
    assert largest.elements <= 1.1 * HIDDEN * 4096  # a one-hot dispatch has S * S elements


def test_the_layout_of_a_gpu_never_syncs_with_the_host(monkeypatch):
    """Fake tensors have shapes but no values: reading one raises."""
    monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced("padded"))
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        layer = make_layer(4, 1.0)
        x = torch.randn(2, 64, DIM, requires_grad=True)
        padding = torch.zeros(2, 64, dtype=torch.bool)
        y, routing = layer(x, padding)
        (y.sum() + routing.balance_loss).backward()
        assert y.shape == x.shape
        assert all(p.grad is not None for p in layer.parameters())
        # The capacity of the largest batch of all processes, an argument, sets the rows.
        layer.ep_group = SimpleNamespace(size=1, process_group=None)
        monkeypatch.setattr(expert_parallel, "_AllToAll", SimpleNamespace(apply=lambda _, x: x))
        layer(x, padding, largest_batch=256)
        layer.ep_group = None
        monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced("loop"))
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            layer(x)


class Operations(TorchDispatchMode):
    """Counts the operations of torch, views and allocations among them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("padded", "most_forward", "most_backward"), [(False, 63, 57), (True, 70, 58)]
)  # torch 2.7 takes four more than later versions
def test_a_pass_in_the_layout_of_a_gpu_takes_few_operations(
    monkeypatch, padded, most_forward, most_backward
):
    """On a GPU each costs a launch, which up to 16k tokens takes longer than the experts."""
    monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced("padded"))
    layer = make_layer(4).bfloat16()
    x = torch.randn(2, 64, DIM, dtype=torch.bfloat16, requires_grad=True)
    padding = torch.rand(2, 64) < 0.2 if padded else None
    with Operations() as forward:
        y, routing = layer(x, padding)
    loss = y.float().sum() + routing.balance_loss
    with Operations() as backward:
        torch.autograd.grad(loss, [x, *layer.parameters()])
    assert forward.count <= most_forward
    assert backward.count <= most_backward


@pytest.mark.parametrize("padded", [False, True])
def test_torch_compile_takes_the_layout_of_a_gpu_in_one_graph(monkeypatch, padded):
    monkeypatch.setattr(switch_layer, "fastest_dispatcher", forced("padded"))
    layer = make_layer(4)
    x = torch.randn(2, 64, DIM)
    padding = torch.rand(2, 64) < 0.2 if padded else None
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y, routing = function(x, padding)
        loss = y.square().sum() + routing.balance_loss
        results.append((y, *torch.autograd.grad(loss, list(layer.parameters()))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_drops_come_last_in_batch_major_order_and_only_in_training():
    layer = make_layer(2, capacity_factor=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0] = 1.0  # positive tokens all go to expert 0
    x = torch.rand(4, 6, DIM) + 0.1
    y, routing = layer(x)
    dropped = (y.abs().sum(-1) == 0).reshape(-1)
    assert dropped.tolist() == [False] * 12 + [True] * 12  # C = ceil(24 / 2): sequences 0 and 1
    assert (routing.counts_E - routing.kept_E).tolist() == [12, 0]
    layer.eval()
    assert (layer(x)[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize(
    ("device", "capacity", "layout"),
    [
        ("cuda:1", 16, PaddedDispatcher),
        ("cuda:1", None, LoopDispatcher),
        ("cpu", 16, LoopDispatcher),
    ],
)
def test_a_gpu_with_a_capacity_pads(device, capacity, layout):
    x = SimpleNamespace(device=torch.device(device))
    routing = make_layer(3).router(torch.randn(20, DIM))
    assert type(fastest_dispatcher(x, routing, capacity)) is layout


def test_a_batch_of_padding_only_gives_zeros_and_gradients():
    layer = make_layer(3)
    y, routing = layer(torch.randn(2, 5, DIM), torch.ones(2, 5, dtype=torch.bool))
    (y.sum() + routing.balance_loss).backward()
    assert (y == 0).all()
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all() for p in (layer.w1, layer.router.weight)
    )
