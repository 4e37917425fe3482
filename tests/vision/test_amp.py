"""Automatic mixed precision of training: --amp bf16, which a CPU has too."""

import pytest
import torch

from tests.vision.conftest import CPU
from tests.vision.test_torchvision import SMALL, learner, pictures
from vision import MegaBatchStream, run
from vision.flat import Flat
from vision.learners import LEARNERS
from vision.presets import TORCHVISION, Settings
from vision.train import evaluate, gradient_writer

AMP = ("off", "bf16")


@pytest.mark.parametrize("arch", ["mlp", "vgg", TORCHVISION + SMALL])
def test_gradients_are_those_of_autocast_in_fp32(arch):
    subject = LEARNERS["sm"]((3, 32, 32), 4, Settings(arch=arch, hidden=4), 0, CPU)
    data = pictures(
        size=32
    ).dataset  # on a map of one pixel, torch has wrong bf16 gradients on a CPU
    images, labels = data.examples(data.train)
    flat = Flat(subject.model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = subject.model(images)
    assert logits.dtype == torch.bfloat16
    loss = torch.nn.functional.cross_entropy(logits[0].t().float(), labels)
    expected = torch.autograd.grad(loss, flat.parameters)
    gradient_writer(subject.model, flat, "bf16")(images, labels)
    assert all(
        torch.equal(p.grad, gradient) for p, gradient in zip(flat.parameters, expected, strict=True)
    )
    half = flat.gradients.clone()
    gradient_writer(subject.model, flat, "off")(images, labels)
    assert not torch.equal(flat.gradients, half)


@pytest.mark.parametrize("name", ["ens", "ff"])
def test_runs_are_close_to_those_in_fp32(tmp_path, name):
    options = {"epochs": 2, "arch": "vgg", "hidden": 3} | ({"members": 2} if name == "ens" else {})
    runs = [
        run(MegaBatchStream("digits", 3), name, tmp_path / amp, amp=amp, **options) for amp in AMP
    ]
    assert [run_of_type.config.get("amp") for run_of_type in runs] == [None, "bf16"]
    single, half = (
        [row["extra"]["valid"]["loss"] for row in run_of_type.rows[1:]] for run_of_type in runs
    )
    assert half != single
    assert half == pytest.approx(single, rel=0.3)


def test_evaluation_is_in_fp32():
    data = pictures().dataset
    examples = data.examples(data.test)
    in_fp32, in_bf16 = (evaluate(learner("sm", amp=amp).model, examples) for amp in AMP)
    assert torch.equal(in_fp32, in_bf16)
