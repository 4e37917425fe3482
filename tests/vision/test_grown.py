"""A stream by date that grew in appends has the same record as one made in one go."""

import random

import pytest

from alma.evaluations import read_item_losses
from tests.vision.conftest import numbers
from tests.vision.test_weeks import FAST, arrive, stream
from vision import run
from vision.late import to_test

WEEKS = 6
TINY = FAST | {"epochs": 2}
OPTIONS = {
    "sm": {"average": "poly:2", "replay_share": 0.5},
    "ens": {"members": 2, "waiting_time": 2},
    "umix": {"members": 2, "average": 0.5, "classes": "known"},
    "gens": {"gens_init": "copy"},
    "gmoe": {"router": "flat", "average": "poly:2"},
    "ff": {"replay": True, "from_scratch": True},
}
WAITING = {"gens": {"waiting_time": 2}, "sm": {"waiting_time": 3, "average": "poly:2"}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """All weeks."""
    place = tmp_path_factory.mktemp("whole") / "shop"
    arrive(place, *range(1, WEEKS + 1))
    return place


def grow(folder, out, learner, ends, options, before_append=lambda out: None):
    """A run whose stream ended with each of the weeks in turn, the last `ends` being all."""
    record = None
    start = 1
    for end in ends:
        arrive(folder, *range(start, end + 1))
        if record:
            before_append(out)
        record = run(stream(folder), learner, out, append=True, **TINY | options)
        start = end + 1
    return record


def as_in_one_go(record):
    """What appends must not change: what was trained, the evaluation matrix, losses by image."""
    rows = []
    for row in numbers(record):
        extra = dict(row["extra"])
        raw = dict(extra.pop("raw", {}))
        raw.pop("error", None)  # `value` and this one are of the first command's periods
        extra["test_flops"] = 0.0
        rows.append(row | {"value": 0, "extra": extra, "raw": raw})
    losses = {}
    for path in sorted(record.directory.glob("held_out/*")):
        losses[path.name] = read_item_losses(path).tolist()
    return rows, losses


def random_ends(rng, waiting_time):
    """Weeks after which the stream was trained; with a waiting time, where a stage ends."""
    places = [t for t in range(waiting_time, WEEKS) if t % waiting_time == 0]
    return [*sorted(rng.sample(places, rng.randint(1, len(places)))), WEEKS]


def check_growth(shop, tmp_path, learner, options, seeds):
    whole = run(stream(shop), learner, tmp_path / "whole", **TINY | options)
    expected = as_in_one_go(whole)
    stages = -(-WEEKS // options.get("waiting_time", 1))
    assert len(expected[1]) == stages * WEEKS
    for seed in seeds:
        ends = random_ends(random.Random(seed), options.get("waiting_time", 1))
        place = tmp_path / f"grown_{seed}"
        grown = grow(place / "shop", place / "run", learner, ends, options)
        assert as_in_one_go(grown) == expected, ends
        assert not to_test(grown, WEEKS)
        cells = [(late["stage"], late["megabatch"]) for late in grown.late_evaluations]
        assert len(cells) == len(set(cells)) > 0


@pytest.mark.parametrize("learner", OPTIONS)
def test_a_grown_stream_has_the_record_of_one_made_in_one_go(shop, tmp_path, learner):
    check_growth(shop, tmp_path, learner, OPTIONS[learner], [sorted(OPTIONS).index(learner)])


@pytest.mark.slow
@pytest.mark.parametrize("learner", OPTIONS)
def test_appends_at_random_weeks_give_the_record_of_one_go(shop, tmp_path, learner):
    check_growth(shop, tmp_path, learner, OPTIONS[learner], range(10, 15))
    if learner in WAITING:
        check_growth(shop, tmp_path / "waiting", learner, WAITING[learner], range(10, 13))
