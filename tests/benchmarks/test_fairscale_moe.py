"""Where fairscale's MOELayer defines the function of our Switch layer, outputs and gradients agree.

In fp32: outside autocast MOELayer takes nothing else.
"""

import pytest
import torch

from fairseq_alma.moe.layer import STACKED
from tests.fairseq_alma.shared import DIM, make_layer

EXPERTS = 4
SHAPE = (4, 16)


@pytest.fixture
def peer(benchmark):
    """The module, with a process group of one process."""
    module = benchmark("fairscale_moe")
    with module.one_process():
        yield module


def results(ffn, router_weight, x, balance: int = 1) -> dict[str, torch.Tensor]:
    """Output, load-balancing loss times `balance`, and gradients of their sum by name."""
    x = x.clone().requires_grad_()
    y, losses = ffn(x)
    loss = balance * losses.balance_loss
    weight = torch.linspace(0, 1, y.numel()).view(y.shape)
    ((y * weight).sum() + loss).backward()
    gradients = {"x": x.grad, "router": router_weight.grad} | gradients_of_experts(ffn)
    return {"y": y.detach(), "loss": loss.detach()} | gradients


def gradients_of_experts(ffn) -> dict[str, torch.Tensor]:
    """Gradients of the experts, as SwitchFFN stacks them."""
    if not hasattr(ffn, "layer"):
        return {name: ffn.get_parameter(name).grad for name in STACKED}
    gradients = {}
    for ours, theirs in zip(STACKED, ("0.weight", "0.bias", "2.weight", "2.bias"), strict=True):
        by_expert = [expert.get_parameter(theirs).grad for expert in ffn.layer.experts]
        gradients[ours] = torch.stack(by_expert)
    return gradients


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal within 1e-6, or within 1e-6 of the largest element if that is above 1."""
    for name, expected in ours.items():
        atol = 1e-6 * max(1.0, float(expected.abs().max()))
        difference = float((theirs[name] - expected).abs().max())
        assert difference <= atol, f"{name}: {difference}"


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_moe_layer_with_our_router_is_our_layer(peer, factor):
    ours = make_layer(EXPERTS, factor)
    theirs = peer.with_top1_gate(ours)
    x = torch.randn(*SHAPE, DIM)
    _, routing = ours(x)
    assert (routing.counts_E > routing.kept_E).any() == (factor < 2)
    first = results(ours, ours.router.weight, x)
    assert_same(first, results(theirs, theirs.layer.gate.router.weight, x))


def test_top2gate_is_our_layer_where_the_first_expert_has_all_the_weight(peer):
    """Probabilities of second experts are 0 in fp32, so their outputs have no weight."""
    ours = make_layer(EXPERTS, 2.0)
    with torch.no_grad():
        ours.router.weight.copy_(200 * torch.eye(EXPERTS, DIM))
    theirs = peer.with_top2_gate(ours)
    crowd = torch.rand(SHAPE) < 0.6
    chosen = torch.randint(EXPERTS, SHAPE).masked_fill(crowd, 0)
    logits = torch.nn.functional.one_hot(chosen, EXPERTS)
    x = torch.cat([logits, torch.randn(*SHAPE, DIM - EXPERTS)], -1)
    _, routing = ours(x)
    assert routing.counts_E[0] > routing.kept_E[0]  # both drop the last tokens
    first = results(ours, ours.router.weight, x)
    assert_same(first, results(theirs, theirs.layer.gate.wg.weight, x, EXPERTS**2))


def test_top2gate_is_our_layer_where_the_second_expert_gives_0(peer):
    """Of two experts no token is dropped, and gates are not normalised: they sum to 1."""
    ours = make_layer(2, 2.0)
    with torch.no_grad():
        ours.router.weight[0] = ours.router.weight[0].abs()
        ours.router.weight[1] = -ours.router.weight[1].abs()
        ours.w2[1] = 0
        ours.b2[1] = 0
    theirs = peer.with_top2_gate(ours)
    x = torch.rand(*SHAPE, DIM) / 4
    first = results(ours, ours.router.weight, x)
    second = results(theirs, theirs.layer.gate.wg.weight, x, 4)
    assert first["router"].abs().max() > 1e-2
    for name in ("w1", "b1", "w2", "b2"):
        first[name] = first[name][0]
        second[name] = second[name][0]
    assert_same(first, second)


def test_the_loss_of_top2gate_is_ours_over_the_square_of_the_experts(peer):
    """Theirs is the mean of f_e * P_e over experts, ours E times the sum.

    f_e is the fraction of first choices before any token is dropped.
    """
    ours = make_layer(EXPERTS)
    theirs = peer.with_top2_gate(ours)
    weight = theirs.layer.gate.wg.weight
    x = torch.randn(*SHAPE, DIM)
    (first,) = torch.autograd.grad(ours(x)[1].balance_loss, ours.router.weight)
    (second,) = torch.autograd.grad(theirs(x)[1].balance_loss, weight)
    torch.testing.assert_close(EXPERTS**2 * theirs(x)[1].balance_loss, ours(x)[1].balance_loss)
    assert first.abs().max() > 1e-3
    torch.testing.assert_close(EXPERTS**2 * second, first, atol=1e-6, rtol=0)
