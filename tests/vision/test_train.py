"""The training loop: best epoch, patience, resumption, minibatches; stacks against single
members."""

import copy
from functools import partial

import pytest
import torch

from alma.errors import UserError
from tests.vision.conftest import equal, seeded, started
from vision.mixture import mixture_mlp
from vision.models import MLP, VGG, vgg_widths
from vision.presets import Settings
from vision.train import Examples, augment, error_of, fit, loss_of, minibatches, validate


def examples(n, seed, size=4, channels=1):
    """Images of 3 classes that can be learnt, a third of them with a random label."""
    generator = seeded(seed)
    labels = torch.randint(0, 3, (n,), generator=generator)
    images = (
        torch.randn(n, channels, size, size, generator=generator) + labels[:, None, None, None] - 1
    )
    labels[::3] = torch.randint(0, 3, (len(labels[::3]),), generator=generator)
    return Examples(images.contiguous(memory_format=torch.channels_last), labels)


def mlp(members=1, joint=None, seed=0):
    return started(MLP([16, 6, 6, 3], members, joint), seed)


def vgg(members=1, seed=0, size=4):
    return started(VGG((1, size, size), vgg_widths(3), 3, members), seed)


def train(model, settings=None, n=50, seed=0, progress=None, watch=None, valid=None):
    chosen = Settings(**{"epochs": 5, "batch_size": 16, "lr": 0.5} | (settings or {}))
    options = {"progress": progress, "callback": watch}
    return fit(model, examples(n, 1), valid or examples(20, 2), chosen, [seeded(seed)], **options)


class Watching:
    """Copies the progress and the model after every epoch."""

    def __init__(self, model):
        self.model = model
        self.models = []
        self.saved = []

    def __call__(self, progress):
        self.models.append(copy.deepcopy(self.model.state_dict()))
        self.saved.append(copy.deepcopy(progress()))

    def scores(self, measure):
        """The validation metric after each epoch."""
        peer = copy.deepcopy(self.model)
        scores = []
        for state in self.models:
            peer.load_state_dict(state)
            scores.append(float(validate(peer, examples(20, 2), measure)))
        return scores


@pytest.mark.parametrize("make", [mlp, vgg])
@pytest.mark.parametrize(("select", "measure"), [("loss", loss_of), ("error", error_of)])
def test_the_best_epoch_on_validation_is_kept_with_its_batch_statistics(make, select, measure):
    model = make()
    watching = Watching(model)

    def spoil_the_last(progress):
        watching(progress)
        if len(watching.models) == 11:
            with torch.no_grad():
                list(model.parameters())[-2].mul_(-1000)

    lr = 2.0 if make is mlp else 0.5
    train(
        model,
        {"epochs": 12, "lr": lr, "batch_size": 8, "select": select},
        n=100,
        watch=spoil_the_last,
    )
    scores = watching.scores(measure)
    best = scores.index(min(scores))
    assert best < 11
    assert equal(model.state_dict(), watching.models[best])


def test_the_last_epoch_is_kept_without_selection():
    model = mlp()
    watching = Watching(model)
    train(model, {"epochs": 9, "lr": 2.0, "batch_size": 8, "select": "last"}, n=100, watch=watching)
    losses = watching.scores(loss_of)
    assert losses[-1] > min(losses)  # the last epoch is not the best
    assert equal(model.state_dict(), watching.models[-1])


def test_a_scheduler_sets_the_learning_rate_of_each_epoch():
    """Two epochs with a linear decay are one at the learning rate and one at half of it."""
    decaying = mlp()
    constant = mlp()
    generator = seeded(0)
    chosen = {"optimizer": "sgd", "batch_size": 16, "select": "last"}
    train(decaying, chosen | {"epochs": 2, "lr": 0.2, "lr_scheduler": "linear"})
    for lr in (0.2, 0.1):
        fit(
            constant,
            examples(50, 1),
            examples(20, 2),
            Settings(**chosen, epochs=1, lr=lr),
            [generator],
        )
    assert equal(decaying.state_dict(), constant.state_dict())


