"""Selections of image runs for the paper's figures."""

import pytest

from alma.report.results import compute, memory
from alma.report.vision import select

from .synthetic import image_run, results_of


def test_trade_offs_join_sizes_without_replay(grid):
    results = select.without_replay(results_of(grid))
    curves = select.cer_against(results, memory)
    assert [(c.result.method, c.result.config["waiting_time"]) for c in curves[:6]] == [
        *(("sm", w) for w in (1, 2, 4)),
        *(("ens", w) for w in (1, 2, 4)),
    ]
    assert curves[0].x == [5 * 40, 5 * 80]  # Mem is over t = 0..B
    assert curves[0].y == pytest.approx([1.45, 1.45])  # mean of 1.4 and 1.5
    assert curves[0].deviation == pytest.approx([0.1 / 2**0.5] * 2)
    assert curves[5].y == pytest.approx([0.9 * 3 + 0.1] * 2)  # waits for all 4
    by_compute = select.cer_against(results, compute)
    assert by_compute[1].x == pytest.approx([4.0, 4.0])


def test_learning_curves_show_the_learner_and_size_with_most_waits(tmp_path):
    for w in (1, 2):
        image_run(tmp_path / f"sm{w}", [0.5] * 4, w, size=32)
    for w in (1, 2, 4):
        image_run(tmp_path / f"ens{w}", [0.5] * 4, w, learner="ens", size=4)
        image_run(tmp_path / f"big{w}", [0.5] * 4, w, learner="ens", size=16)
    chosen = select.most_waits(results_of(tmp_path))
    assert {(r.learner, r.config["hidden"]) for r in chosen} == {("ens", 16)}
    assert [r.config["waiting_time"] for r in chosen] == [1, 2, 4]


@pytest.mark.parametrize(("waits", "chosen"), [((5, 10, 20), 10), ((5, 5, 20), 5), ((20, 5), 5)])
def test_replay_is_shown_at_waiting_time_10_or_the_most_frequent(tmp_path, waits, chosen):
    for i, w in enumerate(waits):
        for replay in (False, True):
            image_run(tmp_path / f"{i}{replay}", [0.5] * 20, w, size=i + 1, replay=replay)
    pairs = select.at_one_wait(select.replay_pairs(results_of(tmp_path)))
    assert {plain.config["waiting_time"] for plain, _ in pairs} == {chosen}


def test_spokes_are_linear_or_logarithmic(tmp_path):
    image_run(tmp_path / "a", [0.5, 0.5], size=1)
    image_run(tmp_path / "b", [0.2, 0.3], size=1, learner="ens")
    image_run(tmp_path / "c", [0.1, 0.1], size=100, learner="ff")
    spokes = select.spokes(results_of(tmp_path))
    assert spokes["CER"].values == pytest.approx([1.0, 0.5, 0.2])
    assert spokes["CER"].radii == pytest.approx([1.0, 0.5, 0.2])
    assert spokes["Mem"].values == [30, 30, 3000]
    assert spokes["Mem"].radii == pytest.approx([0.1, 0.1, 1.0])
    assert spokes["test FLOPs"].values == [300, 300, 30000]
    assert spokes["train FLOPs"].values == [2e12] * 3
    assert [spoke.logarithmic for spoke in spokes.values()] == [False, True, False, True]


@pytest.mark.parametrize(("growth", "methods"), [((5, 3, 1), 1), ((1, 1, 1), 1), ((5, 1, 1), 2)])
def test_growth_after_as_many_mega_batches_is_one_method(tmp_path, growth, methods):
    for w, every in zip((1, 2, 20), growth, strict=True):
        image_run(tmp_path / f"w{w}", [0.5] * 20, w, learner="gmoe", grow_every=every)
    assert len(select.methods(results_of(tmp_path))) == methods
