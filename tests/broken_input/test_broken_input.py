"""Broken input: a few cases, and a judge that notices what a command must not do."""

import os
import sys

import pytest

from tests.broken_input import judge
from tests.broken_input.__main__ import Cases
from tests.broken_input.breakages import WAYS
from tests.broken_input.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """`cases(command)`: cases of the commands that are quick to start; they share the sound inputs."""
    folder = tmp_path_factory.mktemp("broken_input")

    def make(*commands):
        return Cases(folder, 0, [each for each in SCENARIOS if each.command in commands], list(WAYS))

    return make


def test_a_few_cases_pass(cases):
    drawn = cases("data", "inspect", "cancel")
    outcomes = [drawn.run(number) for number in range(10)]
    assert not [each for each in outcomes if each.problem]
    assert {each.kind for each in outcomes} == {"result", "error"}
    assert drawn.run(3) == outcomes[3]


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
def test_the_judge_notices(cases, monkeypatch, harm, told):
    """A command that does harm once its input is broken."""
    drawn = cases("inspect")
    drawn.scenarios = [each for each in drawn.scenarios if "stream --workers 1 --verify" in each.words]
    drawn.ways = ["truncated"]
    drawn.baseline(drawn.scenarios[0])
    code = compile(harm, "planted", "exec")
    plant = lambda words: lambda: exec(code, {"os": os, "sys": sys})  # noqa: E731
    monkeypatch.setattr(judge, "main_of", plant)
    outcome = drawn.run(0)
    assert outcome.kind == "failure"
    assert told in outcome.problem


def test_the_judge_notices_a_wrong_result(cases, monkeypatch):
    drawn = cases("inspect")
    scenario = drawn.scenarios[0]._replace(checked=("*",), result="printed")
    drawn.scenarios, drawn.ways = [scenario], ["bits flipped"]
    drawn.baselines[scenario] = judge.Ended(0), "other"
    monkeypatch.setattr(judge, "main_of", lambda words: lambda: None)
    assert drawn.run(0).problem == "another result from a damaged file, without an error"
    drawn.baselines[scenario] = judge.Ended(0), ""
    assert drawn.run(0).kind == "result"
