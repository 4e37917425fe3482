"""--optimizer adamw_schedulefree and sgd_schedulefree: equal to their library, resumed, tested at x."""

import importlib.util

import pytest
import schedulefree
import torch
from torch.nn import functional as F

from alma.errors import UserError
from tests.vision.test_train import Watching, equal, examples, mlp, seeded, train
from vision.learners import resolve
from vision.presets import Settings
from vision.train import fit, loss_of, minibatches, validate

ADAMW = {"optimizer": "adamw_schedulefree", "lr": 0.02, "momentum": 0.8, "weight_decay": 0.1}
SGD = {"optimizer": "sgd_schedulefree", "lr": 0.3, "momentum": 0.9, "weight_decay": 1e-2}


def in_a_plain_loop(model, chosen, stages, epochs):
    """The library's own way: train, then validate and keep weights after `eval`; new in every stage."""
    generator, scores = seeded(0), []
    for _ in range(stages):
        beta, common = chosen["momentum"], {"lr": chosen["lr"], "weight_decay": chosen["weight_decay"]}
        steps = (
            schedulefree.AdamWScheduleFree(model.parameters(), betas=(beta, 0.999), **common)
            if chosen is ADAMW
            else schedulefree.SGDScheduleFree(model.parameters(), momentum=beta, **common)
        )
        settings = Settings(**chosen, batch_size=16)
        for _ in range(epochs):
            steps.train()
            for images, labels in minibatches(examples(50, 1), settings, [generator]):
                steps.zero_grad()
                F.cross_entropy(model(images)[0].t(), labels).backward()
                steps.step()
            steps.eval()
            scores.append(float(validate(model, examples(20, 2), loss_of)))
    return scores


@pytest.mark.parametrize("chosen", [ADAMW, SGD])
def test_training_equals_the_library_in_a_plain_loop(chosen):
    """Two stages of three epochs, which each begin with a new optimizer; the scores of validation, too."""
    ours, theirs, generator, scores = mlp(), mlp(), seeded(0), []
    watching = Watching(ours)
    watching.scored = lambda epoch, score, lr: scores.append(float(score))
    for _ in range(2):
        settings = Settings(**chosen, batch_size=16, epochs=3, select="last")
        fit(ours, examples(50, 1), examples(20, 2), settings, [generator], None, watching)
    expected = in_a_plain_loop(theirs, chosen, 2, 3)
    assert scores == pytest.approx(expected, abs=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", [ADAMW, SGD])
def test_a_resumed_stage_equals_an_uninterrupted_one(chosen):
    whole, stopped, resumed = mlp(), mlp(), mlp(seed=9)
    train(whole, chosen)
    watching = Watching(stopped, stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, chosen, watch=watching)
    train(resumed, chosen, progress=watching.saved[-1])
    assert equal(whole.state_dict(), resumed.state_dict())


def test_a_stack_trains_as_its_members_one_by_one():
    stack = mlp(2)
    train(stack, ADAMW)
    for member in range(2):
        alone = mlp(seed=member)
        train(alone, ADAMW)
        for whole, part in zip(stack.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole[member], part[0], rtol=1e-4, atol=1e-5)


def test_the_defaults_are_the_librarys_and_chosen_settings_prevail():
    of_adamw = resolve("mnist", "sm", chosen={"optimizer": "adamw_schedulefree"})
    assert (of_adamw.lr, of_adamw.momentum, of_adamw.weight_decay) == (0.0025, 0.9, 0.0)
    chosen = {"optimizer": "sgd_schedulefree", "lr": 2.0, "momentum": 0.95}
    of_sgd = resolve("mnist", "ens", "anytime", chosen)
    assert (of_sgd.lr, of_sgd.momentum) == (2.0, 0.95)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lr_scheduler": "cosine"}, "--lr-scheduler does not apply to sm: --optimizer adamw_.* no schedule"),
        ({"nesterov": True}, "--nesterov needs --optimizer sgd"),
        ({"momentum": 0.0}, r"--momentum 0: --optimizer adamw_schedulefree needs one in \(0, 1\)"),
        ({"momentum": 1.0}, "--momentum 1: "),
        ({"arch": "vgg"}, "needs --arch mlp"),
    ],
)
def test_a_setting_without_effect_or_meaning_is_one_line(more, message):
    with pytest.raises(UserError, match=message):
        resolve("digits", "sm", chosen={"optimizer": "adamw_schedulefree"} | more)


def test_without_the_library_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = "--optimizer sgd_schedulefree needs the package schedulefree: pip install schedulefree"
    with pytest.raises(UserError, match=message):
        resolve("digits", "sm", chosen={"optimizer": "sgd_schedulefree"})
