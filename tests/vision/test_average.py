"""The average of weights over stages: `--average`."""

import copy

import pytest
import torch

from tests.vision.conftest import CPU
from vision import MegaBatchStream, run
from vision.experiment import stages
from vision.learners import LEARNERS, resolve
from vision.stage_data import StageData

VGG = {"arch": "vgg", "hidden": 4, "optimizer": "sgd", "lr": 0.02, "momentum": 0.9}
STREAM = MegaBatchStream("digits", 20)
SCHEDULE = stages(20, 4)


def learner(name, **options):
    chosen = {"hidden": 6, "epochs": 3, "average": 0.7} | options
    settings = resolve("digits", name, chosen=chosen)
    return LEARNERS[name](STREAM.dataset.shape, STREAM.dataset.classes, settings, 0, CPU)


def trained_twice(name, **options):
    subject = learner(name, **options)
    data = StageData(STREAM, SCHEDULE, CPU)
    for index in range(2):
        subject.train(index, data)
    return subject, data


def logits(model, examples):
    model.eval()
    with torch.no_grad():
        return model(examples.images)


@pytest.mark.parametrize("average", [0.7, "poly:4"])
@pytest.mark.parametrize(("name", "options"), [("sm", {"arch": "vgg", "hidden": 2}), ("moe", {})])
def test_weights_are_averaged_and_training_goes_on_from_the_raw_ones(name, options, average):
    """Those of each stage, or with poly:ETA of each epoch;
    with the statistics of batch normalisation."""
    subject = learner(name, average=average, **options)
    plain = learner(name, average=0, **options)
    seen = []
    stage_data = StageData(STREAM, SCHEDULE, CPU)

    def follow(_):
        if average == "poly:4":
            seen.append([tensor.clone() for tensor in plain.model.state_dict().values()])

    for index in range(3):
        subject.train(index, stage_data)
        plain.train(index, stage_data, callback=follow)
        raw = plain.model.state_dict().values()
        assert all(map(torch.equal, raw, subject.model.state_dict().values()))
        if average == 0.7:
            seen.append([tensor.clone() for tensor in raw])
        mean = seen[0]
        for k, new in enumerate(seen, start=1):
            share = max(0.3, 1 / k) if average == 0.7 else 5 / (k + 4)
            mean = [old + share * (now - old) for old, now in zip(mean, new, strict=True)]
        for expected, actual in zip(mean, subject.deployed.state_dict().values(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"router": "flat"}, {"gate": "hard"}, {"arch": "vgg", "hidden": 2}]
)
def test_a_split_expert_is_split_in_the_average_too(options):
    subject, stage_data = trained_twice("gmoe", **options)
    before = logits(subject.deployed, stage_data.valid(1))
    examples = stage_data.valid(1)
    subject.grow(2, stage_data)
    if subject.settings.router == "tree":  # a flat softmax has one more term
        torch.testing.assert_close(logits(subject.deployed, examples), before, rtol=1e-4, atol=1e-5)
    for raw, mean in zip(subject.model.layers, subject.deployed.layers, strict=True):
        assert raw.size == mean.size == 3
        assert torch.equal(raw.router.paths, mean.router.paths)
        assert split_from(raw.experts) == split_from(mean.experts)
        new = 2 if raw.router.tree else 1  # gates
        for one, other in (
            (raw.router.weight, mean.router.weight),
            (raw.router.bias, mean.router.bias),
        ):
            assert torch.equal(one[-new:], other[-new:])


def split_from(experts):
    """The expert of which the last one is a copy."""
    weight = next(experts.parameters())
    (candidate,) = (i for i in range(len(weight) - 1) if torch.equal(weight[i], weight[-1]))
    return candidate


@pytest.mark.parametrize("options", [{}, VGG])
def test_neurons_that_firefly_adds_are_added_to_the_average_too(options):
    subject, stage_data = trained_twice("ff", **options)
    examples = stage_data.valid(1)
    old = copy.deepcopy(subject.deployed)
    subject.grow(2, stage_data)
    assert subject.deployed.widths == subject.model.widths != old.widths
    before = logits(old, examples)
    change = (logits(subject.deployed, examples) - before).abs().max()
    assert 0 < change < 0.5 * before.abs().max()
    subject.train(2, stage_data)


@pytest.mark.parametrize("name", ["sm", "gmoe"])
def test_a_run_records_the_error_of_the_average_and_of_the_raw_weights(name, tmp_path):
    options = {"waiting_time": 5, "hidden": 6, "epochs": 3}
    plain = run(STREAM, name, tmp_path / "plain", **options)
    both = run(STREAM, name, tmp_path / "average", average=0.9, **options)
    values = [row["value"] for row in plain.rows]
    assert [row["extra"]["raw"]["error"] for row in both.rows] == values
    raw = [row["extra"]["raw"].get("valid") for row in both.rows]
    assert raw == [row["extra"]["valid"] for row in plain.rows]
    assert [row["extra"]["valid"] for row in both.rows[:10]] == raw[:10]  # as `value` below
    assert both.rows[-1]["extra"]["valid"] != raw[-1]
    averaged = [row["value"] for row in both.rows]
    assert averaged[:10] == values[:10]  # one stage: the average is its model
    assert averaged[10:] != values[10:]
    assert [row["parameters"] for row in both.rows] == [row["parameters"] for row in plain.rows]
    assert both.config == plain.config | {"average": 0.9}
