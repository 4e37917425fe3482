"""Classifiers of torchvision as backbones: costs, weights, learners, and what is refused."""

import copy
from itertools import chain

import pytest
import torch
from torchvision import models

from alma.errors import UserError
from tests.vision.conftest import CPU, equal, error_of, jobs, numbers, seeded
from vision import MegaBatchStream, classifiers, deployed, run
from vision.classifiers import _built, check, costs
from vision.data import Images, make_dataset
from vision.learners import LEARNERS, resolve
from vision.presets import TORCHVISION, Settings
from vision.train import fit

SMALL = "shufflenet_v2_x0_5"
DROPOUT = "mobilenet_v3_small"
ARCH = TORCHVISION + SMALL


def pictures(count=24, size=8, channels=3, classes=4):
    """Images of two mega-batches, whose class is their brightness."""
    labels = torch.arange(count) % classes
    noise = torch.randint(0, 60, (count, channels, size, size), generator=seeded(0))
    images = Images((noise + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)
    return MegaBatchStream(make_dataset("folder", images, images), 2)


def learner(name, arch=SMALL, shape=(3, 8, 8), classes=4, seed=0, **chosen):
    settings = resolve("folder", name, chosen={"arch": TORCHVISION + arch, "epochs": 2, **chosen})
    return LEARNERS[name](shape, classes, settings, seed, CPU)


def tensors(model):
    return [tensor.detach().clone() for tensor in chain(model.parameters(), model.buffers())]


def test_resnet18_has_the_known_parameters_and_flops():
    flops = costs("resnet18", 1000, 224, 224)
    assert (
        flops.forward == flops.inference == pytest.approx(2 * 1.814e9, rel=1e-3)
    )  # torchvision's table
    first = 2 * 64 * 3 * 49 * 112**2
    assert flops.backward == 2 * flops.forward - first
    alone = learner("sm", "resnet18", (3, 32, 32), 1000)
    assert alone.parameters == 11_689_512
    assert learner("ens", "resnet18", (1, 32, 32), 10, members=2).parameters == 2 * 11_181_642
    umix = learner("umix", "resnet18", (3, 32, 32), 1000, members=2)
    assert umix.eval_flops_per_example == pytest.approx(2 * alone.eval_flops_per_example)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*models.list_models(module=models)} - {"vit_h_14"}))
def test_every_classifier_costs_what_torchvision_says_and_every_parameter_trains(name):
    weights = models.get_model_weights(name).DEFAULT
    size = weights.transforms.keywords["crop_size"]
    flops = costs(name, len(weights.meta["categories"]), size, size)
    assert flops.forward == pytest.approx(2e9 * weights.meta["_ops"], rel=0.015)
    network = _built(name, 7).to("meta").train()
    with torch.device("meta"):
        loss = network(torch.empty(2, 3, size, size)).sum()
        assert len(torch.autograd.grad(loss, list(network.parameters())))


