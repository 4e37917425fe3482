"""The schedule of Algorithm 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stages import Stage, stages


@st.composite
def streams(draw):
    """(B, w) with 1 <= w <= B."""
    megabatches = draw(st.integers(1, 60))
    return megabatches, draw(st.integers(1, megabatches))


def test_stages():
    """The last stage may be short."""
    assert stages(5, 2) == [Stage(0, 1, 2, (1, 2)), Stage(1, 3, 4, (3, 4)), Stage(2, 5, 5, (5,))]


def test_a_replay_by_share_comes_from_all_mega_batches_or_from_those_of_the_stage_before():
    assert [stage.earlier for stage in stages(5, 2, replay_from="all")] == [
        (),
        (1, 2),
        (1, 2, 3, 4),
    ]
    assert [stage.earlier for stage in stages(5, 2, replay_from="recent")] == [(), (1, 2), (3, 4)]


@given(streams())
def test_every_megabatch_is_trained_on_exactly_once_in_order(stream):
    megabatches, waiting_time = stream
    plan = stages(megabatches, waiting_time)
    assert [t for stage in plan for t in stage.train_on] == list(range(1, megabatches + 1))
    assert [stage.index for stage in plan] == list(range(-(-megabatches // waiting_time)))
    assert all(len(stage.train_on) == waiting_time for stage in plan[:-1])
    assert all(
        (stage.first, stage.last) == (stage.train_on[0], stage.train_on[-1]) for stage in plan
    )


@given(streams())
def test_replay_is_the_union_of_all_arrivals_at_the_same_times(stream):
    seen: set[int] = set()
    for plain, replayed in zip(stages(*stream), stages(*stream, replay=True), strict=True):
        seen |= set(plain.train_on)
        assert list(replayed.train_on) == sorted(seen)
        assert (replayed.first, replayed.last) == (plain.first, plain.last)


@pytest.mark.parametrize(
    ("megabatches", "waiting_time", "says"),
    [(0, 1, "at least 1"), (4, 0, "use 1"), (4, -2, "use 1"), (4, 5, "use at most 4")],
)
def test_impossible_schedules_are_errors_with_advice(megabatches, waiting_time, says):
    with pytest.raises(UserError, match=says):
        stages(megabatches, waiting_time)
