"""The settings of the paper and of the authors' code, and the flags for each difference."""

import pytest

from alma.errors import UserError
from vision.presets import AUTHORS, DATASETS, LEARNERS, Settings, megabatches, of_learner, resolve


def test_the_papers_settings_for_mnist_and_cifar():
    """Appendix B.1."""
    mnist, cifar = resolve("mnist", "sm"), resolve("cifar10", "sm")
    assert (mnist.arch, mnist.optimizer, mnist.lr, mnist.augment) == ("mlp", "adadelta", 1.0, False)
    assert (cifar.arch, cifar.optimizer, cifar.lr, cifar.momentum) == ("vgg", "sgd", 0.01, 0.9)
    assert (cifar.weight_decay, cifar.augment, cifar.nesterov) == (1e-4, True, False)
    for settings in (mnist, cifar):
        assert (settings.batch_size, settings.epochs, settings.patience, settings.select) == (
            128,
            100,
            0,
            "loss",
        )
    assert [megabatches(name) for name in ("mnist", "cifar10", "digits")] == [500, 100, 20]
    assert resolve("mnist", "ens").members == resolve("mnist", "umix").members == 5
    assert resolve("cifar10", "ff").ff_rate == 0.25
    gmoe = resolve("mnist", "gmoe")
    assert (gmoe.experts, gmoe.grow_by, gmoe.grow_on, gmoe.gate, gmoe.router) == (
        1,
        "loss",
        "finished",
        "soft",
        "tree",
    )


@pytest.mark.parametrize(
    ("learner", "differences"),
    [
        ("sm", {"select": "error", "patience": 25, "patience_delta": 0.001}),
        ("ens", {"select": "error", "patience": 100, "members": 3}),
        ("umix", {"select": "error", "patience": 100, "members": 3, "umix_average": "sum"}),
        (
            "gens",
            {
                "select": "error",
                "patience": 25,
                "patience_delta": 0.001,
                "gens_init": "copy",
                "gens_average": "logits",
            },
        ),
        (
            "gmoe",
            {
                "select": "error",
                "patience": 25,
                "patience_delta": 0.001,
                "nesterov": True,
                "experts": 2,
                "grow_by": "usage",
                "grow_on": "new",
            },
        ),
        (
            "ff",
            {
                "select": "error",
                "patience": 25,
                "patience_delta": 0.001,
                "nesterov": True,
                "ff_rate": 0.6,
                "ff_depth": False,
            },
        ),
    ],
)
def test_the_authors_preset_differs_in_these_named_settings_alone(learner, differences):
    paper, authors = (vars(resolve("cifar10", learner, preset)) for preset in ("paper", "authors"))
    assert {name: value for name, value in authors.items() if value != paper[name]} == differences
    # Each difference can be had alone, and taken back alone.
    for name, value in differences.items():
        assert getattr(resolve("cifar10", learner, "paper", {name: value}), name) == value
        assert getattr(resolve("cifar10", learner, "authors", {name: paper[name]}), name) == paper[name]


def test_the_drafts_settings():
    """First draft, section 5 (Models), 5.1, 5.2, C.1; EMNIST and CIFAR-100 are in no other version."""
    for name in ("mnist", "cifar10", "emnist", "cifar100"):
        assert megabatches(name, "draft") == 50
        sm = resolve(name, "sm", "draft")
        assert (sm.hidden, sm.batch_size, sm.select) == (32, 128, "loss")
        assert sm.epochs == (200 if "cifar" in name else 100)
        for learner, experts in (("gmoe", 2), ("moe", 2)):
            mixture = resolve(name, learner, "draft")
            assert (mixture.experts, mixture.gate) == (experts, "soft" if "cifar" in name else "hard")
        # every 5 mega-batches, counted in stages
        assert [resolve(name, "gmoe", "draft", {}, w).grow_every for w in (1, 5, 50)] == [5, 1, 1]
    for name in ("emnist", "cifar100"):
        assert megabatches(name) == 50
        assert resolve(name, "gmoe") == resolve(name, "gmoe", "draft")
    assert resolve("emnist", "sm", "paper") == resolve("mnist", "sm")
    assert resolve("cifar100", "sm", "paper") == resolve("cifar10", "sm")


def test_members_have_gates_if_they_are_mixtures_only():
    assert resolve("mnist", "gens", chosen={"experts": 2, "gate": "hard"}).gate == "hard"
    with pytest.raises(UserError, match="--gate: members of gens have gates with --experts 2 or more only"):
        resolve("mnist", "gens", chosen={"gate": "hard"})
    assert not {"experts", "gate", "router"} & of_learner(Settings(), "gens").keys()
    assert {"experts", "gate", "router"} <= of_learner(Settings(experts=2), "ens").keys()


def test_gens_is_always_from_scratch():
    with pytest.raises(UserError, match="--from-scratch: every member of gens is new"):
        resolve("mnist", "gens", chosen={"from_scratch": True})


def test_runs_made_before_a_setting_are_those_of_what_was_done_then():
    """Configs are compared: members shared one order, gens had from_scratch written down."""
    assert "member_order" not in of_learner(Settings(member_order="shared"), "ens")
    assert of_learner(Settings(), "ens")["member_order"] == "own"
    assert of_learner(Settings(), "gens")["from_scratch"] is False


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_every_preset_is_valid_for_every_learner(dataset, preset):
    """Nesterov momentum is of SGD only, so MNIST has none."""
    for learner in LEARNERS:
        settings = resolve(dataset, learner, preset)
        assert settings.nesterov == (
            preset == "authors" and learner in ("gmoe", "ff") and settings.optimizer == "sgd"
        )
    assert set(AUTHORS) == set(LEARNERS)


def test_only_what_concerns_a_learner_is_written_down():
    written = of_learner(Settings(), "sm")
    assert "hidden" in written
    assert not {"members", "experts", "ff_rate", "gens_init"} & written.keys()
    assert "members" in of_learner(Settings(), "ens")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arch": "resnet"}, "--arch resnet: one of mlp, vgg"),
        ({"experts": 0}, "--experts 0: at least 1"),
        ({"ff_rate": 0.0}, "--ff-rate 0.0: more than 0"),
        ({"lr": float("nan")}, "--lr nan: more than 0"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Settings(**values)
