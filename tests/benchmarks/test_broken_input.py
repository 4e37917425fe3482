"""Broken input: a few cases, and a judge that notices what a command must not do."""

import dataclasses
import importlib
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def broken(monkeypatch):
    """The benchmark; an installed package is called `benchmarks` too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.broken_input")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keeps the sound inputs."""
    return tmp_path_factory.mktemp("broken_input")


@pytest.fixture
def cases(broken, folder):
    """`cases(command)`: cases of the commands that are quick to start."""

    def make(*commands):
        chosen = [each for each in broken.SCENARIOS if each.command in commands]
        return broken.Cases(folder, 0, chosen, list(broken.WAYS))

    return make


def test_a_few_cases_pass(broken, cases):
    drawn = cases("data", "inspect", "cancel")
    outcomes = [drawn.run(number) for number in range(10)]
    assert not [each for each in outcomes if each.problem]
    assert {each.kind for each in outcomes} == {"result", "error"}
    assert broken.table(outcomes).splitlines()[-1].split()[-4] == "10"
    assert drawn.run(3).file == outcomes[3].file
    assert drawn.run(3).way == outcomes[3].way


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("raise KeyError('x')", "traceback: KeyError: 'x'"),
        ("os.mkdir('../executed')", "EXECUTED the input"),
        ("open('stream/dict.txt', 'a').write('x')", "changed work/stream/dict.txt"),
        ("os.remove('../precious/file')", "removed precious/file"),
        ("open('../tmp/left', 'w')", "left tmp/left"),
        ("sys.exit(1)", "exit code 1"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("print('error: no', file=sys.stderr); sys.exit(2)", "does not name"),
        ("sys.exit(2)", "0 lines of errors"),
        ("bytearray(1 << 30)", "traceback: MemoryError"),
        ("open('x', 'wb').write(bytes(1 << 29))", "traceback: "),
        ("print('x.py:1: UserWarning: careful')", "warning: x.py:1: UserWarning: careful"),
    ],
)
def test_the_judge_notices(broken, cases, monkeypatch, harm, told):
    """A command that does harm once its input is broken."""
    drawn = cases("inspect")
    drawn.scenarios = [each for each in drawn.scenarios if "stream --workers 1 --verify" in each.words]
    drawn.ways = ["truncated"]
    drawn._baseline(drawn.scenarios[0])
    code = compile(harm, "planted", "exec")
    plant = lambda words: lambda: exec(code, {"os": os, "sys": sys})  # noqa: E731
    monkeypatch.setattr(broken.judge, "main_of", plant)
    outcome = drawn.run(0)
    assert outcome.kind == "failure"
    assert told in outcome.problem


def test_the_judge_notices_a_wrong_result(broken, cases, monkeypatch):
    drawn = cases("inspect")
    scenario = dataclasses.replace(drawn.scenarios[0], checked=("*",), result=lambda folder, ended: "broken")
    drawn.scenarios, drawn.ways = [scenario], ["bits flipped"]
    drawn._baselines[scenario] = broken.judge.Ended(0, "", "", 0), "sound"
    monkeypatch.setattr(broken.judge, "main_of", lambda words: lambda: None)
    assert drawn.run(0).problem == "another result from a damaged file, without an error"
    drawn._baselines[scenario] = broken.judge.Ended(0, "", "", 0), "broken"
    assert drawn.run(0).kind == "result"
