"""Shared by the tests of image learners."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from alma.errors import UserError
from alma.records import Run
from tests.machine_fields import without_machine_fields
from vision import data
from vision.run import main, parser
from vision.sections import read_sections
from vision.sweep import jobs_of
from vision.train import loss_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def numbers(run):
    """The rows of a run, or of a folder, without those fields that differ between machines."""
    rows = (run if isinstance(run, Run) else Run.read(run)).rows
    return without_machine_fields(rows)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def started(model, seed=0):
    """The model with the initial weights of seed + k in member k."""
    for member in range(model.members):
        model.reset(seeded(seed + member), member)
    return model


def flops_of(model, x, labels):
    """FLOPs of a forward and a backward pass, as torch counts them."""
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model(x), labels).sum()
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(loss, list(model.parameters()))
    return forward.get_total_flops(), backward.get_total_flops()


def equal(one, other):
    """Whether two sequences of tensors, or two state_dicts, are equal bit for bit."""
    if isinstance(one, dict):
        one, other = one.values(), other.values()
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def picture(path, pixels):
    """Write an image file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def python(*words, folder=ROOT):
    """Run Python in a folder; it must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "check": True, "timeout": 200}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, **options)


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["vision/run.py", *map(str, words)])
    main()


def jobs(*words):
    return jobs_of(*read_sections(parser(), [*map(str, words)]))


def error_of(monkeypatch, capsys, *words):
    """The line that the command prints before it exits with 2."""
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, *words)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.fixture
def refused():
    """`refused(function, ...)` calls the function and returns the one-line message of its
    UserError."""

    def message(function, *arguments, **options) -> str:
        with pytest.raises(UserError) as caught:
            function(*arguments, **options)
        line = str(caught.value)
        assert "\n" not in line
        return line

    return message


@pytest.fixture
def no_cache():
    """Data sets are read anew."""
    data.load.cache_clear()
    yield
    data.load.cache_clear()


@pytest.fixture
def tree(tmp_path):
    """A folder of 70 + 4 images of 6 x 4 pixels in two classes, more than one chunk of the
    decoder."""
    for part, n in (("train", 35), ("test", 2)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(n):
                colour = np.full(
                    (6, 4, 3), [i, 100 * label, {"train": 1, "test": 2}[part]], dtype=np.uint8
                )
                picture(tmp_path / "tree" / part / name / f"{i:02}.png", colour)
    return tmp_path / "tree"
