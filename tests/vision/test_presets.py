"""Settings by preset, data set and learner; which of them run.json records."""

import pytest

from alma.errors import UserError
from vision import presets
from vision.learners import LEARNERS, resolve
from vision.presets import megabatches


def settings_of(learner, **values):
    return LEARNERS[learner].settings_class(**values)


def test_the_papers_settings_for_mnist_and_cifar():
    """Appendix B.1."""
    mnist, cifar = resolve("mnist", "sm"), resolve("cifar10", "sm")
    assert (mnist.arch, mnist.optimizer, mnist.lr, mnist.augment) == ("mlp", "adadelta", 1.0, False)
    assert (cifar.arch, cifar.optimizer, cifar.lr, cifar.momentum) == ("vgg", "sgd", 0.01, 0.9)
    assert (cifar.weight_decay, cifar.augment, cifar.nesterov) == (1e-4, True, False)
    for settings in (mnist, cifar):
        assert (settings.batch_size, settings.epochs) == (128, 100)
        assert (settings.patience, settings.select) == (0, "loss")
    assert [megabatches(name) for name in ("mnist", "cifar10", "digits")] == [500, 100, 20]
    assert resolve("mnist", "ens").members == resolve("mnist", "umix").members == 5
    assert resolve("cifar10", "ff").ff_rate == 0.25
    gmoe = resolve("mnist", "gmoe")
    assert (gmoe.experts, gmoe.grow_by, gmoe.grow_on) == (1, "loss", "finished")
    assert (gmoe.gate, gmoe.router) == ("soft", "tree")


EARLY_STOPPING = {"select": "error", "patience": 25, "patience_delta": 0.001}
GMOE = {"nesterov": True, "experts": 2, "grow_by": "usage", "grow_on": "new"}


@pytest.mark.parametrize(
    ("learner", "differences"),
    [
        ("sm", EARLY_STOPPING),
        ("ens", {"select": "error", "patience": 100, "members": 3}),
        ("umix", {"select": "error", "patience": 100, "members": 3, "umix_average": "sum"}),
        ("gens", EARLY_STOPPING | {"gens_init": "copy", "gens_average": "logits"}),
        ("gmoe", EARLY_STOPPING | GMOE),
        ("moe", EARLY_STOPPING),
        ("ff", EARLY_STOPPING | {"nesterov": True, "ff_rate": 0.6, "ff_depth": False}),
    ],
)
def test_the_authors_preset_differs_in_these_settings_alone(learner, differences):
    paper, authors = (vars(resolve("cifar10", learner, preset)) for preset in ("paper", "authors"))
    assert {name: value for name, value in authors.items() if value != paper[name]} == differences
    # Each difference can be chosen, or taken back, by itself.
    for name, value in differences.items():
        assert getattr(resolve("cifar10", learner, "paper", {name: value}), name) == value
        assert getattr(resolve("cifar10", learner, "authors", {name: paper[name]}), name) == paper[name]


def test_the_anytime_preset_averages_what_can_be_averaged_and_replays():
    paper = vars(resolve("mnist", "sm", "paper"))
    sm = vars(resolve("mnist", "sm", "anytime"))
    assert {name: value for name, value in sm.items() if value != paper[name]} == presets.ANYTIME
    assert resolve("mnist", "gens", "anytime").epochs == presets.ANYTIME["epochs"]
    anew = resolve("mnist", "sm", "anytime", {"from_scratch": True})
    assert (anew.average, anew.epochs) == (0.0, presets.ANYTIME["epochs"])
    assert resolve("mnist", "sm", "anytime", {"epochs": 3}).epochs == 3
    assert resolve("digits", "sm", "anytime").epochs == 100
    assert resolve("mnist", "sm", "anytime", {"patience": 5}).select == "loss"  # "last" would ignore it
    assert presets.replay_share("anytime", False) > 0
    assert presets.replay_share("anytime", True) == presets.replay_share("paper", False) == 0


