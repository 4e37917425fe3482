"""Data sets that the processes of a sweep share."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch

from vision import data
from vision.shared import SharedMemory

SPAWN = multiprocessing.get_context("spawn")


def filled(allocate, value=3):
    """One array in place, one from elsewhere."""
    one = allocate((1000, 3, 7))
    one[:] = value
    return [one, np.arange(200, dtype=np.uint8).reshape(2, 100)], {"labels": [value]}


def check(found):
    (one, two), facts = found
    assert one.shape == (1000, 3, 7)
    assert (one == 3).all()
    assert (two == np.arange(200).reshape(2, 100)).all()
    assert facts == {"labels": [3]}


def late(allocate):
    raise AssertionError("filled a second time")


def get_in_child(memory, queue, function):
    (one, two), _ = found = memory.get(function)
    check(found)
    one[0] = two[0] = 99  # in a private copy
    queue.put(os.getpid())


def slowly(allocate):
    time.sleep(0.5)
    return filled(allocate)


def test_the_first_process_fills_it_and_others_wait_and_read():
    memory, queue = SharedMemory(), SPAWN.Queue()
    children = [SPAWN.Process(target=get_in_child, args=(memory, queue, slowly)) for _ in range(2)]
    for child in children:
        child.start()
    assert len({queue.get(timeout=100) for _ in children}) == 2
    for child in children:
        child.join()
    check(memory.get(late))


def test_after_an_error_the_next_call_fills_it():
    def failing(allocate):
        filled(allocate)
        raise ValueError("half")

    memory = SharedMemory()
    with pytest.raises(ValueError, match="half"):
        memory.get(failing)
    check(memory.get(filled))
    check(memory.get(late))


def test_a_shared_data_set_is_the_same(monkeypatch):
    data.load.cache_clear()
    expected = data.load("digits")
    monkeypatch.setitem(data.SHARED, ("digits", "data", False, None), SharedMemory())
    monkeypatch.setattr(data, "_digits", lambda digits=data._digits, calls=[1]: calls.pop() and digits())
    for _ in range(2):
        data.load.cache_clear()
        found = data.load("digits")
        assert found.fingerprint == found.__dict__["fingerprint"] == expected.fingerprint
        assert (found.name, found.classes, found.mean, found.std) == (
            *(expected.name, expected.classes, expected.mean, expected.std),
        )
        for mine, other in zip((*found.train, *found.test), (*expected.train, *expected.test), strict=True):
            assert torch.equal(mine, other)
    data.load.cache_clear()
