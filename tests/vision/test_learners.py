"""Each learner against its description in the paper, on the bundled digits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from alma.stages import stages
from tests.vision.conftest import CPU
from vision.data import MegaBatchStream
from vision.learners import LEARNERS, resolve
from vision.stage_data import StageData
from vision.train import loss_of

STREAM = MegaBatchStream("digits", 12)
SCHEDULE = stages(12, 2)
DATA = StageData(STREAM, SCHEDULE, CPU)
TEST = STREAM.dataset.examples(STREAM.dataset.test)


def learner(name, seed=0, **chosen):
    chosen = {"epochs": 4, "hidden": 6} | chosen
    settings = resolve("digits", name, chosen=chosen)
    return LEARNERS[name](STREAM.dataset.shape, STREAM.dataset.classes, settings, seed, CPU)


def trained(name, stages=1, data=DATA, **chosen):
    subject = learner(name, **chosen)
    for index in range(stages):
        subject.train(index, data)
    return subject


def errors_of(subject):
    predicted, _ = subject.predict(TEST, {})
    return float((predicted != TEST.labels).float().mean())


def weights(subject):
    return torch.cat([p.detach().flatten() for p in subject.model.parameters()])


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_learns_and_counts_flops(name):
    subject = learner(name, epochs=20)
    untrained = errors_of(subject)
    for index in range(3):
        flops = subject.train(index, DATA)
        assert flops["forward"] > 0
        assert flops["backward"] > flops["forward"]
        assert flops["validation"] > 0
        assert (flops.get("growth", 0) > 0) == (name in ("gmoe", "ff") and index > 0)
    assert errors_of(subject) < untrained / 2
    _, flops = subject.predict(TEST, {})
    assert flops == len(TEST.labels) * subject.eval_flops_per_example


def test_sm_keeps_its_weights_unless_from_scratch():
    for from_scratch in (False, True):
        subject = learner("sm", epochs=1, lr=1e-6, from_scratch=from_scratch)
        subject.train(0, DATA)
        before = weights(subject)
        subject.train(1, DATA)
        assert torch.allclose(before, weights(subject), atol=1e-3) != from_scratch
    assert not torch.equal(weights(learner("sm")), weights(learner("sm", seed=1)))


def test_ens_averages_probabilities_and_member_0_is_sm():
    ens = trained("ens")
    sm = trained("sm")
    assert ens.parameters == 5 * sm.parameters
    assert ens.eval_flops_per_example == 5 * sm.eval_flops_per_example
    for name, value in sm.model.state_dict().items():
        torch.testing.assert_close(ens.model.state_dict()[name][0], value[0], atol=1e-4, rtol=1e-4)
    logits = ens.model(TEST.images)
    expected = logits.softmax(1).mean(0).argmax(0)
    assert torch.equal(ens.predict(TEST, {})[0], expected)
    assert not torch.equal(expected, logits.mean(0).argmax(0))  # averaging logits would differ


@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        ({"batch_size": 32}, False),
        ({"batch_size": 32, "member_order": "shared"}, True),
        ({"batch_size": 1000}, True),  # a single minibatch
        ({"batch_size": 1000, "augment": True}, False),
    ],
)
def test_members_have_separate_orders_and_augmentation_unless_shared(options, is_shared):
    """Two members with the same initial weights stay equal only if they see the same."""
    ens = learner("ens", members=2, **options)
    for values in ens.model.state_dict().values():
        values[1] = values[0]
    ens.train(0, DATA)
    assert all(torch.equal(*values) for values in ens.model.state_dict().values()) == is_shared


@pytest.mark.parametrize("name", ["sm", "ens", "umix", "gens", "gmoe"])
def test_the_validation_score_is_that_of_the_deployed_predictor(name):
    """The loss is that of the members' mean probabilities, the error that of `predict`."""
    assert learner(name).valid is None
    subject = trained(name, 2)
    images, labels = DATA.valid(1)
    models = subject.members if name == "gens" else [subject.model]
    probabilities = torch.cat([model(images).detach().softmax(1) for model in models]).mean(0)
    loss = -probabilities[labels, torch.arange(len(labels))].log().mean()
    assert subject.valid["loss"] == pytest.approx(float(loss), rel=1e-5)
    wrong = subject.predict(DATA.valid(1), {})[0] != labels
    assert subject.valid["error"] == float(wrong.double().mean())


def test_members_may_be_mixtures():
    """First draft, section 5.2; one member equals `moe`."""
    gens, moe = (trained(kind, 2, experts=3, gate="hard") for kind in ("gens", "moe"))
    assert len(gens.members) == gens.details["members"] == 2
    assert gens.parameters == 2 * moe.parameters
    assert gens.eval_flops_per_example == 2 * moe.eval_flops_per_example
    first, second = (member.state_dict() for member in gens.members)
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])
    again = learner("gens", experts=3, gate="hard")
    again.load(gens.state())
    assert torch.equal(again.predict(TEST, {})[0], gens.predict(TEST, {})[0])


def test_umix_averages_logits():
    umix = learner("umix")
    assert umix.model.voters == 1
    members = learner("ens").model
    members.load_state_dict(umix.model.state_dict())
    torch.testing.assert_close(umix.model(TEST.images)[0], members(TEST.images).mean(0))
    summed = learner("umix", umix_average="sum")
    torch.testing.assert_close(summed.model(TEST.images)[0], members(TEST.images).sum(0))


