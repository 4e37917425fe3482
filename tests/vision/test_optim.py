"""The optimizers equal those of torch, bit for bit."""

import pytest
import torch

from vision.optim import decay, make
from vision.presets import Settings


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.3, "weight_decay": 0.1},
        {"optimizer": "sgd", "lr": 0.2},
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2},
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 1e-2, "nesterov": True},
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    ],
)
def test_equal_to_torch(settings):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    parameter = torch.nn.Parameter(values.clone())
    optimizer = make(values, Settings(**settings))
    options = {"lr": 1.0, "foreach": False} | settings
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds.get(options.pop("optimizer", ""), torch.optim.Adadelta)
    peer = kind([parameter], **options)
    for _ in range(20):
        gradient = torch.randn(1000, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step(values, gradient)
        peer.step()
    assert torch.equal(values, parameter.detach())


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_the_learning_rate_decays_as_torchs(scheduler):
    parameter = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    peer = (
        schedulers.CosineAnnealingLR(parameter, 8)
        if scheduler == "cosine"
        else schedulers.LinearLR(parameter, 1.0, 0.0, 8)
    )
    for epoch in range(8):
        assert decay(scheduler, epoch / 8) == pytest.approx(peer.get_last_lr()[0])
        parameter.step()
        peer.step()
