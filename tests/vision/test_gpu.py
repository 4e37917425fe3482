"""Image learners on a GPU: `pytest -m gpu`."""

import pytest
import torch

from vision.examples import Examples
from vision.learners import LEARNERS, resolve
from vision.train import evaluate, fit

pytestmark = pytest.mark.gpu
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


@pytest.mark.parametrize("dataset", SHAPES)
@pytest.mark.parametrize("name", ["sm", "ens", "umix", "gens", "moe"])
def test_a_stage_on_a_gpu_has_the_outputs_of_the_cpu(monkeypatch, name, dataset):
    """fp32 products without tf32, in both the MLP and the convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    settings = resolve(dataset, name, "paper", {"epochs": 2, "hidden": 8})
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(200, *SHAPES[dataset], generator=generator)
    on_cpu = Examples(images.contiguous(memory_format=torch.channels_last), torch.arange(200) % 10)
    outputs = []
    for device in map(torch.device, ("cpu", "cuda")):
        on_device = Examples(*(part.to(device) for part in on_cpu))
        learner = LEARNERS[name](SHAPES[dataset], 10, settings, 0, device)
        fit(
            learner.model,
            on_device.part(0, 160),
            on_device.part(160, 200),
            learner.settings,
            learner.generators,
        )
        outputs.append(evaluate(learner.model, on_device).softmax(-2).cpu())
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-2, rtol=1e-2)
