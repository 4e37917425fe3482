"""Streams that drift, and the errors on the held-out images of each mega-batch."""

import numpy as np
import pytest
import torch

from vision import MegaBatchStream, run
from vision.data import load
from vision.scenarios import make_stream

DIGITS = load("digits")
FAST = {"hidden": 8, "epochs": 3}


@pytest.fixture(params=["classes", "rotated", "permuted"])
def stream(request):
    return make_stream(DIGITS, 5, 3, request.param)


def test_every_image_is_in_one_megabatch_and_every_test_image_held_out_once(stream):
    assert sorted(np.concatenate(stream.parts)) == list(range(len(DIGITS.train.labels)))
    assert sorted(np.concatenate(stream.held_out)) == list(range(len(stream.dataset.test.labels)))
    assert torch.equal(stream.dataset.train.labels, DIGITS.train.labels)
    assert stream.dataset.fingerprint == DIGITS.fingerprint  # seeds are repeats of one experiment


def test_classes_are_disjoint_in_training_and_tests():
    stream = make_stream(DIGITS, 5, 0, "classes")
    for t, held_out in enumerate(stream.held_out, start=1):
        labels = {2 * t - 2, 2 * t - 1}
        assert set(DIGITS.train.labels[stream.parts[t - 1]].tolist()) == labels
        assert set(DIGITS.test.labels[held_out].tolist()) == labels


def test_rotations_are_even_and_permutations_keep_pixels():
    rotated, permuted = (make_stream(DIGITS, 2, 0, name) for name in ("rotated", "permuted"))
    second = rotated.parts[1]  # by 90 degrees
    turned = torch.rot90(DIGITS.train.images[second], 1, (2, 3))
    assert torch.equal(rotated.dataset.train.images[second], turned)
    changed = permuted.dataset.train.images[second]
    original = DIGITS.train.images[second]
    assert not torch.equal(changed, original)
    assert torch.equal(changed.flatten(1).sort(1).values, original.flatten(1).sort(1).values)
    for scenario in (rotated, permuted):
        first = scenario.parts[0]
        assert torch.equal(scenario.dataset.train.images[first], DIGITS.train.images[first])
        count = len(DIGITS.test.labels)
        assert torch.equal(scenario.dataset.test.images[:count], DIGITS.test.images)
        assert torch.equal(scenario.dataset.test.labels[count:], DIGITS.test.labels)


def test_each_seed_has_an_order_of_pixels_of_its_own():
    """Otherwise the spread over seeds leaves out that of the orders."""
    tests = []
    for seed in (0, 1, 1):
        stream = make_stream(DIGITS, 2, seed, "permuted")
        tests.append(stream.dataset.test.images[stream.held_out[1]])
    assert not torch.equal(tests[0], tests[1])
    assert torch.equal(tests[1], tests[2])


def test_rows_have_the_error_on_each_held_out_part(stream, tmp_path):
    played = run(stream, out=tmp_path / "run", waiting_time=2, **FAST)
    sizes = [len(part) for part in stream.held_out]
    for row in played.rows:
        assert np.average(row["extra"]["matrix"], weights=sizes) == pytest.approx(row["value"])
    assert played.rows[3]["extra"]["matrix"] == played.rows[2]["extra"]["matrix"]  # it waits
    assert played.config["scenario"] == stream.scenario


def test_an_ordinary_stream_has_no_matrix(tmp_path):
    played = run(MegaBatchStream(DIGITS, 5), out=tmp_path / "run", **FAST)
    assert "matrix" not in played.rows[-1]["extra"]
    assert "scenario" not in played.config


def test_more_megabatches_than_classes_are_refused(refused):
    assert "11 mega-batches of 10 classes: choose 1 to 10" in refused(
        make_stream, DIGITS, 11, 0, "classes"
    )