@pytest.mark.parametrize("start", ["new", "copy"])
def test_gens_adds_a_member_and_keeps_the_others(start):
    gens = learner("gens", gens_init=start, epochs=1, lr=1e-6)
    checkpoints = []
    for index in range(3):
        gens.train(index, DATA)
        assert len(gens.members) == index + 1
        checkpoints.append(
            {name: value.clone() for name, value in gens.members[-1].state_dict().items()}
        )
    for member, then in zip(gens.members, checkpoints, strict=True):
        assert all(torch.equal(member.state_dict()[name], value) for name, value in then.items())
    assert gens.parameters == 3 * learner("sm").parameters
    # A hardly trained member is still close to its initial weights.
    near = [
        torch.allclose(a["layers.0.weight"], b["layers.0.weight"], atol=1e-3)
        for a, b in pairwise(checkpoints)
    ]
    assert near == [start == "copy"] * 2


def test_gens_with_new_members_starts_as_ens_and_keeps_those_of_all_stages():
    ens = trained("ens", members=2)
    gens = trained("gens", new_members=2)
    assert torch.equal(weights(ens), weights(gens))
    assert torch.equal(ens.predict(TEST, {})[0], gens.predict(TEST, {})[0])
    first = [parameter.clone() for parameter in gens.members[0].parameters()]
    gens.train(1, DATA)
    assert all(map(torch.equal, first, gens.members[0].parameters()))
    assert gens.details == {"members": 4}
    assert gens.parameters == 2 * ens.parameters
    assert gens.eval_flops_per_example == 2 * ens.eval_flops_per_example
    probabilities = [member(TEST.images).softmax(1) for member in gens.members]
    assert torch.equal(gens.predict(TEST, {})[0], torch.cat(probabilities).sum(0).argmax(0))
    again = learner("gens", new_members=2)
    again.load(gens.state())
    assert torch.equal(again.predict(TEST, {})[0], gens.predict(TEST, {})[0])


@pytest.mark.parametrize("average", ["probs", "logits"])
def test_gens_evaluates_each_member_once(average):
    gens = learner("gens", gens_average=average)
    checkpoints = {}
    flops = []
    untrained = gens.predict(TEST, checkpoints)
    assert checkpoints == {}  # the untrained network is not a member
    for index in range(3):
        gens.train(index, DATA)
        predicted, spent = gens.predict(TEST, checkpoints)
        flops.append(spent)
        outputs = []
        for member in gens.members:
            logits = member(TEST.images)[0]
            outputs.append(logits.softmax(0) if average == "probs" else logits)
        assert torch.equal(predicted, sum(outputs).argmax(0))
    assert flops == [untrained[1]] * 3
    assert gens.eval_flops_per_example == 3 * untrained[1] / len(TEST.labels)
    again, all_members = gens.predict(TEST, {})  # as after a resume
    assert torch.equal(again, predicted)
    assert all_members == 3 * untrained[1]


def test_gmoe_starts_with_one_expert_and_gains_one_per_layer_between_stages():
    gmoe = learner("gmoe")
    assert gmoe.parameters == learner("sm").parameters
    counts = []
    for index in range(4):
        gmoe.train(index, DATA)
        counts.append(gmoe.details["experts"])
    assert counts == [1, 2, 3, 4]
    d = 64
    h = 6
    expert = (d * h + h) + (h * h + h)
    gate = 2 * (d + 1) + 2 * (h + 1)
    assert gmoe.parameters == learner("sm").parameters + 3 * (expert + gate)
    assert trained("gmoe", 4, grow_every=2).details["experts"] == 2
    assert trained("moe", 4).details["experts"] == 2


@pytest.mark.parametrize("by", ["loss", "usage"])
def test_split_scores_sum_the_loss_routed_through_each_expert(by):
    gmoe = trained("gmoe", experts=3, grow_by=by)
    valid = DATA.valid(0)
    logits, gates = gmoe.model.routed(valid.images)
    for layer, scores in zip(gates, gmoe.split_scores(valid), strict=True):
        expected = torch.zeros(3)
        for example in range(len(valid.labels)):
            one = slice(example, example + 1)
            loss = float(loss_of(logits[:, :, one], valid.labels[one]).detach())
            expected += layer[:, example] * (loss if by == "loss" else 1)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_gmoe_selects_on_the_finished_stage_or_on_the_new_one():
    requests = []

    class Spy:
        def valid(self, index):
            requests.append(index)
            return DATA.valid(index)

    for where in ("finished", "new"):
        learner("gmoe", grow_on=where).grow(3, Spy())
    assert requests == [2, 3]


def test_growth_flops_are_those_of_a_pass_over_the_validation_data():
    gmoe = learner("gmoe", experts=2)
    with FlopCounterMode(display=False) as counter:
        gmoe.split_scores(DATA.valid(0))
    assert gmoe.grow(1, DATA) == {"growth": counter.get_total_flops()}


def test_gmoe_splits_the_losing_expert_and_keeps_its_function():
    gmoe = trained("gmoe", experts=3)
    before = gmoe.model(TEST.images)
    scores = gmoe.split_scores(DATA.valid(0))
    old = [layer.experts.weight.detach().clone() for layer in gmoe.model.layers]
    gmoe.grow(1, DATA)
    torch.testing.assert_close(gmoe.model(TEST.images), before)
    for layer, weight, losing in zip(gmoe.model.layers, old, scores, strict=True):
        assert torch.equal(layer.experts.weight, torch.cat([weight, weight[losing.argmax()][None]]))


@pytest.mark.parametrize("name", LEARNERS)
def test_no_learner_uses_the_global_generators(name):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    gate = {"gate": "hard"} if name in ("gmoe", "moe") else {}
    for arch in ({}, {"arch": "vgg", "hidden": 2, "epochs": 1, "batch_size": 64}):
        trained(name, 2, augment=True, **gate, **arch)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
