"""Settings by preset, data set and learner; which of them run.json records; which are refused."""

import pytest

from vision import presets
from vision.learners import LEARNERS, resolve
from vision.presets import megabatches


def settings_of(learner, **values):
    return LEARNERS[learner].settings_class(**values)


def test_the_papers_settings_for_mnist_and_cifar():
    """Appendix B.1."""
    mnist = resolve("mnist", "sm")
    cifar = resolve("cifar10", "sm")
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
        assert (
            getattr(resolve("cifar10", learner, "authors", {name: paper[name]}), name)
            == paper[name]
        )


def test_the_anytime_preset_averages_what_can_be_averaged_and_replays():
    paper = vars(resolve("mnist", "sm", "paper"))
    sm = vars(resolve("mnist", "sm", "anytime"))
    assert {name: value for name, value in sm.items() if value != paper[name]} == presets.ANYTIME
    assert resolve("mnist", "gens", "anytime").epochs == presets.ANYTIME["epochs"]
    anew = resolve("mnist", "sm", "anytime", {"from_scratch": True})
    assert (anew.average, anew.epochs) == (0.0, presets.ANYTIME["epochs"])
    assert resolve("mnist", "sm", "anytime", {"epochs": 3}).epochs == 3
    assert resolve("digits", "sm", "anytime").epochs == 100
    assert {
        resolve(name, "sm", "anytime").epochs for name in ("cifar10", "cifar100", "folder")
    } == {30}
    assert (
        resolve("mnist", "sm", "anytime", {"patience": 5}).select == "loss"
    )  # "last" would ignore it
    assert presets.replay_share("anytime", False) > 0
    assert presets.replay_share("anytime", True) == presets.replay_share("paper", False) == 0


def test_the_drafts_settings():
    """First draft, section 5 (Models), 5.1, 5.2, C.1; no other version has EMNIST and CIFAR-100."""
    for name in ("mnist", "cifar10", "emnist", "cifar100"):
        assert megabatches(name, "draft") == 50
        sm = resolve(name, "sm", "draft")
        assert (sm.hidden, sm.batch_size, sm.select) == (32, 128, "loss")
        assert sm.epochs == (200 if "cifar" in name else 100)
        for learner, experts in (("gmoe", 2), ("moe", 2), ("gens", 1)):
            mixture = resolve(name, learner, "draft")
            assert (mixture.experts, mixture.gate) == (
                experts,
                "soft" if "cifar" in name else "hard",
            )
        # every 5 mega-batches, counted in stages
        for learner in ("gmoe", "ff"):
            assert [resolve(name, learner, "draft", {}, w).grow_every for w in (1, 3, 5, 50)] == [
                5,
                2,
                1,
                1,
            ]
    for name, peer in (("emnist", "mnist"), ("cifar100", "cifar10")):
        assert megabatches(name) == 50
        assert resolve(name, "gmoe") == resolve(name, "gmoe", "draft")
        assert resolve(name, "sm", "paper") == resolve(peer, "sm")


def test_another_optimizer_has_its_own_rate_and_momentum():
    for dataset, optimizer, expected in (
        ("mnist", "sgd", (0.01, 0.9)),
        ("cifar10", "adadelta", (1.0, 0.0)),
        ("cifar10", "sgd", (0.01, 0.9)),
        ("cifar10", "adam", (0.001, 0.0)),
        ("mnist", "adamw", (0.001, 0.0)),
    ):
        settings = resolve(dataset, "sm", chosen={"optimizer": optimizer})
        assert (settings.lr, settings.momentum) == expected
    assert resolve("mnist", "sm", chosen={"optimizer": "sgd", "lr": 0.5}).lr == 0.5


def test_settings_without_effect_are_not_recorded():
    gates = {"experts", "gate", "router"}
    assert not gates & settings_of("gens").config().keys()
    assert gates <= settings_of("gens", experts=2).config().keys()
    assert gates <= settings_of("gmoe").config().keys()
    assert not {"amp", "average"} & settings_of("ens").config().keys()
    assert settings_of("ens", amp="bf16").config()["amp"] == "bf16"


@pytest.mark.parametrize(
    ("learner", "chosen"),
    [
        ("gens", {"experts": 2, "gate": "hard"}),
        ("gens", {"from_scratch": False, "average": 0}),
        ("sm", {"lr": 1, "weight_decay": 0}),
    ],
)
def test_settings_that_do_not_conflict_are_taken(learner, chosen):
    assert vars(resolve("mnist", learner, chosen=chosen)).items() >= chosen.items()


REFUSED = [
    ("sm", {"arch": "resnet"}, "--arch resnet: choose from mlp, vgg"),
    ("ff", {"ff_rate": 0.0}, "--ff-rate 0.0: more than 0"),
    ("sm", {"lr": float("nan")}, "--lr nan: more than 0"),
    ("sm", {"lr": float("inf")}, "larger than any value that a run can record"),
    ("sm", {"batch_size": 10**20}, "larger than any value that a run can record"),
    ("sm", {"weight_decay": -0.1}, "--weight-decay -0.1: at least 0"),
    ("sm", {"nesterov": True}, "--nesterov needs --optimizer sgd"),
    *(("sm", {"optimizer": "sgd", "momentum": value}, "below 1") for value in (1.0, 1.5)),
    ("sm", {"hidden": "4"}, "--hidden '4': of type str, give int"),
    ("sm", {"epochs": 2.0}, "--epochs 2.0: of type float, give int"),
    ("sm", {"lr": "1"}, "--lr '1': of type str, give float"),
    ("sm", {"augment": "off"}, "--augment 'off': of type str, give bool"),
    ("sm", {"momentum": 0.9}, "--momentum does not apply to sm: Adadelta has none"),
    (
        "sm",
        {"momentum": 0.9, "optimizer": "adamw"},
        "--momentum does not apply to sm: Adamw has none",
    ),
    ("sm", {"patience": 3, "select": "last"}, "--select last does not ask which epoch is best"),
    ("sm", {"average": 0.5, "from_scratch": True}, "weights of unrelated models have no average"),
    *(
        ("sm", {"average": value}, "--average")
        for value in (1.0, -0.1, float("nan"), "poly", "last:8")
    ),
    ("gens", {"average": 0.5}, "each member is trained in one stage only"),
    (
        "gens",
        {"gate": "hard"},
        "--gate does not apply to gens: its members have gates only with --experts 2",
    ),
    ("gens", {"from_scratch": True}, "--from-scratch does not apply to gens: every stage adds"),
    (
        "umix",
        {"member_order": "own"},
        "--member-order does not apply to umix: it is a setting of ens",
    ),
    ("nobody", {}, "'nobody': choose from sm, ens"),
    ("sm", {"members": 3}, "--members does not apply to sm: it is a setting of ens, umix"),
    ("sm", {"wrong": 1}, "wrong is not a setting"),
]


@pytest.mark.parametrize(("learner", "chosen", "message"), REFUSED)
def test_what_does_not_apply_or_is_out_of_range_is_one_line(refused, learner, chosen, message):
    assert message in refused(resolve, "digits", learner, chosen=chosen)
