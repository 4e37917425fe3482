"""The way of `alma train` from words to a plan, read in the order in which it runs.

A reader follows one --dry-run. Each call takes her to the module of the function, method or
property, once for each place of the text that calls; a return is a call into a module that she had
left for another one.
"""

import sys
from itertools import groupby
from pathlib import Path

from launcher import FAKE, ROOT, call, make, read_requests

import slurm.launch
import slurm.lm.launcher  # imported here, so that class bodies are no calls
from slurm.lm.plan import make_plan

STAGES = "launch options launcher request checks placement plan sharing announce estimate".split()
"""The modules of the way: each hands its result to the next."""
WORDS = ["stream", "--learner", "gmoe", "--out", "run"]


def walk(run, methods: bool) -> list[str]:
    """The modules of slurm/ and of alma.options in the order of calls, without repeats in a row.

    One call for each place of the text that calls;
    with `methods` also those of methods and properties.
    """
    seen = {}

    def note(frame, event, _):
        code = frame.f_code
        caller = frame.f_back
        inside = code.co_filename.startswith((str(ROOT / "slurm"), str(ROOT / "alma/options.py")))
        if event == "call" and inside and (methods or code.co_qualname == code.co_name):
            seen.setdefault((caller.f_code, caller.f_lineno, code), Path(code.co_filename).stem)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [module for module, _ in groupby(seen.values())]


def returns(modules: list[str]) -> int:
    return sum(module in modules[:place] for place, module in enumerate(modules))


def test_a_request_becomes_a_plan_without_detours():
    """It was 33 returns between plan, settings and options."""
    (request,) = read_requests(WORDS)
    modules = walk(lambda: make_plan(request, 4), methods=True)
    assert returns(modules) <= 9, modules
    assert set(modules) == {"plan", "options", "growth"}


def test_the_way_from_words_to_a_plan_is_straight(tmp_path, monkeypatch):
    steps = make(tmp_path)
    monkeypatch.chdir(steps.folder)
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{ROOT}")
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    codes = []
    words = [*WORDS, "--dry-run"]
    modules = walk(
        lambda: codes.append(call(slurm.launch.main, monkeypatch, *words)), methods=False
    )
    assert codes == [0]
    assert [module for module in dict.fromkeys(modules) if module in STAGES] == STAGES
