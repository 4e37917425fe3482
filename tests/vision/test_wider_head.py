"""The head of a model grows when a class first appears."""

import pytest
import torch

from tests.vision.conftest import equal
from vision.learners import LEARNERS as KINDS
from vision.learners import resolve


@pytest.mark.parametrize("backbone", ["mlp", "vgg"])
@pytest.mark.parametrize("name", ["sm", "ens", "umix", "gmoe", "ff"])
def test_a_wider_head_keeps_what_the_model_answers(name, backbone):
    settings = {"arch": backbone, "hidden": 3, "average": 0.5}
    chosen = resolve("folder", name, chosen=settings)
    learner = KINDS[name]((3, 8, 8), 2, chosen, 0, torch.device("cpu"))
    images = torch.rand(5, 3, 8, 8)
    for values in learner.model.parameters():  # as training does, which moves them apart
        values.data.mul_(1.5)
    both = learner.model, learner.average.model
    before = [model.eval()(images) for model in both]
    assert not torch.equal(*before)
    learner.widen(4, 1)
    assert learner.model is not both[0]
    for old, model in zip(before, (learner.model, learner.average.model), strict=True):
        new = model.eval()(images)
        assert new.shape[1] == 4
        assert torch.allclose(new[:, :2], old, atol=1e-6)
        assert new[:, 2:].abs().max() > 0
    again = KINDS[name]((3, 8, 8), 2, chosen, 0, torch.device("cpu"))
    again.load(learner.state())
    assert equal(again.model.state_dict(), learner.model.state_dict())
