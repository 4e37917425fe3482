"""Broken input: cases drawn by Hypothesis, and a judge that notices what a command must not do.

`pytest -m slow tests/broken_input --hypothesis-seed S` draws cases of all commands.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.broken_input import judge
from tests.broken_input.cases import Cases, read_scenarios
from tests.broken_input.damage import KINDS

SCENARIOS = read_scenarios()
COMMANDS = sorted({scenario.command for scenario in SCENARIOS})
DRAWN = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": HealthCheck,
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """`cases(command, ...)`: cases of some commands; they share the sound inputs."""
    folder = tmp_path_factory.mktemp("broken_input")
    return lambda *commands: Cases(
        folder, [scenario for scenario in SCENARIOS if scenario.command in commands]
    )


def run(drawn, examples, **options):
    """Draw and run cases, the same ones each time if `derandomize`."""
    ended = []

    @settings(max_examples=examples, **options, **DRAWN)
    @given(st.data())
    def check(data):
        ended.append(drawn.run(data.draw))

    check()
    return ended


def test_a_few_cases_pass(cases):
    ended = run(cases("data", "inspect", "cancel"), 10, derandomize=True)
    assert [case for case in ended if case.problem] == []
    assert 2 in {case.code for case in ended}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_many_cases_of_a_command_pass(cases, command):
    assert [case for case in run(cases(command), 20) if case.problem] == []


HARM = {
    "raise KeyError('x')": "traceback: KeyError: 'x'",
    "os.mkdir('../executed')": "EXECUTED the input",
    "open('stream/dict.txt', 'a').write('x')": "changed work/stream/dict.txt",
    "os.remove('../precious/file')": "removed precious/file",
    "open('../tmp/left', 'w')": "left tmp/left",
    "os.kill(os.getpid(), 9)": "exit code -9",
    "print('error: no', file=sys.stderr); sys.exit(2)": "does not name",
    "sys.exit(2)": "0 lines of errors",
    "bytearray(1 << 30)": "traceback: MemoryError",
    "open('x', 'wb').write(bytes(1 << 29))": "traceback: ",
    "print('x.py:1: UserWarning: careful')": "warning: x.py:1: UserWarning: careful",
    "print('other')": "another result",
    "pass": "",
}
"""What a command does once its input is damaged, and what the judge says."""


@pytest.mark.parametrize("harm", HARM)
def test_the_judge_notices(cases, monkeypatch, harm):
    drawn = cases("inspect")
    scenario = next(candidate for candidate in drawn.scenarios if "--verify" in candidate.words)
    drawn.scenarios = [scenario._replace(several=False, checked=["*"], result="printed")]
    drawn.baselines[scenario.words] = judge.Ended(0), ""
    drawn.inputs.get("stream")
    monkeypatch.setattr("tests.broken_input.cases.KINDS", {"truncated": KINDS["truncated"]})
    code = compile(harm, "planted", "exec")
    monkeypatch.setattr(judge, "main_of", lambda words: lambda: exec(code, {"os": os, "sys": sys}))
    (ended,) = run(drawn, 1, derandomize=True)
    assert HARM[harm] in ended.problem
    assert HARM[harm] or not ended.problem
