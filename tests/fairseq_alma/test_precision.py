"""Loss scaling of --amp and --fp16, and the layouts of fp32 weights.

test_interrupt tests resuming, test_expert_parallel several processes.
"""

from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from omegaconf import OmegaConf

from fairseq_alma.training import precision
from fairseq_alma.training.precision import FP32, by_parameter

SHAPES = [torch.Size(shape) for shape in ((3, 5), (5,), (2, 4, 4))]


def config(**common):
    adam = {"_name": "adam", "lr": [0.1], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0}
    distributed = {"distributed_world_size": 1}
    defaults = {
        "tpu": False,
        "fp16_init_scale": 65536,
        "amp_init_scale": 128,
        "amp_scale_window": None,
        "fp16_scale_window": 2000,
        "fp16_scale_tolerance": 0.0,
        "threshold_loss_scale": None,
        "min_loss_scale": 1e-4,
        "model_parallel_size": 1,
    }
    sections = {"optimizer": adam, "common": defaults | common, "distributed_training": distributed}
    return OmegaConf.create(sections | {"optimization": {"update_freq": [1]}})


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def build(kind, params, **common):
    """Build our version of fairseq's optimizer class `kind`, and its trainer."""
    cfg = config(**common)
    trainer = SimpleNamespace(cfg=cfg, device=torch.device("cpu"), _amp_retries=0)
    trainer.optimizer = kind.build_optimizer(cfg, params)
    precision.replace_optimizer(trainer, None)
    return trainer.optimizer, trainer


def update(optimizer, params, step: int, clip: float = 0.0, factor: float = 1e-3) -> torch.Tensor:
    """Make an update as fairseq's trainer does, with gradients of about `factor`; returns their norm."""
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step)
    target = [torch.randn(p.shape, generator=generator) for p in params]
    loss = sum((p.float() * t).sum() for p, t in zip(params, target, strict=True))
    optimizer.backward(loss * factor)
    optimizer.multiply_grads(1.0)
    norm = optimizer.clip_grad_norm(clip)
    optimizer.step()
    return norm


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_amp_equals_fp32_at_a_large_scale(clip):
    """Exactly, since 65536 is a power of two."""
    models = [parameters(), parameters()]
    plain = optim.build_optimizer(config().optimizer, models[0])
    scaled, _ = build(optim.AMPOptimizer, models[1])
    for step in range(5):
        norms = [update(o, model, step, clip) for o, model in zip((plain, scaled), models, strict=True)]
        assert scaled.scaler.get_scale() == 65536
        assert torch.equal(*norms)
        assert not clip or norms[0] > clip
        assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def test_amp_skips_an_overflow_and_grows_the_scale_after_its_window():
    params = parameters()
    optimizer, _ = build(optim.AMPOptimizer, params, amp_scale_window=3)
    scales = []
    for step in range(8):
        before = [p.detach().clone() for p in params]
        update(optimizer, params, step, factor=float("inf") if step == 1 else 1e-3)
        changed = not all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
        assert changed == (step != 1)
        scales.append(optimizer.scaler.get_scale() / 65536)
    assert scales == [1, 0.5, 0.5, 0.5, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "kind", [optim.AMPOptimizer, optim.FP16Optimizer, optim.MemoryEfficientFP16Optimizer]
)
def test_a_checkpoint_without_the_scalers_state_loads(kind):
    half = torch.float32 if kind is optim.AMPOptimizer else torch.float16
    params = parameters(half)
    optimizer, trainer = build(kind, params, fp16_no_flatten_grads=True)
    update(optimizer, params, 0)
    saved = optimizer.state_dict()
    del saved["scaler"]
    for state in saved["state"].values():
        state.pop(FP32, None)
    again, trainer = build(kind, params, fp16_no_flatten_grads=True)
    again.load_state_dict(saved)
    update(again, params, 1)
    assert trainer._amp_retries == 0
    assert float(getattr(again.scaler, "loss_scale", 0) or again.scaler.get_scale()) == 65536


@pytest.fixture
def on_a_gpu(monkeypatch):
    """fairseq flattens parameters of the current GPU only; parameters on the CPU have the GPU None."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.mark.parametrize("start_flat", [True, False])
def test_fp16_loads_flat_states_by_parameter_and_back(on_a_gpu, start_flat):
    models = [parameters(torch.float16), parameters(torch.float16)]
    whole, _ = build(optim.FP16Optimizer, models[0], fp16_no_flatten_grads=False)
    parts, _ = build(optim.FP16Optimizer, models[1], fp16_no_flatten_grads=not start_flat)
    assert whole.has_flat_params
    for step in range(9):
        if step in (3, 6):
            saved = parts.state_dict()
            layout = not parts.has_flat_params
            parts, _ = build(optim.FP16Optimizer, models[1], fp16_no_flatten_grads=not layout)
            assert parts.has_flat_params == layout
            parts.load_state_dict(saved)
        for optimizer, model in zip((whole, parts), models, strict=True):
            update(optimizer, model, step)
    states = [by_parameter(optimizer.state_dict(), SHAPES)["state"] for optimizer in (whole, parts)]
    assert states[0][2][FP32].shape == SHAPES[2]
    torch.testing.assert_close(*states, atol=1e-6, rtol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
