"""Chaos: a few runs, and a harness that notices what faults must not do.

In processes of their own: the harness adopts and reaps orphans.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["data_prep", "images", "language", "month"])
def test_runs_under_faults_equal_undisturbed_ones(tmp_path, tool):
    line = [sys.executable, "-m", "tests.chaos", tool, "--minutes", "0", "--seed", "7"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("in 1 runs, 0 differences")
    assert not list(tmp_path.iterdir())


PLANTED = """
import json, pathlib, sys
from random import Random
from tests.chaos import __main__ as chaos, faults, workloads

chaos.REPEATS, faults.GRACE = 1, 3
workloads.WORKLOADS["images"] = lambda rng: workloads.Workload(("images",), (), workloads.streams)
runs = chaos.Runs(pathlib.Path(sys.argv[1]), "images", ["SIGKILL to process"])

class Late(Random):  # after all changes of files
    random = lambda self: 0.0
    randint = lambda self, first, last: last

for harm in sys.argv[2:]:
    faults.RunningCommand.program = (sys.executable, "-c", "import os, subprocess, time\\n" + harm)
    print(json.dumps(runs.run(Late(0)).problem))
"""
HARM = {
    "open('x', 'w').write('same')": "",
    "time.sleep(.1); open('x', 'w').write(str(os.getpid()))": "other results: ['x']",
    "time.sleep(.1); open(f'x{os.getpid()}', 'w')": "files of one run only: ['x",
    "open(os.environ['TMPDIR'] + '/x', 'w')": "temporary files left: ['x']",
    "subprocess.Popen(['sleep', '100'])": "left processes: ",
    "time.sleep(.1); raise KeyError('x')": "KeyError: 'x'",
    "time.sleep(.1); raise SystemExit(1)": "exit code 1, 0 lines of errors",
    "open('../x', 'w').write(f'{os.getpid()}\\n'); "
    "os.rename('../x', 'results.jsonl'); time.sleep(1)": "was done again or lost",
}
"""What a command does, and what the harness says."""


def test_the_harness_notices(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, tmp_path, *HARM], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    problems = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    for problem, (harm, message) in zip(problems, HARM.items(), strict=True):
        assert message in problem, harm
        assert message or not problem, harm
