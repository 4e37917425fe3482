"""The fp32 weights of --fp16 and --bf16, and the activation in half precision.

test_interrupt tests resuming, test_expert_parallel several processes.
"""

import copy
import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq import modules, optim, utils
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.hooks import install
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
    copied = copy.deepcopy(defaults())
    copied.common.update(common)
    return copied


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def build(kind, params, **common):
    """Build our version of fairseq's optimizer class `kind`, and its trainer."""
    cfg = config(**common)
    trainer = SimpleNamespace(cfg=cfg, device=torch.device("cpu"))
    trainer.optimizer = kind.build_optimizer(cfg, params)
    precision.replace_optimizer(trainer, trainer.optimizer.optimizer)
    return trainer.optimizer, trainer


def update(optimizer, params, step: int, clip: float = 0.0, factor: float = 1e-3) -> torch.Tensor:
    """Make an update as fairseq's trainer does, with gradients of about `factor`;
    returns their norm."""
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step)
    target = [torch.randn(p.shape, generator=generator) for p in params]
    loss = sum((p.float() * t).sum() for p, t in zip(params, target, strict=True))
    optimizer.backward(loss * factor)
    optimizer.multiply_grads(1.0)
    norm = optimizer.clip_grad_norm(clip)
    optimizer.step()
    return norm


@pytest.fixture
def build_model(request):
    """The fixture `build`, whose name this module takes for optimizers."""
    return request.getfixturevalue("build")


def test_gradients_on_a_cpu_are_clipped_where_there_is_a_gpu(monkeypatch):
    """fairseq takes their norm to the GPU: --cpu ended at the first update."""
    install()
    params = parameters()
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    norm = utils.clip_grad_norm_(params, 1.0)
    assert norm.item() == pytest.approx(2 * sum(p.numel() for p in params) ** 0.5)
    assert torch.cat([p.grad.flatten() for p in params]).norm().item() == pytest.approx(1)


@pytest.mark.parametrize("flags", [(), ("--arch", "transformer_lm", "--activation-fn", "gelu")])
def test_all_layers_take_torchs_gelu(flags, build_model):
    _, model = build_model(*flags)
    layers = [layer.fc1 if layer.fc2 is None else layer for layer in model.decoder.layers]
    activations = [getattr(layer, "activation", None) or layer.activation_fn for layer in layers]
    assert activations == [F.gelu] * len(layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_equals_fairseqs_and_keeps_no_copy_in_fp32(dtype):
    install()
    gelu = utils.get_activation_fn("gelu")
    every_value = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    inputs = every_value.clone().requires_grad_()
    saved = []
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor),
    ):
        outputs = gelu(inputs)
        expected = modules.gelu(every_value)
    assert torch.equal(outputs.detach().view(torch.int16), expected.view(torch.int16))
    assert [tensor.dtype for tensor in saved] == [dtype]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_the_norm_and_the_clipped_gradients_equal_fairseqs(count, max_norm):
    install()
    models = [parameters()[:count], parameters()[:count]]
    for model in models:
        for p in model:
            p.grad = p.detach() * 1.7
    fairseqs = utils.clip_grad_norm_.__wrapped__
    norms = [utils.clip_grad_norm_(models[0], max_norm), fairseqs(models[1], max_norm)]
    assert torch.equal(*norms)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(*models, strict=True))
    assert torch.equal(
        utils.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0), norms[0] * 0
    )


class Launches(TorchDispatchMode):
    """Counts operations that write to a tensor, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("fp16", [True, False])
def test_updates_equal_fairseqs_without_a_kernel_for_each_tensor(fp16):
    """The third parameter gets no gradient at first, the second is frozen; one loss overflows."""
    install()
    dtype = torch.float16 if fp16 else torch.bfloat16
    models = [parameters(dtype), parameters(dtype)]
    flags = {"fp16": fp16, "bf16": not fp16, "fp16_no_flatten_grads": True}
    optimizers = []
    for model in models:
        model[1].requires_grad = False
        optimizers.append(optim.FP16Optimizer.build_optimizer(config(**flags), model))
    ours, fairseqs = optimizers
    precision.replace_optimizer(SimpleNamespace(optimizer=ours), ours.optimizer)
    for step in range(5):
        norms = []
        for optimizer, model in zip(optimizers, models, strict=True):
            used = model if step > 1 else model[:2]
            factor = 1e8 if fp16 and step == 3 else 1e-3
            with Launches() as launches:
                try:
                    norms.append(update(optimizer, used, step, 0.1, factor))
                except OverflowError:
                    continue
            assert (launches.counts["copy_"] == 0) == (optimizer is ours)
        if norms:
            assert torch.equal(*norms)
        for fp32, expected in zip(ours.fp32_params, fairseqs.fp32_params, strict=True):
            assert torch.equal(fp32, expected)
        assert all(torch.equal(p, q) for p, q in zip(*models, strict=True))
    assert fp16 == (ours.scaler is not None and ours.scaler.loss_scale == 32768)


def test_an_update_without_a_backward_pass_has_no_gradient():
    """All batches of an update may run out of memory."""
    optimizer, _ = build(optim.FP16Optimizer, parameters(torch.bfloat16), bf16=True, fp16=False)
    update(optimizer, optimizer.fp16_params, 0)
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm(0.0) == 0


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
