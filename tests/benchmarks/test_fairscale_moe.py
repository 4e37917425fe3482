"""Where fairscale's MOELayer and our Switch layer define the same function, outputs and gradients agree.

In fp32: MOELayer takes nothing else.
"""

import copy

import pytest
import torch

from tests.fairseq_alma.shared import DIM, make_layer

EXPERTS, SHAPE = 4, (4, 16)


@pytest.fixture
def peer(benchmark):
    """The module, with a process group of one process."""
    module = benchmark("fairscale_moe")
    with module.one_process():
        yield module


@pytest.fixture
def top2(peer):
    """`top2(ours)`: a MOELayer with Top2Gate and the weights of `ours`."""
    from fairscale.nn import Top2Gate

    def make(ours):
        gate = Top2Gate(DIM, ours.experts)
        gate.wg.weight.data.copy_(ours.router.weight.data)
        return peer.FairscaleFFN(ours, gate)

    return make


def results(ffn, router_weight, x, balance: float = 1.0) -> dict[str, torch.Tensor]:
    """Output, load-balancing loss times `balance`, and gradients of their sum by name."""
    x = x.clone().requires_grad_()
    y, losses = ffn(x)
    loss = balance * losses.balance_loss
    weight = torch.linspace(0, 1, y.numel()).view(y.shape)
    ((y * weight).sum() + loss).backward()
    return {"y": y.detach(), "loss": loss.detach(), "x": x.grad, "router": router_weight.grad} | experts(ffn)


def experts(ffn) -> dict[str, torch.Tensor]:
    """Gradients of the experts, as SwitchFFN stacks them."""
    if not hasattr(ffn, "layer"):
        return {name: getattr(ffn, name).grad for name in ("w1", "b1", "w2", "b2")}
    gradients = {}
    for ours, theirs in (("w1", "0.weight"), ("b1", "0.bias"), ("w2", "2.weight"), ("b2", "2.bias")):
        by_expert = [expert.get_parameter(theirs).grad for expert in ffn.layer.experts]
        gradients[ours] = torch.stack(by_expert)
    return gradients


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *omitted: str) -> None:
    """Equal within 1e-6 of the largest element."""
    for name in ours.keys() - set(omitted):
        scale = max(1.0, float(ours[name].abs().max()))
        torch.testing.assert_close(theirs[name], ours[name], atol=1e-6 * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_moe_layer_with_our_router_is_our_layer(peer, factor):
    ours = make_layer(EXPERTS, factor)
    gate = peer.Top1Gate(copy.deepcopy(ours.router), factor)
    theirs = peer.FairscaleFFN(ours, gate)
    x = torch.randn(*SHAPE, DIM)
    y, routing = ours(x)
    assert (routing.counts_E > routing.kept_E).any() == (factor < 2)
    assert_same(results(ours, ours.router.weight, x), results(theirs, gate.router.weight, x))


def test_top2gate_is_our_layer_where_the_first_expert_has_all_the_weight(top2):
    """Probabilities of second experts are 0 in fp32, so their outputs have no weight."""
    ours = make_layer(EXPERTS, 2.0)
    with torch.no_grad():
        ours.router.weight.copy_(200 * torch.eye(EXPERTS, DIM))
    theirs = top2(ours)
    chosen = torch.randint(EXPERTS, SHAPE).where(torch.rand(SHAPE) < 0.4, torch.zeros(SHAPE, dtype=torch.int64))
    x = torch.cat([torch.nn.functional.one_hot(chosen, EXPERTS), torch.randn(*SHAPE, DIM - EXPERTS)], -1)
    _, routing = ours(x)
    assert routing.counts_E[0] > routing.kept_E[0]  # both drop the last tokens
    first = results(ours, ours.router.weight, x)
    assert_same(first, results(theirs, theirs.layer.gate.wg.weight, x, EXPERTS**2))


def test_top2gate_is_our_layer_where_the_second_expert_gives_0(top2):
    """Of two experts no token is dropped, and gates are not normalised: they sum to 1."""
    ours = make_layer(2, 2.0)
    with torch.no_grad():
        ours.router.weight[0] = ours.router.weight[0].abs()
        ours.router.weight[1] = -ours.router.weight[1].abs()
        ours.w2[1] = 0
        ours.b2[1] = 0
    theirs = top2(ours)
    x = torch.rand(*SHAPE, DIM) / 4
    first = results(ours, ours.router.weight, x)
    second = results(theirs, theirs.layer.gate.wg.weight, x, 4)
    assert first["router"].abs().max() > 1e-2
    for name in ("w1", "b1", "w2", "b2"):
        first[name] = first[name][0]
        second[name] = second[name][0]
    assert_same(first, second)


def test_the_loss_of_top2gate_is_ours_over_the_square_of_the_experts(top2):
    """Theirs is the mean of f_e * P_e, f_e of first choices before any is dropped; ours is E times the sum."""
    ours = make_layer(EXPERTS)
    theirs = top2(ours)
    weight = theirs.layer.gate.wg.weight
    x = torch.randn(*SHAPE, DIM)
    (first,) = torch.autograd.grad(ours(x)[1].balance_loss, ours.router.weight)
    (second,) = torch.autograd.grad(theirs(x)[1].balance_loss, weight)
    torch.testing.assert_close(EXPERTS**2 * theirs(x)[1].balance_loss, ours(x)[1].balance_loss)
    assert first.abs().max() > 1e-3
    torch.testing.assert_close(EXPERTS**2 * second, first, atol=1e-6, rtol=0)
