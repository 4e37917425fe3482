"""The commands of the demo."""

import shlex
from pathlib import Path

import pytest
from launcher import read_requests

from data_prep.__main__ import parser
from data_prep.corpus.__main__ import parser as corpus_parser
from slurm import demo
from slurm.lm.plan import make_plan
from vision.run import jobs_of
from vision.run import parser as vision_parser


def test_the_programs_accept_the_commands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = [line for step in demo.steps(Path("a b")) for line in step]
    corpus, prepare, *launches, images, preset, drift, report = map(shlex.split, lines)
    assert corpus_parser().parse_args(corpus[2:]).out == "a b/corpus/pydoc.jsonl"
    stream = parser().parse_args(prepare[2:])
    assert (stream.corpus, stream.out) == (["a b/corpus/pydoc.jsonl"], Path("a b/stream"))
    assert stream.mega_batches == 4
    plans = [make_plan(read_requests(launch[2:])[0], 4) for launch in launches]
    assert [plan.config["learner"] for plan in plans] == ["sm", "gmoe", "sm"]
    assert plans[2].config["schedule"] == "continuous"
    assert plans[1].config["grow_experts"] == [2, 2, 4]
    assert all(plan.out.parent == Path("a b/runs") for plan in plans)
    sweep = vision_parser().parse_args(images[2:])
    assert len(jobs_of(sweep)) == 8
    assert len(jobs_of(vision_parser().parse_args(preset[2:]))) == 2
    drifting = vision_parser().parse_args(drift[2:])
    assert len(jobs_of(drifting)) == 4
    assert sweep.out.parent == drifting.out.parent == Path("a b/runs")
    assert report == ["alma", "report", "a b/runs", "--out", "a b/report"]


def test_commands_of_a_step_run_concurrently_and_a_failure_ends_the_demo(monkeypatch, tmp_path):
    (tmp_path / "meet.py").write_text(
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:3]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "sys.exit(int(sys.argv[3]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "OWN_MODULES", {"PYTHONPATH": str(tmp_path)})
    demo.run(["meet here there 0", "meet there here 0"])
    with pytest.raises(SystemExit) as stop:
        demo.run(["meet here there 0", "meet there here 3"])
    assert stop.value.code == 3
