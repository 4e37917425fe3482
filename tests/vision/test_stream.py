"""The partition of a data set into mega-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alma.stages import stages
from tests.vision.conftest import CPU
from vision.data import Dataset, Images, MegaBatchStream
from vision.stage_data import StageData


def numbered(n: int, name: str = "digits") -> Dataset:
    """n training images of 1 x 1 pixel; image i has label i,
    so labels show the indices of a stream."""
    images = Images(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.arange(n))
    return Dataset(name, images, images, n, (0.0,), (1.0,))


@pytest.mark.parametrize(("n", "megabatches"), [(60000, 500), (50000, 100), (1007, 13)])
def test_the_partition_equals_that_of_the_authors(n, megabatches):
    state = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(432)  # noqa: NPY002  as in their code
        expected = np.array_split(np.random.permutation(n), megabatches)  # noqa: NPY002
    finally:
        np.random.set_state(state)  # noqa: NPY002
    stream = MegaBatchStream(numbered(n), megabatches, seed=432)
    assert len(stream) == len(expected)
    for t, chunk in enumerate(expected, start=1):
        assert np.concatenate(stream.split(t)).tolist() == chunk.tolist()


def test_seeds_differ_and_global_random_states_are_not_used():
    before = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    first, same, reseeded = (MegaBatchStream(numbered(100), 5, seed=seed) for seed in (1, 1, 2))
    after = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert all(np.array_equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1])
    assert all(np.array_equal(a, b) for a, b in zip(first.parts, same.parts, strict=True))
    assert not np.array_equal(first.parts[0], reseeded.parts[0])


@st.composite
def _sizes(draw):
    n = draw(st.integers(2, 400))
    return n, draw(st.integers(1, n // 2)), draw(st.integers(0, 2**32 - 1))


@given(_sizes())
def test_any_partition_covers_each_index_once(sizes):
    n, megabatches, seed = sizes
    stream = MegaBatchStream(numbered(n), megabatches, seed)
    splits = [stream.split(t) for t in range(1, megabatches + 1)]
    assert sorted(np.concatenate([part for both in splits for part in both])) == list(range(n))
    lengths = [len(train) + len(valid) for train, valid in splits]
    assert len(lengths) == megabatches
    assert max(lengths) - min(lengths) <= 1
    assert all(len(valid) == max(1, (len(train) + len(valid)) // 10) for train, valid in splits)
    assert all(len(train) >= 1 for train, _ in splits)


def test_several_megabatches_together():
    stream = MegaBatchStream(numbered(90), 3)
    data = StageData(stream, stages(3, 2, replay=True), CPU)
    assert data.train(1).labels.tolist() == [i for part in stream.parts for i in part[:27]]
    assert data.valid(1).labels.tolist() == [i for part in stream.parts for i in part[27:]]


def test_number_of_megabatches(refused):
    assert len(MegaBatchStream("digits")) == 20  # the preset
    assert [len(part) for part in MegaBatchStream(numbered(30), 1).split(1)] == [27, 3]
    assert [len(part) for part in MegaBatchStream(numbered(7), 3).parts] == [3, 2, 2]
    for wrong in (0, -1, 4):
        line = refused(MegaBatchStream, numbered(7), wrong)
        assert line.startswith(f"{wrong} mega-batches of 7")
        assert "choose 1 to 3" in line
    assert "2 mega-batches of 1 training images: give more" in refused(
        MegaBatchStream, numbered(1), 2
    )
    for seed in (-1, 2**32):
        assert f"--seed {seed}" in refused(MegaBatchStream, numbered(9), 2, seed)


def test_parts_given(refused):
    stream = MegaBatchStream(numbered(9), parts=[[8, 0, 4], np.array([1, 2])])
    assert [[part.tolist() for part in stream.split(t)] for t in (1, 2)] == [
        [[8, 0], [4]],
        [[1], [2]],
    ]
    assert "at least 2 images" in refused(MegaBatchStream, numbered(9), parts=[[0, 1], [2]])
    assert "at least 2 images" in refused(MegaBatchStream, numbered(9), parts=[])
    for wrong in ([-1, 2], [3, 9], [0.0, 1.0], [True, False]):
        line = refused(MegaBatchStream, numbered(9), parts=[[1, 2], wrong])
        assert line.endswith("indices of training images, whole numbers from 0 to 8")
