"""Loss scaling of --amp and --fp16, and the fp32 weights.

test_interrupt tests resuming, test_expert_parallel several processes.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim

from fairseq_alma.training import precision
from fairseq_alma.training.precision import FP32
from tests.fairseq_alma.shared import config_of

SHAPES = [torch.Size(shape) for shape in ((3, 5), (5,), (2, 4, 4))]


@functools.cache
def defaults():
    """fairseq's config of `--fp16`."""
    flags = "--lr 0.1 --update-freq 1 --fp16 --fp16-init-scale 65536 --distributed-world-size 1"
    return config_of("S", "--task", "alma_lm", *flags.split())


def config(**common):
    made = copy.deepcopy(defaults())
    made.common.update(common)
    return made


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def build(kind, params, **common):
    """Build our version of fairseq's optimizer class `kind`, and its trainer."""
    cfg = config(**common)
    trainer = SimpleNamespace(cfg=cfg, device=torch.device("cpu"), _amp_retries=0)
    trainer.optimizer = kind.build_optimizer(cfg, params)
    precision.replace_optimizer(trainer)
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


@pytest.mark.parametrize("fp16", [True, False])
def test_fp16_and_bf16_resume_with_the_fp32_weights(fp16):
    dtype = torch.float16 if fp16 else torch.bfloat16
    models = [parameters(dtype), parameters(dtype)]
    flags = {"fp16": fp16, "bf16": not fp16, "fp16_no_flatten_grads": True}
    whole, _ = build(optim.FP16Optimizer, models[0], **flags)
    parts, _ = build(optim.FP16Optimizer, models[1], **flags)
    for step in range(9):
        if step in (3, 6):
            saved = parts.state_dict()
            assert saved["state"][2][FP32].shape == SHAPES[2]
            parts, _ = build(optim.FP16Optimizer, models[1], **flags)
            parts.load_state_dict(saved)
        for optimizer, model in zip((whole, parts), models, strict=True):
            update(optimizer, model, step)
    assert all(torch.equal(a, b) for a, b in zip(whole.fp32_params, parts.fp32_params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