@pytest.mark.parametrize("make", [mlp, partial(vgg, size=32)])
def test_a_stack_trains_as_its_members_one_by_one(make):
    """Within 1e-5 after 20 updates; each member keeps its own best epoch.

    The VGG uses double precision: its 16 small layers with batch normalisation amplify rounding
    errors by orders of magnitude at every update.
    """
    together = make(3, seed=7)
    alone = [make(1, seed=7 + member) for member in range(3)]
    chosen = Settings(
        epochs=5, batch_size=16, optimizer="sgd", lr=0.1 if make is mlp else 0.01, momentum=0.9
    )
    n, size = (50, 4) if make is mlp else (64, 32)

    def fitted(model):
        data = [examples(n, 1, size), examples(20, 2, size)]
        if make is not mlp:
            model.double()
            data = [Examples(part.images.double(), part.labels) for part in data]
        watching = Watching(model)
        fit(model, *data, chosen, [seeded(0)], callback=watching)
        assert watching.saved[-1].epoch * 4 == 20
        return watching

    fitted(together)
    best_epochs = set()
    for member, model in enumerate(alone):
        epochs = fitted(model).models
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                together.state_dict()[name][member], value[0], atol=1e-5, rtol=1e-5
            )
        best_epochs.add(
            next(i for i, state in enumerate(epochs) if equal(state, model.state_dict()))
        )
    assert len(best_epochs) > 1 or make is not mlp


@pytest.mark.parametrize("waited", [1, 3])
def test_a_resumed_stage_ends_after_as_many_epochs_without_improvement(waited):
    """Patience ends the stage, and FLOPs count the epochs done."""
    settings = {"epochs": 100, "lr": 3.0, "patience": 4}
    whole = mlp()
    watching = Watching(whole)
    flops = train(whole, settings, watch=watching)
    epochs = len(watching.saved)
    assert 4 < epochs < 100
    assert [p.waited for p in watching.saved[-4:]] == [1, 2, 3, 4]
    counted = {"forward": 50 * whole.flops.forward, "backward": 50 * whole.flops.backward}
    counted["validation"] = 20 * whole.flops.inference
    assert flops == {name: epochs * count for name, count in counted.items()}
    progress = watching.saved[waited - 5]
    assert progress.waited == waited
    again = mlp()
    assert train(again, settings, seed=99, progress=progress) == flops
    assert equal(again.state_dict(), whole.state_dict())


def test_training_learns_with_hard_gates():
    model = started(mixture_mlp([16, 6, 6, 3], 3, tree=True, hard=True))
    before = float(validate(model, examples(200, 4), error_of))
    train(model, {"epochs": 30, "lr": 1.0}, n=300)
    assert float(validate(model, examples(200, 4), error_of)) < 0.8 * before


def test_an_epoch_is_better_by_at_least_patience_delta():
    model = mlp()
    watching = Watching(model)
    train(model, {"epochs": 20, "patience_delta": 100.0}, watch=watching)
    assert equal(
        model.state_dict(), watching.models[0]
    )  # no epoch is better than the first by 100 nats


@pytest.mark.parametrize("make", [mlp, vgg])
@pytest.mark.parametrize("select", ["loss", "error"])
def test_divergence_is_one_clear_line(make, select):
    with pytest.raises(UserError, match="diverged.*lower --lr"):
        train(make(), {"optimizer": "sgd", "lr": 1e30, "select": select})


def test_one_epoch_is_every_example_once_in_random_order():
    data = examples(50, 1)
    seen = [batch.images for batch in minibatches(data, Settings(batch_size=16), [seeded(0)])]
    assert [len(batch) for batch in seen] == [16, 16, 16, 2]
    together = torch.cat(seen)
    assert not torch.equal(together, data.images)
    assert torch.equal(together.flatten(1).sort(0).values, data.images.flatten(1).sort(0).values)


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, [1]), (16, [16]), (17, [17]), (33, [16, 17]), (34, [16, 16, 2])]
)
def test_no_minibatch_of_a_single_example_is_left_over(n, sizes):
    batches = minibatches(examples(n, 1), Settings(batch_size=16), [seeded(0)])
    assert [len(batch.labels) for batch in batches] == sizes


def test_augmented_images_are_shifted_and_flipped():
    """Padding is black, with a value for each channel."""
    black = torch.tensor([-1.9, 0.3])
    images = torch.arange(1, 26.0).view(1, 5, 5, 1).expand(200, 5, 5, 2).contiguous()
    augmented = augment(images, seeded(0), black)
    assert augmented.shape == images.shape
    padded = black.expand(13, 13, 2).clone()
    padded[4:9, 4:9] = images[0]
    possible = {
        tuple(crop.flatten().tolist())
        for view in (padded, padded.flip(1))
        for row in range(9)
        for column in range(9)
        for crop in [view[row : row + 5, column : column + 5]]
    }
    got = {tuple(image.flatten().tolist()) for image in augmented}
    assert got <= possible
    assert len(got) > 100  # of 162


def test_crops_reach_all_edges_alike():
    """By up to 4 pixels up and down."""
    images = torch.zeros(2000, 9, 9, 1)
    images[:, 4, 4] = 1
    crops = augment(images, seeded(0), 0.0)
    assert set(crops.nonzero()[:, 1].tolist()) == set(range(9))
