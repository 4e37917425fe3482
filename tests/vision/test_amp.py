"""Automatic mixed precision of training: --amp bf16 and fp16, which a CPU has too."""

import pytest
import torch

from tests.vision.conftest import CPU
from tests.vision.test_torchvision import SMALL, learner, pictures
from vision import MegaBatchStream, run
from vision.flat import Flat
from vision.learners import LEARNERS
from vision.optim import Scaled, make
from vision.presets import TORCHVISION, Settings
from vision.train import evaluate, gradient_writer

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKBONES = {
    "mlp": {"arch": "mlp", "hidden": 8},
    "vgg": {"arch": "vgg", "hidden": 4},
    "torchvision": {"arch": TORCHVISION + SMALL},
}


@pytest.mark.parametrize("amp", HALF)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_are_those_of_autocast_in_fp32(backbone, amp):
    settings = Settings(**BACKBONES[backbone], amp=amp)
    subject = LEARNERS["sm"]((3, 32, 32), 4, settings, 0, CPU)
    data = pictures(size=32).dataset  # on a map of one pixel, torch has wrong bf16 gradients on a CPU
    images, labels = data.examples(data.train)
    flat = Flat(subject.model)
    optimizer = make(flat.values, settings)
    if amp == "fp16":
        # 2**16 would overflow, which lowers the scale in training
        optimizer.load({**optimizer.state, "scale": torch.tensor([8.0, 0.0])})
    with torch.autocast("cpu", HALF[amp]):
        logits = subject.model(images)
    assert logits.dtype == HALF[amp]
    loss = torch.nn.functional.cross_entropy(logits[0].t().float(), labels)
    found = torch.autograd.grad(loss * (8 if amp == "fp16" else 1), flat.parameters)
    gradient_writer(subject.model, flat, optimizer, amp)(images, labels)
    for parameter, expected in zip(flat.parameters, found, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert expected.isfinite().all()
        assert torch.equal(parameter.grad, expected)
    exact = Flat(subject.model)
    gradient_writer(subject.model, exact, make(exact.values, Settings()), "off")(images, labels)
    assert not torch.equal(exact.gradients, flat.gradients)


@pytest.mark.parametrize("name", ["ens", "ff"])
def test_runs_are_close_to_those_in_fp32_and_tested_in_fp32(tmp_path, name):
    stream, options = MegaBatchStream("digits", 3), {"epochs": 3, "arch": "vgg", "hidden": 4}
    options |= {"members": 2} if name == "ens" else {}
    values = {}
    for amp in ("off", "bf16"):
        record = run(stream, name, tmp_path / amp, amp=amp, **options)
        assert record.config.get("amp") == (None if amp == "off" else amp)
        values[amp] = [row["extra"]["valid"]["loss"] for row in record.rows[1:]]
    assert values["bf16"] != values["off"]
    assert values["bf16"] == pytest.approx(values["off"], rel=0.3)


def test_evaluation_is_in_fp32():
    data = pictures().dataset
    one, other = learner("sm"), learner("sm", amp="bf16")
    examples = data.examples(data.test)
    assert torch.equal(evaluate(one.model, examples), evaluate(other.model, examples))


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
)
def test_steps_with_a_scaled_loss_are_those_without_and_an_overflow_is_none(settings):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, generator=generator)
    plain, half = values.clone(), values.clone()
    theirs, ours = make(plain, Settings(**settings)), make(half, Settings(**settings, amp="fp16"))
    assert isinstance(ours, Scaled)
    ours.lr = theirs.lr = 0.25
    for _ in range(5):
        gradient = torch.randn(64, generator=generator)
        scale = float(ours.scaled(torch.ones(())))
        assert scale == 2.0**16
        ours.step(half, gradient * scale)
        theirs.step(plain, gradient)
        assert torch.equal(half, plain)
    ours.step(half, torch.full((64,), torch.inf))
    assert torch.equal(half, plain)
    assert float(ours.scaled(torch.ones(()))) == 2.0**15


def test_a_checkpoint_has_the_scale():
    values = torch.ones(16)
    one = make(values, Settings(amp="fp16"))
    for gradient in (torch.inf, torch.inf, 1.0):
        one.scaled(torch.ones(()))
        one.step(values, torch.full((16,), gradient))
    again = make(values, Settings(amp="fp16"))
    again.load(one.state)
    assert float(again.scaled(torch.ones(()))) == 2.0**14
    assert again.state["scale"].tolist() == [2.0**14, 1.0]
