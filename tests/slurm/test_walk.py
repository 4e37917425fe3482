"""The way of `alma train` from words to a plan, read in the order in which it runs.

A reader follows one --dry-run through slurm/. Each call of a function that she has not read yet takes her to
its module. A return is such a call into a module that she had left for another one. Methods of the data that
the stages pass on (requests, plans, estimates) count as read with their class.
"""

import sys
from itertools import groupby
from pathlib import Path

from launcher import FAKE, ROOT, call, make

import slurm.launch
import slurm.lm.launcher  # imported here, so that class bodies are no calls

STAGES = "launch options launcher request checks placement plan sharing announce estimate".split()
"""The modules of the way: each hands its result to the next."""


def walk(main, monkeypatch, *words) -> list[Path]:
    """The modules of slurm/ in the order of first calls of their functions, without repeats in a row."""
    seen = {}

    def note(frame, event, _):
        code = frame.f_code
        inside = code.co_filename.startswith(str(ROOT / "slurm"))
        if event == "call" and inside and code.co_qualname == code.co_name:
            seen.setdefault(code, Path(code.co_filename))

    sys.setprofile(note)
    try:
        assert call(main, monkeypatch, *words) == 0
    finally:
        sys.setprofile(None)
    return [path for path, _ in groupby(seen.values())]


def test_the_way_from_words_to_a_plan_is_straight(tmp_path, monkeypatch):
    """It was 16 returns through 17 modules when launcher, request, flags and plan called each other."""
    made = make(tmp_path)
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{ROOT}")
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    words = ["stream", "--learner", "gmoe", "--out", "run", "--dry-run"]
    stays = walk(slurm.launch.main, monkeypatch, *words)
    returns = [path for place, path in enumerate(stays) if path in stays[:place]]
    assert len(returns) <= 4, [path.name for path in stays]
    passed = list(dict.fromkeys(path.stem for path in stays if path.stem in STAGES))
    assert passed == STAGES
