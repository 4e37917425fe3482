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


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Command lines that the demo would run; nothing runs."""
    found: list[str] = []
    monkeypatch.setattr(demo, "run", found.extend)
    return found


def write_changelogs(out: Path, words: dict[int, int], documents: int = 1) -> None:
    """What `alma corpus` would write: words of each year; from 2020 on in one document."""
    path = out / "corpus/changelogs.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for year, size in words.items():
            for _ in range(documents if year < 2020 else 1):
                record = {"date": f"{year}-05-01T00:00:00+00:00", "text": "a " * (size // documents)}
                file.write(json.dumps(record) + "\n")


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


def test_the_text_is_dated_where_the_machine_has_enough(started, monkeypatch, tmp_path):
    """Without packages' changelogs, or with too few of them, it is documentation."""
    monkeypatch.setattr(demo, "CHANGELOGS", tmp_path / "doc")
    out, enough = tmp_path / "a b", demo.LEAST_WORDS
    pydoc = f"alma corpus pydoc --out '{out}/corpus/pydoc.jsonl'"
    assert demo.corpus(out) == (f"{out}/corpus/pydoc.jsonl", None)
    assert started == [pydoc]
    (tmp_path / "doc/bash").mkdir(parents=True)
    (tmp_path / "doc/bash/changelog.Debian.gz").touch()
    write_changelogs(out, {2010: enough, 2011: enough, 2012: enough, 2013: enough - 1, 2014: enough})
    assert demo.corpus(out) == (f"{out}/corpus/pydoc.jsonl", None)
    changelogs = f"alma corpus debian-changelogs {tmp_path}/doc --out '{out}/corpus/changelogs.jsonl'"
    assert started[1:] == [changelogs, pydoc]
    write_changelogs(tmp_path / "new", dict.fromkeys(range(2015, 2024), 2 * enough), documents=2)
    assert demo.corpus(tmp_path / "new") == (f"{tmp_path}/new/corpus/changelogs.jsonl", (2015, 2018))
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