def test_the_drafts_settings():
    """First draft, section 5 (Models), 5.1, 5.2, C.1; no other version has EMNIST and CIFAR-100."""
    for name in ("mnist", "cifar10", "emnist", "cifar100"):
        assert megabatches(name, "draft") == 50
        sm = resolve(name, "sm", "draft")
        assert (sm.hidden, sm.batch_size, sm.select) == (32, 128, "loss")
        assert sm.epochs == (200 if "cifar" in name else 100)
        for learner, experts in (("gmoe", 2), ("moe", 2), ("ens", 1), ("gens", 1)):
            mixture = resolve(name, learner, "draft")
            assert (mixture.experts, mixture.gate) == (experts, "soft" if "cifar" in name else "hard")
        # every 5 mega-batches, counted in stages
        for learner in ("gmoe", "ff"):
            assert [resolve(name, learner, "draft", {}, w).grow_every for w in (1, 3, 5, 50)] == [5, 2, 1, 1]
    for name in ("emnist", "cifar100"):
        assert megabatches(name) == 50
        assert resolve(name, "gmoe") == resolve(name, "gmoe", "draft")
    assert resolve("emnist", "sm", "paper") == resolve("mnist", "sm")
    assert resolve("cifar100", "sm", "paper") == resolve("cifar10", "sm")


def test_only_members_that_are_mixtures_have_gates_and_gens_has_no_from_scratch():
    assert resolve("mnist", "gens", chosen={"experts": 2, "gate": "hard"}).gate == "hard"
    with pytest.raises(UserError, match="--gate does not apply to gens: .* --experts 2 or more"):
        resolve("mnist", "gens", chosen={"gate": "hard"})
    with pytest.raises(UserError, match="--from-scratch does not apply to gens: every stage adds"):
        resolve("mnist", "gens", chosen={"from_scratch": True})
    assert resolve("mnist", "gens", chosen={"from_scratch": False}).from_scratch is False
    assert not {"experts", "gate", "router"} & settings_of("gens").config().keys()
    assert {"experts", "gate", "router"} <= settings_of("ens", experts=2).config().keys()
    assert {"experts", "gate", "router"} <= settings_of("gmoe").config().keys()


def test_bagging_and_vote_are_of_ens_and_bagging_has_separate_orders():
    for name, value in (("combine", "vote"), ("bootstrap", True)):
        for other in ("umix", "gens"):
            with pytest.raises(
                UserError, match=f"--{name} does not apply to {other}: it is a setting of ens"
            ):
                resolve("mnist", other, chosen={name: value})
        assert settings_of("ens", **{name: value}).config()[name] == value
        assert name not in settings_of("ens").config()
    with pytest.raises(UserError, match="--bootstrap does not apply to ens: --member-order shared"):
        resolve("mnist", "ens", chosen={"bootstrap": True, "member_order": "shared"})
    assert resolve("mnist", "ens", chosen={"bootstrap": False, "member_order": "shared"})


@pytest.mark.parametrize(
    ("learner", "values", "message"),
    [
        ("sm", {"arch": "resnet"}, "--arch resnet: choose from mlp, vgg"),
        ("ff", {"ff_rate": 0.0}, "--ff-rate 0.0: more than 0"),
        ("sm", {"lr": float("nan")}, "--lr nan: more than 0"),
        ("sm", {"momentum": -0.1}, "--momentum -0.1: at least 0"),
        ("sm", {"nesterov": True}, "--nesterov needs --optimizer sgd"),
    ],
)
def test_values_out_of_range_are_refused(learner, values, message):
    with pytest.raises(UserError, match=message):
        settings_of(learner, **values)


def test_another_optimizer_has_its_own_rate_and_momentum():
    for dataset, optimizer, found in (
        ("mnist", "sgd", (0.01, 0.9)),
        ("cifar10", "adadelta", (1.0, 0.0)),
        ("cifar10", "sgd", (0.01, 0.9)),
    ):
        made = resolve(dataset, "sm", chosen={"optimizer": optimizer})
        assert (made.lr, made.momentum) == found
    assert resolve("mnist", "sm", chosen={"optimizer": "sgd", "lr": 0.5}).lr == 0.5
    with pytest.raises(UserError, match="--momentum does not apply to sm: Adadelta has none"):
        resolve("digits", "sm", chosen={"momentum": 0.9})


@pytest.mark.parametrize("values", [{"lr": float("inf")}, {"batch_size": 10**20}, {"weight_decay": 1e200}])
def test_numbers_that_no_run_can_record_are_refused(values):
    with pytest.raises(UserError, match="larger than any value that a run can record"):
        resolve("digits", "sm", chosen=values)
