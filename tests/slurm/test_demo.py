"""The commands of the demo: a script, run here with a program in place of `alma` that notes its
words."""

import json
import os
import subprocess
from pathlib import Path

from launcher import read_requests

from data_prep.__main__ import parser
from data_prep.corpus.__main__ import parser as corpus_parser
from slurm.lm.plan import make_plan
from vision.run import parser as vision_parser
from vision.sections import read_sections
from vision.sweep import jobs_of

SCRIPT = Path(__file__).parents[2] / "experiments/demo.sh"
ALMA = """#!/usr/bin/env python3
import json, os, pathlib, sys, time
kind = sys.argv[1]
with open("words", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
deadline = time.monotonic() + 60
def together():
    lines = pathlib.Path("words").read_text().splitlines()
    return sum(json.loads(line)[0] == kind for line in lines)
while kind in ("train", "images") and together() < 3:
    assert time.monotonic() < deadline, "the others have not started"
    time.sleep(0.01)
if os.environ.get("FAILS", "-") in sys.argv:
    sys.exit(3)
"""


def demo(place, **environment):
    """Exit code of the demo, and the words of each command."""
    (place / "bin").mkdir()
    (place / "bin/alma").write_text(ALMA)
    (place / "bin/alma").chmod(0o755)
    everything = os.environ | {"PATH": f"{place}/bin:{os.environ['PATH']}"} | environment
    done = subprocess.run(
        ["sh", SCRIPT, "a b"], cwd=place, env=everything, capture_output=True, text=True
    )
    return done.returncode, [
        json.loads(line) for line in (place / "words").read_text().splitlines()
    ]


def test_the_programs_accept_the_commands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, lines = demo(tmp_path)
    assert (code, len(lines)) == (0, 9)
    corpus, prepare, *middle, report = lines
    assert corpus_parser().parse_args(corpus[1:]).out == "a b/corpus/pydoc.jsonl"
    stream = parser().parse_args(prepare[1:])
    assert (stream.corpus, stream.out) == (["a b/corpus/pydoc.jsonl"], Path("a b/stream"))
    assert stream.mega_batches == 4
    plans = [make_plan(read_requests(line[1:])[0], 4) for line in middle if line[0] == "train"]
    of = {plan.out: plan.config for plan in plans}
    assert of[Path("a b/runs/gmoe")]["grow_experts"] == [2, 2, 4]
    assert of[Path("a b/runs/anytime")]["schedule"] == "continuous"
    assert of[Path("a b/runs/sm")]["learner"] == "sm"
    sweeps = [read_sections(vision_parser(), line[1:])[0] for line in middle if line[0] == "images"]
    counts = {sweep.out: len(jobs_of(sweep)) for sweep in sweeps}
    assert counts == {
        Path("a b/runs", name): n
        for name, n in (("digits", 8), ("digits_anytime", 2), ("drift", 4))
    }
    assert report == ["report", "a b/runs", "--out", "a b/report"]


def test_a_failure_ends_the_demo_after_the_commands_beside_it(tmp_path):
    code, lines = demo(tmp_path, FAILS="gmoe")
    assert code == 3
    assert [line[0] for line in lines] == ["corpus", "data", "train", "train", "train"]
