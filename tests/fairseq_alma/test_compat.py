"""Work-arounds for fairseq that no other test of the plug-in shows."""

import random
from collections import OrderedDict

import pytest
from fairseq.logging.meters import AverageMeter, MetersDict

from fairseq_alma import compat


@pytest.fixture(scope="module")
def original():
    """fairseq's own insertion of a meter."""
    compat.install()
    return MetersDict.__setitem__.__wrapped__


def test_meters_have_the_order_of_fairseq(original):
    random.seed(0)
    for _ in range(50):
        pairs = (MetersDict(), MetersDict())
        for number in random.sample(range(1000), 30):
            priority = random.choice([0, 100, 100, 2000])
            original(pairs[0], f"m{number}", (priority, AverageMeter()))
            pairs[1].add_meter(f"m{number}", AverageMeter(), priority)
        assert [*pairs[0]] == [*pairs[1]]
        assert pairs[0].priorities == pairs[1].priorities
        assert pairs[0].state_dict() == pairs[1].state_dict()
    with pytest.raises(AssertionError, match="reassignment"):
        pairs[1].add_meter(f"m{number}", AverageMeter(), 0)


def test_a_meter_at_the_end_moves_no_other(monkeypatch):
    """A Switch layer logs hundreds of equal priority."""
    compat.install()
    moved = []
    monkeypatch.setattr(
        MetersDict,
        "move_to_end",
        lambda self, key: moved.append(key) or OrderedDict.move_to_end(self, key),
        raising=False,
    )
    meters = MetersDict()
    for number in range(50):
        meters.add_meter(f"share{number}", AverageMeter(), 2000)
    assert moved == []
    meters.add_meter("loss", AverageMeter(), 0)
    assert len(moved) == 50
    assert next(iter(meters)) == "loss"
