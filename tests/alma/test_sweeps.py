"""Combinations of lists of values, and the folders of their runs."""

import pytest

from alma.sweeps import combinations, common_folder, folder_parts, varying


def test_the_last_name_changes_fastest():
    assert list(combinations({"learner": ["sm", "ens"], "seed": [0, 1]})) == [
        {"learner": "sm", "seed": 0},
        {"learner": "sm", "seed": 1},
        {"learner": "ens", "seed": 0},
        {"learner": "ens", "seed": 1},
    ]
    assert list(combinations({})) == [{}]  # no list: one run
    assert list(combinations({"learner": []})) == []


def test_varying_are_the_names_whose_values_differ_in_the_order_of_the_names():
    runs = [{"lr": 1, "epochs": 2, "gate": "hard"}, {"lr": 1, "epochs": 3}]
    assert varying(["gate", "lr", "epochs", "seed"], runs) == ["gate", "epochs"]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("lr", 0.3, "lr-0.3"),
        ("lr", 0.1 + 0.2, "lr-0.30000000000000004"),
        ("lr", "2e-4", "lr-2e-4"),
        ("replay_share", 0.5, "replay-share-0.5"),
        ("replay", True, "replay-on"),
        ("grow-experts", "2,2,4", "grow-experts-2-2-4"),
        ("adam-betas", "(0.9,0.98)", "adam-betas-0.9-0.98"),
        ("evaluate", "a:b c", "evaluate-a-b-c"),
    ],
)
def test_a_part_of_a_folder_needs_no_quotes(name, value, part):
    assert folder_parts({name: value, "without": None}) == [part]


def test_the_first_folder_that_two_runs_have():
    assert common_folder(["a", "b", "b", "a"]) == "a"
    assert common_folder(["a", "b"]) is None
