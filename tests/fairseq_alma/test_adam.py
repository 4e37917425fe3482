"""The fused Adam matches fairseq's."""

import pytest
import torch
from fairseq.optim.adam import Adam

from fairseq_alma.training import adam
from fairseq_alma.training.adam import FusedAdam


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 5), (3,), (2, 4, 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_fairseqs_adam_and_loads_its_states(dtype):
    """The third parameter has no gradient at first; eps is large enough to matter."""
    models = [parameters(dtype), parameters(dtype)]
    options = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-2, "weight_decay": 0.1}
    optimizers = [Adam(models[0], **options), FusedAdam(models[1], **options)]
    for step in range(12):
        if step == 8:
            states = [optimizer.state_dict() for optimizer in optimizers]
            optimizers = [
                kind(m, **options) for kind, m in zip((FusedAdam, Adam), models, strict=True)
            ]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            for param in model[: None if step > 2 else 2]:
                param.grad = torch.randn(param.shape).to(dtype)
            optimizer.step()
        torch.testing.assert_close(*models, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*(o.state_dict()["state"] for o in optimizers), atol=1e-6, rtol=1e-5)
    assert optimizers[0].state_dict()["state"][2]["step"] == 9


def test_without_torchs_private_kernel_the_step_is_fairseqs(monkeypatch):
    monkeypatch.setattr(adam, "_kernel", None)
    models = [parameters(torch.float32), parameters(torch.float32)]
    for model, kind in zip(models, (Adam, FusedAdam), strict=True):
        for param in model:
            param.grad = torch.ones_like(param)
        kind(model, lr=0.1).step()
    assert all(torch.equal(p, q) for p, q in zip(*models, strict=True))
