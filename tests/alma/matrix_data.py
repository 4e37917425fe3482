"""Dated records, and a program that tests models on them, for the tests of `alma matrix`."""

import json
from pathlib import Path

import pytest

from slurm.matrix.__main__ import main

WORDS = "the a naïve model learns data month old new train test drift news text token".split()
EVAL = """\
import json, os, sys, time
from pathlib import Path
from alma.trainer import StageTask

task = StageTask.read(sys.argv[-1])
plan = Path(__file__).with_name("kills.json")
log = Path(__file__).with_name("measured.txt")


def die(moment):
    kills = json.loads(plan.read_text()) if plan.exists() else []
    count = len(log.read_text().splitlines()) if log.exists() else 0
    if [count, moment] in kills:
        kills.remove([count, moment])
        plan.write_text(json.dumps(kills))
        os.kill(os.getppid(), 9)
        time.sleep(60)


def value_of(model, part):
    records = list(part.read_documents())
    level = sum(map(ord, model)) % 7
    return 1 + level / 10 + sum(record["label"] for record in records) / 100, len(records)


losses = {}
for part in task.evaluate:
    die("before")
    losses[part.name] = value_of(os.path.basename(task.members[0]), part)
    if "--parts" in sys.argv:
        task.save_part(part.name, *losses[part.name])
    with log.open("a") as file:
        file.write(f"{task.members[0]} {part.name}\\n")
    die("after")
task.finish(losses, parameters=1)
die("finished")
"""
"""A program that logs what it measures, and kills `alma matrix` at the moments of kills.json."""


def records(months: int = 4) -> list[dict]:
    """A few dated records of each month of 2024, the newest first."""
    lines = []
    for month in range(months, 0, -1):
        for day in range(1, 5):
            count = 3 + (5 * month + 3 * day) % 17
            text = " ".join(WORDS[(day * k + month) % len(WORDS)] for k in range(count))
            lines.append({"date": f"2024-{month:02}-{day:02}", "text": text, "label": month})
    return lines


def write_records(file: Path, lines: list[dict]) -> None:
    """Write records as JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def matrix_place(tmp_path, monkeypatch) -> Path:
    """The current folder, with data and a program."""
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "news.jsonl", records())
    (tmp_path / "eval.py").write_text(EVAL)
    return tmp_path


@pytest.fixture
def matrix(monkeypatch, capsys):
    """Call `alma matrix`; returns its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["alma matrix", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run
