"""The earlier code beside which the ladder measures today's: it computes the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_alma.moe.dispatchers import PaddedDispatcher
from fairseq_alma.moe.layer import SwitchFFN
from fairseq_alma.training.loss import chunked_nll


@pytest.fixture
def before(benchmark):
    """The package, after fairseq's functions were replaced."""
    package = benchmark("gpu.before")
    package.hooks.install()
    return package


def test_the_earlier_code_takes_the_place_of_todays_and_leaves_it(before):
    for change in before.CHANGES:
        places = before.EARLIER[change]()
        owners = [before.owner_of(earlier.owner) for earlier in places]
        names = [earlier.name for earlier in places]
        today = [getattr(*place) for place in zip(owners, names, strict=True)]
        with before.without([change]):
            now = [getattr(*place) for place in zip(owners, names, strict=True)]
            assert now == [earlier.code for earlier in places]
        assert places
        assert [getattr(*place) for place in zip(owners, names, strict=True)] == today


def test_the_switch_layer_computes_the_same(before):
    """Output, routing and gradients, some tokens being dropped."""
    torch.manual_seed(0)
    layer = SwitchFFN(16, 32, 4, 0.5, F.gelu, nn.Identity())
    x = torch.randn(2, 32, 16)
    results = []
    for changes in ((), before.CHANGES):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with before.without(changes):
            output, routing = layer(inputs)
            (output.square().sum() + routing.balance_loss).backward()
        gradients = [inputs.grad, *(param.grad.clone() for param in layer.parameters())]
        results.append([output.detach(), routing.kept_E, routing.counts_E, *gradients])
    today, earlier = results
    assert (today[1] < today[2]).any()
    torch.testing.assert_close(today, earlier, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_padded_dispatch_computes_the_same(before):
    torch.manual_seed(0)
    layer = SwitchFFN(16, 32, 4, 1.0, F.gelu, nn.Identity())
    x_SD = torch.randn(64, 16)
    routing = layer.router(x_SD, None, 16)
    outputs = []
    for kind in (PaddedDispatcher, before.dispatch.Padded):
        dispatcher = kind(routing, 16)
        rows = dispatcher.linear(dispatcher.to_rows(x_SD), layer.w1, layer.b1)
        outputs.append(dispatcher.to_tokens(rows, routing.gate_S))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_chunked_loss_computes_the_same(before, dtype):
    torch.manual_seed(0)
    target = torch.randint(2, 40, (30,))
    target[::7] = 1
    features = torch.randn(30, 8).to(dtype)
    weight = torch.randn(40, 8).to(dtype)
    results = []
    for function in (chunked_nll, before.loss.chunked_nll):
        inputs = [tensor.clone().requires_grad_() for tensor in (features, weight)]
        total, nll = function(inputs[0], [inputs[1]], target, 1, 8, (0,))
        total.backward()
        results.append([nll, *(tensor.grad for tensor in inputs)])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_the_whole_loss_and_gelu_are_fairseqs(before):
    from fairseq import modules, utils
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion

    with before.without(before.CHANGES):
        assert utils.get_activation_fn("gelu") is modules.gelu
        code = CrossEntropyCriterion.compute_loss.__code__
    assert code.co_filename.endswith("fairseq/criterions/cross_entropy.py")
