"""Comparison of configs."""

import pytest

from alma.configs import canonical, changes, differing, flatten


def test_flatten():
    config = {
        "model": {"d": 8, "moe": {"experts": 4}},
        "flags": ["--lr", "1e-3", "--fp16"],
        "list": [1, 2],
    }
    flat = {"model.d": 8, "model.moe.experts": 4, "--lr": "1e-3", "--fp16": "", "list": [1, 2]}
    assert flatten(config) == flat


def test_differing_settings_keep_their_order():
    assert differing([{"b": 1, "a": [1]}, {"b": 2, "a": [1], "c": None, "d": 0}]) == ["b", "d"]


def test_canonical_text_ignores_order_and_some_settings():
    assert canonical({"a": 1, "b": 2, "seed": 3}, "seed") == canonical({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (["--lr", "4e-3", "--cpu"], ["--cpu", "--lr=2e-3"], ["--lr: 4e-3 -> 2e-3"]),
        (["--lr", "1e-3", "--lr", "2e-3"], ["--lr=2e-3"], []),
        (
            ["--cpu"],
            ["--clip-norm", "-1"],
            ["--clip-norm: not given -> -1", "--cpu: given -> not given"],
        ),
        (["--adam-betas", "(0.9,", "0.98)"], ["--adam-betas=(0.9, 0.98)"], []),
        ([2, 2, 4], [2, 4, 4], ["list: [2, 2, 4] -> [2, 4, 4]"]),
        (["a" * 64, "b" * 64], ["a" * 64, "c" * 64, "d"], [f"list[1]: {'b' * 12}… -> {'c' * 12}…"]),
        (["a" * 64, "b" * 64], ["a" * 64], ["list: 2 values -> 1"]),
        (1, 1.0, []),
    ],
)
def test_changes(before, now, expected):
    assert changes({"seed": 0, "list": before}, {"seed": 0, "list": now}) == expected


@pytest.mark.parametrize(("before", "now"), [(1, 2), ([1, 2], [1, 2, 3])])
def test_growing_settings_may_only_increase(before, now):
    assert changes({"x": before}, {"x": now}, growing=["x"]) == []
    assert len(changes({"x": now}, {"x": before}, growing=["x"])) == 1
    assert changes({"x": [1, 2, 5]}, {"x": [1, 3, 5, 6]}, growing=["x"])
