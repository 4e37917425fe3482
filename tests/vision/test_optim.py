"""The optimizers equal those of torch, bit for bit."""

import pytest
import torch

from vision.optim import make
from vision.presets import Settings


@pytest.mark.parametrize(
    ("settings", "peer"),
    [
        ({}, lambda p: torch.optim.Adadelta(p, 1.0, foreach=False)),
        (
            {"lr": 0.3, "weight_decay": 0.1},
            lambda p: torch.optim.Adadelta(p, 0.3, weight_decay=0.1, foreach=False),
        ),
        ({"optimizer": "sgd", "lr": 0.2}, lambda p: torch.optim.SGD(p, 0.2, foreach=False)),
        (
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2},
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=1e-2, foreach=False),
        ),
        (
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 1e-2, "nesterov": True},
            lambda p: torch.optim.SGD(p, 0.1, 0.8, weight_decay=1e-2, nesterov=True, foreach=False),
        ),
    ],
)
def test_equal_to_torch(settings, peer):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    parameter = torch.nn.Parameter(values.clone())
    ours, theirs = make(values, Settings(**settings)), peer([parameter])
    for _ in range(20):
        gradient = torch.randn(1000, generator=generator)
        parameter.grad = gradient.clone()
        ours.step(values, gradient)
        theirs.step()
    assert torch.equal(values, parameter.detach())