@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_the_network_of_torchvision_and_gray_images_are_repeated(channels):
    subject = learner("sm", shape=(channels, 8, 8))
    (member,) = subject.model.networks
    images = torch.randn(5, channels, 8, 8)
    expected = member.network.eval()(images.repeat(1, 3 // channels, 1, 1))
    assert torch.equal(subject.model.eval()(images), expected.t()[None])


def test_weights_are_drawn_as_by_torchvision_from_the_seed_alone():
    before = torch.random.get_rng_state()
    first = learner("sm")
    second = learner("sm", seed=1)
    ens = learner("ens", members=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not equal(tensors(first.model), tensors(second.model))
    assert equal(tensors(first.model), tensors(ens.model.networks[0]))
    assert not equal(tensors(first.model), tensors(ens.model.networks[1]))
    torch.manual_seed(int(torch.randint(2**62, (), generator=first.generator_for("init", 0, 0))))
    assert equal(
        tensors(models.get_model(SMALL, num_classes=4)), tensors(first.model.networks[0].network)
    )


@pytest.mark.parametrize("joint", [None, "mean"])
def test_members_train_as_they_would_alone_but_those_of_umix_together(joint):
    stream = pictures()
    name = "umix" if joint else "ens"
    data = stream.dataset.examples(stream.dataset.train)
    options = {"select": "last", "augment": False, "batch_size": 24}
    ensemble = learner(name, members=2, **options)
    alone = [learner("sm", **options) for _ in range(2)]
    for single, member in zip(alone, ensemble.model.networks, strict=True):
        single.model.networks[0].load_state_dict(member.state_dict())
    spent = fit(ensemble.model, data, data, ensemble.settings, ensemble.generators)
    single_losses = [
        fit(single.model, data, data, single.settings, single.generators) for single in alone
    ]
    assert spent["forward"] == 2 * single_losses[0]["forward"]
    logits = [member(data.images) for member in ensemble.model.eval().networks]
    expected = torch.cat(logits).mean(0, True) if joint else torch.cat(logits)
    assert torch.equal(ensemble.model(data.images), expected)
    for member, single in zip(ensemble.model.networks, alone, strict=True):
        assert equal(tensors(member), tensors(single.model)) == (joint is None)


@pytest.mark.parametrize(("name", "networks"), [("sm", 1), ("ens", 2), ("umix", 2), ("gens", 2)])
def test_every_learner_with_fixed_networks_takes_it(tmp_path, name, networks):
    options = {"members": 2} if name in ("ens", "umix") else {}
    options |= {} if name == "gens" else {"average": "poly:2"}
    record = run(pictures(), name, tmp_path, replay=True, arch=ARCH, epochs=1, **options)
    assert record.config["arch"] == ARCH
    assert "hidden" not in record.config
    single = learner("sm")
    last = record.rows[-1]
    assert last["parameters"] == networks * single.parameters
    assert last["eval_flops_per_example"] == networks * single.eval_flops_per_example
    assert ("raw" in last["extra"]) == (name != "gens")


def test_dropout_draws_from_the_seed_of_the_run():
    trained = []
    examples = pictures().dataset.examples(pictures().dataset.train)
    for seed in (1, 2):
        torch.manual_seed(seed)
        subject = learner("sm", DROPOUT, epochs=1, augment=False)
        before = torch.random.get_rng_state()
        fit(subject.model, examples, examples, subject.settings, subject.generators)
        assert torch.equal(torch.random.get_rng_state(), before)
        trained.append(tensors(subject.model))
    assert equal(*trained)
    model = subject.model.train()
    assert not torch.equal(model(examples.images), model(examples.images))


def test_a_single_example_is_trained_with_the_running_statistics():
    model = learner("sm").model.train()
    model.draw_from([seeded(0)])
    image = torch.randn(1, 3, 8, 8)
    assert torch.equal(model(image), copy.deepcopy(model).eval()(image))


# Weights of a file


@pytest.fixture
def saved(tmp_path):
    """A function that writes a state_dict to w.pt, and returns it."""

    def save(classes=4, change=dict, name=SMALL):
        state = models.get_model(name, num_classes=classes).state_dict()
        torch.save(change(dict(state)), tmp_path / "w.pt")
        return state

    return save


def test_weights_of_a_file(tmp_path, capsys, saved):
    state = saved()
    ens = learner("ens", members=2, weights=str(tmp_path / "w.pt"))
    check(ens.settings, (3, 8, 8), 4)
    assert capsys.readouterr().out == ""
    for member in ens.model.networks:
        assert equal(member.network.state_dict(), state)
    ens.model.networks[0].network.fc.bias.data += 1
    ens.reset(3)
    assert torch.equal(ens.model.networks[0].network.fc.bias, state["fc.bias"])


def test_the_layer_of_the_classes_starts_at_random_if_their_numbers_differ(tmp_path, capsys, saved):
    state = saved(classes=1000)
    subject = learner("sm", weights=str(tmp_path / "w.pt"))
    check(subject.settings, (3, 8, 8), 4)
    output = capsys.readouterr().out
    assert output == f"{tmp_path}/w.pt has other classes: fc.weight, fc.bias start at random\n"
    (member,) = subject.model.networks
    loaded = member.network.state_dict()
    anew = learner("sm").model.networks[0].network.state_dict()
    for name in loaded:
        assert torch.equal(loaded[name], (anew if name.startswith("fc.") else state)[name]), name


def test_a_file_with_auxiliary_modules_fits(tmp_path):
    torch.save(
        models.googlenet(aux_logits=True, init_weights=False).state_dict(), tmp_path / "g.pt"
    )
    check(
        Settings(arch=TORCHVISION + "googlenet", weights=str(tmp_path / "g.pt")), (3, 32, 32), 1000
    )


MISFITS = [
    (
        lambda state: state.pop("conv1.0.weight") is None or state,
        'Missing key(s): "conv1.0.weight"',
    ),
    (lambda state: state | {"x": torch.zeros(1)}, 'Unexpected key(s): "x"'),
    (
        lambda state: state | {"conv1.0.weight": torch.zeros(24, 1, 3, 3)},
        "size mismatch for conv1.0.weight",
    ),
    (lambda state: state | {"fc.weight": torch.zeros(9, 7)}, "size mismatch for fc.weight"),
    (lambda state: {"model": state}, "Missing key(s)"),
    (lambda state: state | {1: torch.zeros(1)}, 'Unexpected key(s): "1"'),
    (lambda state: state | {"fc.bias": 3}, "expected torch.Tensor"),
]


@pytest.mark.parametrize(("change", "reason"), MISFITS)
def test_a_file_of_another_model_is_one_line(tmp_path, refused, saved, change, reason):
    saved(change=change)
    options = {"arch": ARCH, "weights": str(tmp_path / "w.pt")}
    line = refused(run, pictures(), "sm", tmp_path / "run", **options)
    assert line.startswith(f"--weights {tmp_path}/w.pt does not fit {ARCH}: ")
    assert reason in line.replace(" in state_dict", "")
    assert not (tmp_path / "run").exists()


def test_a_missing_or_damaged_file_is_one_line(tmp_path, refused):
    path = tmp_path / "w.pt"
    play = (run, pictures(), "sm", tmp_path / "run")
    options = {"arch": ARCH, "weights": str(path)}
    assert f"--weights {path}: there is no such file" in refused(*play, **options)
    path.write_bytes(b"text")
    assert "give a file of torch.save(model.state_dict(), FILE)" in refused(*play, **options)
    path.write_bytes(b"II*\0")
    assert "is damaged (Weights only load failed): give a file" in refused(*play, **options)
    torch.save(models.get_model(SMALL).state_dict(), path)
    whole = path.read_bytes()
    for size in (3, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "give a file of torch.save(model.state_dict(), FILE)" in refused(*play, **options)
    torch.save([1, 2], path)
    assert "it is no dictionary" in refused(*play, **options)
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_same_weights_wherever_they_lie(tmp_path, refused, saved):
    def play():
        weights = str(tmp_path / "w.pt")
        return run(pictures(), "sm", tmp_path / "run", weights=weights, arch=ARCH, epochs=1)

    saved()
    first = play()
    (tmp_path / "w.pt").rename(tmp_path / "moved.pt")
    (tmp_path / "w.pt").write_bytes((tmp_path / "moved.pt").read_bytes())
    assert numbers(play()) == numbers(first)
    assert len(first.config["weights"]) == 16
    saved(classes=1000)
    assert "weights" in refused(play)


# The command line


NO_GROWTH = "a model of torchvision neither grows nor has experts; choose --arch mlp or vgg"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--arch torchvision:resnet19", "such as torchvision:resnet18"),
        ("--arch resnet18", "choose from mlp, vgg, or torchvision:NAME"),
        ("--arch torchvision:alexnet", "alexnet does not take images of 8 x 8 pixels"),
        ("--arch torchvision:vit_b_16", "Expected 224 but got 8!): give --image-size"),
        (
            "--arch torchvision:resnet18 --hidden 8",
            "--hidden does not apply to sm: torchvision:resnet18",
        ),
        ("--weights README.md", "--weights does not apply to sm: it needs --arch torchvision:NAME"),
        *(
            (f"--arch {ARCH} --learner {name}", NO_GROWTH)
            for name in ("gmoe", "moe", "ff", "sm,gmoe")
        ),
        (f"--arch {ARCH} --learner gens --experts 2", NO_GROWTH),
    ],
)
def test_what_does_not_apply_is_one_line(tmp_path, monkeypatch, capsys, words, reason):
    assert reason in error_of(monkeypatch, capsys, *words.split(), "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sweep_gives_sizes_and_weights_to_those_that_have_them(tmp_path, saved):
    saved(classes=10)
    planned = jobs("--arch", f"mlp,{ARCH}", "--hidden", "4,8", "--weights", tmp_path / "w.pt")
    (name,) = {job.out.name for job in planned} - {"sm_w1_h4_arch-mlp_s0", "sm_w1_h8_arch-mlp_s0"}
    assert name.startswith(f"sm_w1_arch-torchvision-{SMALL}_weights-")
    with pytest.raises(UserError, match="choose --arch mlp or vgg"):
        jobs("--arch", f"mlp,{ARCH}", "--learner", "gmoe")


@pytest.mark.parametrize("channels", [1, 3])
def test_weights_go_with_the_statistics_of_imagenet(tmp_path, channels):
    torch.save(models.get_model(SMALL, num_classes=4).state_dict(), tmp_path / "weights.pt")
    stream = pictures(channels=channels)
    chosen = {"arch": ARCH, "weights": str(tmp_path / "weights.pt")}
    assert (
        resolve("folder", "sm", chosen={**chosen, "statistics": "data"}).config().get("statistics")
        is None
    )
    record = run(stream, "sm", tmp_path / "run", epochs=1, **chosen)
    assert record.config["statistics"] == "imagenet"
    mean = record.info["images"]["mean"]
    std = record.info["images"]["std"]
    assert (mean, std) == (
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]) if channels == 3 else (mean, std)
    )
    assert (sum(mean) / channels, sum(std) / channels) == pytest.approx((0.449, 0.226))
    trained, data = deployed.load(tmp_path / "run")  # without the file
    predicted = trained.judged(trained.deployed, data.examples(stream.dataset.test))[-1]
    assert (
        float((predicted != stream.dataset.test.labels).double().mean()) == record.rows[-1]["value"]
    )


def test_a_learner_builds_each_network_once_and_a_later_reset_draws_again(monkeypatch):
    """With the weights that two constructions gave: those of the generator of the first reset."""
    built = []

    def count(*args, **kwargs):
        built.append(args)
        return _built(*args, **kwargs)

    monkeypatch.setattr(classifiers, "_built", count)
    subject = learner("ens", members=2)
    assert len(built) == 2
    for member, network in enumerate(subject.model.networks):
        expected = _built(SMALL, 4, subject.generator_for("init", member, 0))
        assert all(map(torch.equal, tensors(network.network), tensors(expected)))
    first = tensors(subject.model)
    for parameter in subject.model.parameters():
        parameter.data.zero_()
    subject.reset(0)
    assert all(map(torch.equal, tensors(subject.model), first))


def test_loaded_weights_are_drawn_again_by_the_first_reset():
    subject = learner("sm")
    first = tensors(subject.model)
    rebuilt = subject.build({})
    zeros = {name: torch.zeros_like(value) for name, value in rebuilt.state_dict().items()}
    rebuilt.load_state_dict(zeros)
    rebuilt.reset(subject.generator_for("init", 0, 0))
    assert all(map(torch.equal, tensors(rebuilt), first))
