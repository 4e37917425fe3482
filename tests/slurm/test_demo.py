"""The commands of the demo."""

import json
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


@pytest.mark.parametrize("span", [None, (2016, 2019)])
def test_the_programs_accept_the_commands(monkeypatch, tmp_path, span):
    monkeypatch.chdir(tmp_path)
    lines = [line for step in demo.steps(Path("a b"), "a b/text.jsonl", span) for line in step]
    prepare, *launches, images, preset, drift, report = map(shlex.split, lines)
    stream = parser().parse_args(prepare[2:])
    assert (stream.corpus, stream.out) == (["a b/text.jsonl"], Path("a b/stream"))
    assert stream.mega_batches == (None if span else 4)
    dates = ("year", "2016", "2019") if span else (None,) * 3
    assert (stream.by, getattr(stream, "from"), stream.until) == dates
    plans = [make_plan(read_requests(launch[2:])[0], demo.PERIODS) for launch in launches]
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


def test_the_text_is_dated_where_the_machine_has_enough(monkeypatch, tmp_path):
    """Four years in a row with enough words, those with most documents; else documentation of Python."""
    started: list[str] = []
    monkeypatch.setattr(demo, "run", started.extend)
    monkeypatch.setattr(demo, "CHANGELOGS", tmp_path)
    changelogs, pydoc = (tmp_path / f"corpus/{name}.jsonl" for name in ("changelogs", "pydoc"))
    assert demo.corpus(tmp_path) == (str(pydoc), None)
    (tmp_path / "bash").mkdir()
    (tmp_path / "bash/changelog.Debian.gz").touch()
    changelogs.parent.mkdir()
    half = "a " * (demo.LEAST_WORDS // 2)
    for last, span in ((2012, None), (2016, (2012, 2015))):  # of one document from 2016 on
        years = [*range(2010, last), *range(2010, last), *[2016] * (last == 2016)]
        texts = [{"date": f"{year}-05-01", "text": half * (1 + (year == 2016))} for year in years]
        texts += [{"date": "2015-05-01", "text": "a"}]
        changelogs.write_text("".join(json.dumps(text) + "\n" for text in texts))
        assert demo.corpus(tmp_path) == (str(changelogs if span else pydoc), span)
    for line in started:
        assert corpus_parser().parse_args(shlex.split(line)[2:])


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
